"""`prune`: a dense model with narrower MLPs, an ordinary checkpoint."""

import argparse
from pathlib import Path
from typing import Any

from neuroncore.cli.console import stdout
from neuronmm_ops.cli.parser import add_command, add_output, chosen
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "leave out inner features of a dense model's MLPs: an ordinary, narrower model"
    example = "MODEL -o narrow --ratio 0.2 --calibration text.txt"
    command = add_command(
        commands, "prune", _prune, _show, description, "--device", "--seqlen", example=example
    )
    command.add_argument("model", metavar="MODEL", help="a dense Transformers directory or hub id")
    add_output(command, "the new directory")
    command.add_argument(
        "--ratio", type=float, required=True, help="of the MLPs' parameters to remove, at least"
    )
    command.add_argument(
        "--calibration", type=Path, required=True, metavar="FILE.txt", help="UTF-8 text to run"
    )
    command.add_argument(
        "--block", type=int, default=128, help="what stays is a multiple of this (default 128)"
    )
    command.add_argument(
        "--samples", type=int, default=128, help="calibration blocks (default 128)"
    )


def _prune(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    with progress_bars() as progress:
        return hf.prune(
            *(options.model, options.calibration, options.output),
            **chosen(options, "ratio", "block", "samples", "seqlen", "device"),
            progress=progress,
        )


def _show(document: dict[str, Any]) -> None:
    worst = max(document["losses"], key=document["losses"].__getitem__)
    stdout.print(
        f"wrote {document['output']}: MLPs of {document['kept']} inner features, "
        f"{document['inner']} before, {document['bytes'] / 1e6:.1f} MB, for any engine that loads "
        "the dense model"
    )
    stdout.print(
        f"most lost: {worst}, {document['losses'][worst]:.2%} of its output's mean square on the "
        "calibration text"
    )
