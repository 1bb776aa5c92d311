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
    command.add_argument(
        "--backend",
        choices=("torch", "simulated"),
        default="torch",
        help="simulated: a NeuronCore decodes, with a modelled time",
    )


def _generate(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    from neuronmm_ops.ops.backends.cpu import name_of

    if options.new_tokens < 1:
        raise ValueError(f"--new-tokens must be at least 1, got {options.new_tokens}")
    if options.backend == "simulated":
        return _simulate(hf, options)
    with stderr.status(f"loading {options.model}"):
        model = hf.load_packed(options.model, options.dtype, options.device, launched())
        tokenizer = hf.load_tokenizer(options.model)
    with stderr.status(f"generating up to {options.new_tokens} tokens"):
        text, new_tokens = hf.generate_text(
            model, tokenizer, options.prompt, options.new_tokens, options.chat
        )
    return _document(options, text, new_tokens, name_of(model.dtype))


def _simulate(hf: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Decode on the simulated core, in the checkpoint's dtype unless another is given."""
    from neuronmm_ops.ops.backends.cpu import name_of

    if options.device != "cpu" or launched() > 1:
        raise ValueError(
            "--backend simulated runs in one process on the CPU; leave out --device and torchrun"
        )
    with stderr.status(f"loading {options.model}"):
        model = hf.load(options.model, options.dtype, verify=True)
        tokenizer = hf.load_tokenizer(options.model)
    with stderr.status(f"simulating up to {options.new_tokens} tokens"):
        text, new_tokens, target, times = hf.generate_simulated(
            model, tokenizer, options.prompt, options.new_tokens, options.chat
        )
    layers = dict(zip(("middle", "low", "high"), times, strict=True))
    document = _document(options, text, new_tokens, name_of(model.dtype))
    return document | {"target": target, "modelled_layers_us_per_token": layers}


def _document(
    options: argparse.Namespace, text: str, new_tokens: int, dtype: str
) -> dict[str, Any]:
    return {
        "model": options.model,
        "prompt": options.prompt,
        "chat": options.chat,
        "text": text,
        "new_tokens": new_tokens,
        "compute_dtype": dtype,
    }


def _show(document: dict[str, Any]) -> None:
    print(document["text"] if document["chat"] else document["prompt"] + document["text"])
    times = document.get("modelled_layers_us_per_token")
    if times:
        print(
            f"{document['target']}, modelled: {times['middle']:.1f} us a decoded token "
            f"({times['low']:.1f} to {times['high']:.1f}), decoder layers alone"
        )
