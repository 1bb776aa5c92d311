"""`eval` and `generate`: what a model, dense or compressed, makes of a text."""

import argparse
from typing import Any

from neuronmm_ops.cli.console import show_fields, stderr
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    description = "token perplexity on a text"
    options = ("model", "--text", "--seqlen", "--dtype", "--device")
    add_command(commands, "eval", _evaluate, show_fields, description, *options)

    description, options = "continue a prompt, greedily", ("model", "--dtype", "--device")
    command = add_command(commands, "generate", _generate, _show_text, description, *options)
    command.add_argument("--prompt", required=True)
    command.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message: put it into the tokenizer's chat template",
    )
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N")


def transformers_models() -> Any:
    """Return `neuronmm_ops.hf`, without progress bars. Raises ImportError that names the extra."""
    try:
        from transformers.utils import logging

        from neuronmm_ops import hf
    except ImportError as error:
        raise ImportError(
            f"{error.name} is not installed; run: pip install 'neuronmm-ops[hf]'"
        ) from error
    # Its progress bars and hints would bury ours; what matters is raised by hf.load.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return hf


def _evaluate(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    from neuronmm_ops.eval import encode_documents, token_perplexity

    text = hf.read_text(options.text)
    with stderr.status(f"loading {options.model}"):
        model = hf.load_computing(options.model, options.dtype, options.device)
        ids = encode_documents(hf.load_tokenizer(options.model), [text])
    with progress_bars() as progress:
        result = token_perplexity(model, ids, options.seqlen, progress)
    return {
        "model": options.model,
        "text": str(options.text),
        "ppl_token": result.ppl_token,
        "tokens": result.tokens,
        "seqlen": result.seqlen,
        "dtype": name_of(model.config.dtype),
        "compute_dtype": name_of(model.dtype),
    }


def _generate(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    with stderr.status(f"loading {options.model}"):
        model = hf.load_computing(options.model, options.dtype, options.device)
        tokenizer = hf.load_tokenizer(options.model)
    with stderr.status(f"generating up to {options.max_new_tokens} tokens"):
        text, new_tokens = hf.generate_text(
            model, tokenizer, options.prompt, options.max_new_tokens, options.chat
        )
    return {
        "model": options.model,
        "prompt": options.prompt,
        "chat": options.chat,
        "text": text,
        "new_tokens": new_tokens,
        "compute_dtype": name_of(model.dtype),
    }


def _show_text(document: dict[str, Any]) -> None:
    print(document["text"] if document["chat"] else document["prompt"] + document["text"])
