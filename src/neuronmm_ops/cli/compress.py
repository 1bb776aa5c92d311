"""`compress`: a model in, a directory with its compressed form out."""

import argparse
from pathlib import Path
from typing import Any

from neuronmm_ops.cli.inspect import show_summary, summary
from neuronmm_ops.cli.library import transformers_models
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "replace Linears by factors"
    options = ("model", "--ratio", "--seqlen", "--dtype", "--device")
    command = add_command(commands, "compress", _compress, show_summary, description, *options)
    command.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    command.add_argument("--method", default="swift", help="swift (default), whiten or plain")
    command.add_argument("--calibration", type=Path, metavar="FILE.txt")
    command.add_argument(
        "--samples", type=int, default=128, help="calibration blocks (default 128)"
    )
    command.add_argument(
        "--calibration-order",
        choices=("spread", "head"),
        default="spread",
        help="blocks evenly over the whole text (default), or its first ones",
    )
    command.add_argument(
        "--block", type=int, default=128, help="ranks are multiples of it (default 128)"
    )
    command.add_argument(
        "--targets",
        nargs="+",
        default=["mlp"],
        help="mlp (default), attention, all-linear, module names or regular expressions",
    )
    command.add_argument(
        "--max-shard-size", default="50GB", metavar="SIZE", help="of a file (default 50GB)"
    )
    command.add_argument(
        "--stream",
        action="store_true",
        help="hold one layer in memory at a time; repeat the command to go on after a kill",
    )
    command.add_argument(
        "--force", action="store_true", help="replace OUT if it is a compressed checkpoint"
    )


def _compress(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.compress import SVDConfig

    config = SVDConfig(
        ratio=options.ratio,
        block=options.block,
        targets=tuple(options.targets),
        method=options.method,
    )
    if config.needs_calibration and options.calibration is None:
        raise ValueError(
            f"method {config.method} needs --calibration FILE.txt; or use --method plain"
        )
    hf = transformers_models()
    text = None if options.calibration is None else hf.read_text(options.calibration)
    with progress_bars() as progress:
        report = hf.compress(
            options.model,
            config,
            text,
            options.output,
            samples=options.samples,
            seqlen=options.seqlen,
            order=options.calibration_order,
            dtype=options.dtype,
            device=options.device,
            force=options.force,
            max_shard_size=options.max_shard_size,
            stream=options.stream,
            progress=progress,
        )
    return {"output": str(options.output), **summary(report)}
