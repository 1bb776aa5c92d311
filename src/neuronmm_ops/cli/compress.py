"""`compress`: a model in, a directory with its compressed form out."""

import argparse
from pathlib import Path
from typing import Any

from neuronmm_ops.cli.inspect import show_summary, summary
from neuronmm_ops.cli.library import transformers_models
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.compress.config import LayerRatio, SVDConfig
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "replace Linears by factors"
    options = ("model", "--ratio", "--seqlen", "--dtype", "--device")
    command = add_command(commands, "compress", _compress, show_summary, description, *options)
    command.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    command.add_argument(
        "--method", default="kfac", help="kfac (default), swift, whiten, drift, zero-sum or plain"
    )
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
    _add_allocation(command)
    command.add_argument(
        "--max-shard-size", default="50GB", metavar="SIZE", help="of a file (default 50GB)"
    )
    command.add_argument(
        "--force", action="store_true", help="replace OUT if it is a compressed checkpoint"
    )


def _add_allocation(command: argparse.ArgumentParser) -> None:
    """Add what decides the ranks."""
    group = command.add_argument_group("ranks")
    group.add_argument(
        "--allocation",
        default="greedy",
        help="greedy (default): one budget for all matrices; uniform: the paper's rule for each",
    )
    group.add_argument(
        "--importance",
        help="of losses in different matrices: gradient (default; with plain error), error or "
        "perplexity",
    )
    group.add_argument(
        "--budget",
        default="parameters",
        help="what --ratio is a fraction of: parameters (default), bytes or modelled time",
    )
    group.add_argument("--target", help="trn1, trn2 or trn3, with --budget time")
    group.add_argument(
        "--tokens",
        type=int,
        default=1,
        metavar="M",
        help="of a launch, with --budget time (default 1: decoding)",
    )
    group.add_argument(
        "--layer-ratio",
        action="append",
        default=[],
        metavar="PATTERN=R",
        help="a ratio of its own for the layers that PATTERN selects, as --targets does; 0 keeps "
        "them dense. PATTERN=LO:HI bounds what they get of the common budget. Repeatable, the "
        "first that selects a layer holds",
    )


def _config(options: argparse.Namespace) -> SVDConfig:
    return SVDConfig(
        ratio=options.ratio,
        block=options.block,
        targets=tuple(options.targets),
        method=options.method,
        allocation=options.allocation,
        importance=options.importance,
        budget=options.budget,
        target=options.target,
        tokens=options.tokens,
        layer_ratios=tuple(layer_ratio(text) for text in options.layer_ratio),
    )


def layer_ratio(text: str) -> tuple[str, LayerRatio]:
    """Read `PATTERN=R` or `PATTERN=LO:HI`; a pattern may itself hold `=`.

    Raises:
        ValueError: it is neither.
    """
    pattern, _, ratio = text.rpartition("=")
    low, colon, high = ratio.partition(":")
    try:
        ends = float(low), float(high if colon else low)
    except ValueError:
        ends = None
    if not pattern or ends is None:
        raise ValueError(f"--layer-ratio must be PATTERN=R or PATTERN=LO:HI; got {text!r}")
    return pattern, ends if colon else ends[0]


def _compress(options: argparse.Namespace) -> dict[str, Any]:
    config = _config(options)
    if config.needs_calibration and options.calibration is None:
        raise ValueError(
            f"{config.calibrated_by} needs --calibration FILE.txt; or use --method plain"
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
            progress=progress,
        )
    return {"output": str(options.output), **summary(report)}
