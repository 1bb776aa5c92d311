"""`compress` a model into a directory, and `inspect` what such a directory records."""

import argparse
from pathlib import Path
from typing import Any

from neuronmm_ops.cli.console import show_table, stdout
from neuronmm_ops.cli.models import transformers_models
from neuronmm_ops.cli.parser import add_command
from neuronmm_ops.compress.rank import parameter_count
from neuronmm_ops.compress.report import CompressionReport
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the commands to the parser."""
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
        "--force", action="store_true", help="replace OUT if it is a compressed checkpoint"
    )

    command = add_command(
        commands, "inspect", _inspect, show_summary, "rank and loss of every layer"
    )
    command.add_argument("model", type=Path, metavar="DIR", help="a compressed checkpoint")


def _compress(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.compress import SVDConfig

    config = SVDConfig(
        ratio=options.ratio,
        block=options.block,
        targets=tuple(options.targets),
        method=options.method,
    )
    if config.method != "plain" and options.calibration is None:
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
            progress=progress,
        )
    return {"output": str(options.output), **_summary(report)}


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.checkpoint import inspect_checkpoint

    return _summary(inspect_checkpoint(options.model))


def _summary(report: CompressionReport) -> dict[str, Any]:
    """Return the document of `inspect`."""
    fields = ("name", "K", "N", "r", "dense", "loss", "bytes")
    return {
        "ratio": report.ratio,
        "effective_ratio": report.effective_ratio,
        "model_ratio": report.model_ratio,
        "compute_dtype": report.provenance.get("compute_dtype"),
        "bytes": sum(layer.bytes for layer in report.layers),
        "dense_bytes": sum(layer.dense_bytes for layer in report.layers),
        "layers": [{field: getattr(layer, field) for field in fields} for layer in report.layers],
    }


def show_summary(document: dict[str, Any]) -> None:
    """Print the document as a table, and its totals."""
    rows: list[tuple[object, ...]] = []
    for layer in document["layers"]:
        K, N, r = layer["K"], layer["N"], layer["r"]
        ratio = 1 - parameter_count(K, N, r) / (K * N)
        loss = "unknown" if layer["loss"] is None else f"{layer['loss']:.4f}"
        cells = (layer["name"], K, N, "dense" if r is None else r, f"{ratio:.3f}", loss)
        rows.append((*cells, f"{layer['bytes'] / 1e6:.3f}"))
    columns = ("layer", "K", "N", "rank", "effective", "loss", "MB")
    show_table(columns, rows, left=columns[:1], title=document.get("output"))
    stdout.print(
        f"targeted layers: nominal ratio {document['ratio']:.3f}, effective "
        f"{document['effective_ratio']:.3f}: {document['dense_bytes'] / 1e6:.1f} MB -> "
        f"{document['bytes'] / 1e6:.1f} MB",
        soft_wrap=True,
    )
    if document["model_ratio"] is not None:
        stdout.print(f"whole model: {document['model_ratio']:.3f} of its parameters are gone")
    if document["compute_dtype"] is not None:
        stdout.print(f"computed in {document['compute_dtype']}")
