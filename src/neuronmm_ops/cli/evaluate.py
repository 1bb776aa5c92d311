"""`eval`: token perplexity of a model on a text."""

import argparse
from pathlib import Path
from typing import Any

from neuronmm_ops.cli.console import show_fields, stderr
from neuronmm_ops.cli.library import transformers_models
from neuronmm_ops.cli.parser import add_command, add_computing, add_model
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    command = add_command(commands, "eval", _evaluate, show_fields, "token perplexity on a text")
    add_model(command)
    command.add_argument("--text", type=Path, required=True, metavar="FILE")
    command.add_argument(
        "--seqlen", type=int, help="tokens in a block (default: 2048, or the model's limit)"
    )
    add_computing(command)


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
        "dtype": hf.computing.name_of(model.config.dtype),
        "compute_dtype": hf.computing.name_of(model.dtype),
    }
