"""`compress`: a model in, a directory with its compressed form out."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from neuronmm_ops.cli.console import stdout
from neuronmm_ops.cli.inspect import show_summary, summary
from neuronmm_ops.cli.library import transformers_models
from neuronmm_ops.cli.parser import OPTIONS, add_command
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.progress import progress_bars

# Options of the command that are keyword arguments of `hf.compress`; others are SVDConfig's fields.
KEYWORDS = ("samples", "seqlen", "order", "dtype", "device", "force", "max_shard_size")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "replace Linears by factors"
    options = ("--ratio", "--seqlen", "--dtype", "--device")
    command = add_command(commands, "compress", _compress, _show, description, *options)
    command.add_argument("model", nargs="?", **OPTIONS["model"])
    command.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    command.add_argument(
        "--from",
        dest="recorded",
        type=Path,
        metavar="compression.json",
        help="run what a checkpoint records again; other options replace what it says",
    )
    command.add_argument("--method", help="swift (default), whiten or plain")
    command.add_argument("--calibration", type=Path, metavar="FILE.txt")
    command.add_argument("--samples", type=int, help="calibration blocks (default 128)")
    command.add_argument(
        "--calibration-order",
        dest="order",
        choices=("spread", "head"),
        help="blocks evenly over the whole text (default), or its first ones",
    )
    command.add_argument("--block", type=int, help="ranks are multiples of it (default 128)")
    command.add_argument(
        "--targets",
        nargs="+",
        help="mlp (default), attention, all-linear, module names or regular expressions",
    )
    command.add_argument("--max-shard-size", metavar="SIZE", help="of a file (default 50GB)")
    command.add_argument(
        "--force", action="store_true", help="replace OUT if it is a compressed checkpoint"
    )
    # None is "not given", so that the record's values or the library's defaults hold.
    command.set_defaults(**dict.fromkeys((*SVDConfig.__dataclass_fields__, *KEYWORDS)))


def _compress(options: argparse.Namespace) -> dict[str, Any]:
    if options.model is None and options.recorded is None:
        raise ValueError("MODEL is needed: a Transformers directory or a hub id; or use --from")
    given = {name: value for name, value in vars(options).items() if value is not None}
    choices = {name: given[name] for name in SVDConfig.__dataclass_fields__ if name in given}
    keywords = {name: given[name] for name in KEYWORDS if name in given}
    model, text, run = options.model, options.calibration, None
    if options.recorded is None:
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
            f"method {config.method} needs --calibration FILE.txt; or use --method plain"
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
