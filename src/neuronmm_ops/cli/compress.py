"""`compress`: a model in, a directory with its compressed form out."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroncore.cli.console import stdout
from neuronmm_ops.cli.inspect import show_summary, summary
from neuronmm_ops.cli.parser import OPTIONS, add_command, add_output
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars

if TYPE_CHECKING:
    from neuronmm_ops.compress.config import LayerRatio, Tokens

# Options of the command that are keyword arguments of `hf.compress`; others are SVDConfig's fields.
KEYWORDS = (
    *("samples", "seqlen", "order", "dtype", "device", "force", "max_shard_size", "stream"),
    "compare",
)


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "make a model smaller: low-rank factors replace its Linears"
    options = ("--ratio", "--seqlen", "--dtype", "--device", "--force")
    example = "model -o small --ratio 0.3 --calibration train.txt"
    command = add_command(
        commands, "compress", _compress, _show, description, *options, example=example
    )
    command.add_argument("model", nargs="?", **OPTIONS["model"])
    add_output(command, "the new directory")
    command.add_argument(
        "--from",
        dest="recorded",
        type=Path,
        metavar="compression.json",
        help="repeat a recorded run; other options override it",
    )
    command.add_argument(
        "--method", help="kfac-drift (default), kfac, swift, whiten, drift, zero-sum or plain"
    )
    command.add_argument(
        "--calibration", type=Path, metavar="FILE.txt", help="UTF-8 text; plain needs none"
    )
    command.add_argument("--samples", type=int, help="calibration blocks (default 128)")
    command.add_argument(
        "--calibration-order",
        dest="order",
        choices=("spread", "head"),
        help="blocks evenly over the whole text (default), or its first ones",
    )
    command.add_argument("--block", type=int, help="ranks are multiples of this (default 128)")
    command.add_argument(
        "--targets",
        nargs="+",
        help="mlp (default), attention, all-linear, module names or regular expressions",
    )
    _add_allocation(command)
    command.add_argument(
        "--max-shard-size", metavar="SIZE", help="size of a file of weights (default 50GB)"
    )
    command.add_argument(
        "--stream",
        action="store_true",
        help="hold one layer in memory at a time; repeat the command to resume after a kill",
    )
    command.add_argument(
        "--compare",
        action="store_true",
        help="try narrower MLPs, uniform whitening, kfac and, for auto, dense storages too, and "
        "take what diverges least on text kept apart",
    )
    # None is "not given", so that the record's values or the library's defaults hold.
    command.set_defaults(**dict.fromkeys(("ratio", *KEYWORDS)))


def _add_allocation(command: argparse.ArgumentParser) -> None:
    """Add what decides the ranks."""
    group = command.add_argument_group("ranks")
    group.add_argument(
        "--allocation",
        help="greedy (default): one budget for all matrices; uniform: the paper's rule for each",
    )
    group.add_argument(
        "--importance",
        help="weight of losses in different matrices: gradient (default; with "
        "plain error), error or perplexity",
    )
    group.add_argument(
        "--budget",
        help="what --ratio is a fraction of: parameters (default), bytes (of --storage auto) or "
        "modelled time",
    )
    group.add_argument(
        "--storage",
        help="storage of the targets, dense ones too: fp8, int8 or int4 with scales, bf16, or "
        "auto, what the budget buys best for each (default: the model's dtype); with --ratio 0 all "
        "stay dense",
    )
    group.add_argument(
        "--prune-share",
        type=float,
        metavar="S",
        help="of what is removed, the share of narrower MLPs, see prune (default 0)",
    )
    group.add_argument("--head-storage", help="storage of the output head: fp8, int8 or int4")
    group.add_argument("--target", help="trn1, trn2 or trn3, with --budget time")
    group.add_argument(
        "--tokens",
        type=token_weights,
        metavar="M",
        help="tokens of a launch, with --budget time (default 1: decoding), or weights of several: "
        "1:0.8,2048:0.2",
    )
    group.add_argument(
        "--lnc",
        type=int,
        choices=(1, 2),
        help="NeuronCores of a launch, with --budget time (default 1)",
    )
    group.add_argument(
        "--tp",
        type=int,
        help="ranks of tensor parallel, with --budget time (default 1): their parts, and what they "
        "exchange",
    )
    group.add_argument(
        "--layer-ratio",
        dest="layer_ratios",
        type=layer_ratio,
        action="append",
        metavar="PATTERN=R",
        help="separate ratio for the layers that PATTERN selects, as --targets "
        "does; 0 keeps them dense. PATTERN=LO:HI bounds their ratio in the "
        "common budget. Repeatable; the first match wins",
    )


def layer_ratio(text: str) -> tuple[str, "LayerRatio"]:
    """Read `PATTERN=R` or `PATTERN=LO:HI`; a pattern may itself hold `=`.

    Raises:
        ArgumentTypeError: it is neither.
    """
    pattern, _, ratio = text.rpartition("=")
    low, colon, high = ratio.partition(":")
    try:
        ends = float(low), float(high if colon else low)
    except ValueError:
        ends = None
    if not pattern or ends is None:
        raise argparse.ArgumentTypeError(f"must be PATTERN=R or PATTERN=LO:HI; got {text!r}")
    return pattern, ends if colon else ends[0]


def token_weights(text: str) -> "Tokens":
    """Read `M`, or `M:WEIGHT,M:WEIGHT`.

    Raises:
        ArgumentTypeError: it is neither.
    """
    pairs = [part.split(":") for part in text.split(",")]
    try:
        if len(pairs) == len(pairs[0]) == 1:
            return int(text)
        return tuple((int(count), float(weight)) for count, weight in pairs)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be M or M:WEIGHT,M:WEIGHT; got {text!r}") from None


def _compress(options: argparse.Namespace) -> dict[str, Any]:
    if options.model is None and options.recorded is None:
        raise ValueError("MODEL is needed: a Transformers directory or a hub id; or use --from")
    from neuronmm_ops.compress.config import AUTO, SVDConfig

    named = {name: value for name, value in vars(options).items() if value is not None}
    choices: dict[str, Any] = {
        name: named[name] for name in SVDConfig.__dataclass_fields__ if name in named
    }
    keywords = {name: named[name] for name in KEYWORDS if name in named}
    model, text, run = options.model, options.calibration, None
    if options.recorded is None:
        if choices.get("storage") == AUTO:
            choices = {"budget": "bytes", **choices}
        config = SVDConfig(**choices)
    else:
        run = transformers_models().read_run(options.recorded)
        config = replace(run.config, **choices)
        keywords = run.options | keywords
        model = model or run.checked_model()
        if config.needs_calibration:
            text = text or run.checked_text()
    if config.needs_calibration and text is None:
        raise ValueError(
            f"{config.calibrated_by} needs --calibration FILE.txt; or use --method plain"
        )
    hf = transformers_models()
    with progress_bars() as progress:
        report = hf.compress(model, config, text, options.output, **keywords, progress=progress)
    document = {"output": str(options.output), **summary(report)}
    if run is not None:
        written = hf.read_run(options.output / "compression.json")
        document["same_weights"] = written.weights_sha256 == run.weights_sha256
    return document


def _show(document: dict[str, Any]) -> None:
    show_summary(document)
    if "same_weights" in document:
        how = "are bit for bit" if document["same_weights"] else "differ from"
        stdout.print(f"weights {how} those of the recorded run")
