"""`generate`: continue a prompt, or answer a chat message, greedily."""

import argparse
from typing import Any

from neuroncore.cli.console import stderr
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.cli.workers import launched
from neuronmm_ops.extras import transformers_models


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description, options = "continue a prompt, greedily", ("model", "--dtype", "--device")
    example = "small --prompt 'The quick' --new-tokens 32"
    command = add_command(
        commands, "generate", _generate, _show, description, *options, example=example
    )
    command.add_argument("--prompt", required=True, help="the text to continue")
    command.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message: put it into the tokenizer's chat template",
    )
    command.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="new tokens at most (default 64)"
    )


def _generate(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    from neuronmm_ops.ops.backends.cpu import name_of

    if options.new_tokens < 1:
        raise ValueError(f"--new-tokens must be at least 1, got {options.new_tokens}")
    with stderr.status(f"loading {options.model}"):
        model = hf.load_packed(options.model, options.dtype, options.device, launched())
        tokenizer = hf.load_tokenizer(options.model)
    with stderr.status(f"generating up to {options.new_tokens} tokens"):
        text, new_tokens = hf.generate_text(
            model, tokenizer, options.prompt, options.new_tokens, options.chat
        )
    return {
        "model": options.model,
        "prompt": options.prompt,
        "chat": options.chat,
        "text": text,
        "new_tokens": new_tokens,
        "compute_dtype": name_of(model.dtype),
    }


def _show(document: dict[str, Any]) -> None:
    print(document["text"] if document["chat"] else document["prompt"] + document["text"])
