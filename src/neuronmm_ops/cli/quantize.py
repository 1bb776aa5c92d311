"""`quantize`: a compressed model in floats in, the same in one byte a number or less out."""

import argparse
from pathlib import Path
from typing import Any

from neuronmm_ops.cli.inspect import show_summary, summary
from neuronmm_ops.cli.parser import add_command, add_output, chosen
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "round a compressed or recovered model's matrices to a storage"
    example = "recovered -o rounded --storage int8"
    options = ("--device", "--seqlen", "--force")
    command = add_command(
        commands, "quantize", _quantize, show_summary, description, *options, example=example
    )
    command.add_argument("model", metavar="DIR", help="a compressed checkpoint in floats")
    add_output(command, "the new directory")
    command.add_argument("--storage", required=True, help="fp8, int8 or int4")
    command.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE.txt",
        help="UTF-8 text that says what errors cost (default: all inputs count alike)",
    )
    command.add_argument(
        "--samples", type=int, default=128, help="calibration blocks (default 128)"
    )


def _quantize(options: argparse.Namespace) -> dict[str, Any]:
    hf = transformers_models()
    with progress_bars() as progress:
        report = hf.quantize(
            options.model,
            options.storage,
            options.calibration,
            options.output,
            **chosen(options, "samples", "seqlen", "device", "force"),
            progress=progress,
        )
    return {"output": str(options.output), **summary(report)}
