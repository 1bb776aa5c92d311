"""`recover`: a compressed model in, the same with its factors trained out."""

import argparse
from pathlib import Path
from typing import Any

from neuronmm_ops.cli.inspect import show_recovery
from neuronmm_ops.cli.parser import add_command, add_output, chosen
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "train a compressed model's factors, to win back quality"
    example = "small --data train.txt --minutes 10 -o recovered"
    options = ("--device", "--force")
    command = add_command(
        commands, "recover", _recover, _show, description, *options, example=example
    )
    command.add_argument("model", metavar="DIR", help="a compressed checkpoint")
    add_output(command, "the new directory")
    command.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE.txt",
        help="UTF-8 text to train on; a tenth of it is held out",
    )
    command.add_argument(
        "--seqlen", type=int, help="tokens in a block (default: 512, or the model's limit)"
    )
    command.add_argument(
        "--method",
        default="distill",
        help="distill (default): the factors, from the dense model; lora: adapters, from the text",
    )
    command.add_argument("--minutes", type=float, help="time budget of the training (default 10)")
    command.add_argument("--steps", type=int, help="number of steps, instead of --minutes")
    command.add_argument(
        "--dense",
        metavar="MODEL",
        help="the dense model, for distill (default: the one that DIR names)",
    )
    command.add_argument(
        "--learning-rate", type=float, help="peak learning rate (default: the method's)"
    )
    command.add_argument(
        "--lora-order",
        default="sequential",
        help="sequential (default): u, then v; joint: both at once",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the data's order (default 0)")


def _recover(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.recover import RecoverConfig

    if options.minutes is not None and options.steps is not None:
        raise ValueError("--minutes and --steps are both the length of the training; give one")
    names = ("method", "steps", "seqlen", "learning_rate", "lora_order", "seed")
    minutes = RecoverConfig.minutes if options.minutes is None else options.minutes
    config = RecoverConfig(**chosen(options, *names), minutes=minutes)
    hf = transformers_models()
    text = hf.read_text(options.data)
    with progress_bars() as progress:
        report = hf.recover(
            options.model,
            text,
            options.output,
            config,
            **chosen(options, "dense", "device", "force"),
            progress=progress,
        )
    return {"output": str(options.output), **report.provenance["recovery"][-1]}


def _show(document: dict[str, Any]) -> None:
    print(document["output"])
    show_recovery(document)
