"""`inspect`: rank and loss of every layer of a compressed checkpoint, from its headers."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.parser import add_command

if TYPE_CHECKING:
    from neuronmm_ops.compress.report import CompressionReport


def add(commands: Any) -> None:
    """Add the command to the parser."""
    command = add_command(
        *(commands, "inspect", _inspect, show_summary, "rank and loss of every layer"),
        example="small --json",
    )
    command.add_argument("model", type=Path, metavar="DIR", help="a compressed checkpoint")
    command.add_argument(
        "--no-verify",
        action="store_false",
        dest="verify",
        help="read only headers; default: hash all weights and compare them with manifest.json",
    )


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.checkpoint import inspect_checkpoint
    from neuronmm_ops.manifest import check_weights

    document = summary(inspect_checkpoint(options.model))
    manifest = check_weights(options.model, values=options.verify)
    return document | {"verified": manifest is not None and options.verify}


def summary(report: "CompressionReport") -> dict[str, Any]:
    """Return the document of `inspect`."""
    from neuronmm_ops.storages import dtype_name

    fields = ("name", "K", "N", "r", "dense", "loss", "bytes", "bits_per_weight", "compute")
    return {
        "ratio": report.ratio,
        "effective_ratio": report.effective_ratio,
        "model_ratio": report.model_ratio,
        "compute_dtype": report.provenance.get("compute_dtype"),
        "bytes": sum(layer.bytes for layer in report.layers),
        "dense_bytes": report.dense_bytes,
        "narrowed": report.narrowed and asdict(report.narrowed),
        "left_dense": [asdict(left) for left in report.left_dense],
        "config": None if report.config is None else report.config.to_dict(),
        "calibration": report.calibration,
        "provenance": report.provenance,
        "layers": [
            {field: getattr(layer, field) for field in fields}
            | {"storage": dtype_name(layer.storage)}
            for layer in report.layers
        ],
        **{key: report.provenance[key] for key in ("recovery",) if key in report.provenance},
    }


def show_summary(document: dict[str, Any]) -> None:
    """Print the document as a table, and its totals."""
    from neuronmm_ops.rank import parameter_count
    from neuronmm_ops.storages import storage_named

    rows: list[tuple[object, ...]] = []
    has_storage = any(layer["storage"] is not None for layer in document["layers"])
    for layer in document["layers"]:
        K, N, r = layer["K"], layer["N"], layer["r"]
        ratio = 1 - parameter_count(K, N, r) / (K * N)
        loss = "unknown" if layer["loss"] is None else f"{layer['loss']:.4f}"
        cells = (layer["name"], f"{K}x{N}", "dense" if r is None else r)
        size = f"{layer['bytes'] / 1e6:.4g}"
        if has_storage:  # bits say more than the ratio of parameters, and both would fold the names
            short = storage_named(layer["storage"]) if layer["storage"] else ""
            rows.append((*cells, loss, size, f"{short} {layer['bits_per_weight']:.1f}".strip()))
        else:
            rows.append((*cells, f"{ratio:.3f}", loss, size))
    figures = ("loss", "MB", "bits") if has_storage else ("ratio", "loss", "MB")
    columns = ("layer", "K x N", "rank", *figures)
    show_table(columns, rows, left=columns[:1], title=document.get("output"))
    stdout.print(
        f"targeted layers: nominal ratio {document['ratio']:.3f}, effective "
        f"{document['effective_ratio']:.3f}: {document['dense_bytes'] / 1e6:.1f} MB -> "
        f"{document['bytes'] / 1e6:.1f} MB"
    )
    if document["narrowed"]:
        narrowed = document["narrowed"]
        is_ordinary = all(x["dense"] and x["storage"] is None for x in document["layers"])
        stdout.print(
            f"MLPs: {narrowed['kept']} of {narrowed['inner']} inner features stay, which is "
            + ("all of that ratio" if is_ordinary else "part of that ratio")
        )
        if is_ordinary:
            stdout.print("for any engine: neuronmm export dense, or neuronmm prune")
    if has_storage:
        stdout.print("bits: stored for each weight of the dense matrix, scales included")
    if any(layer["compute"] == "fp8" for layer in document["layers"]):
        stdout.print(
            "activations of layers in float8_e4m3fn may be rounded to it, too (compute fp8)"
        )
    if document["model_ratio"] is not None:
        stdout.print(f"whole model: {document['model_ratio']:.3f} of its parameters are gone")
    for left in document["left_dense"]:
        stdout.print(
            f"left dense: {left['name']}, {left['share']:.1%} of the model's parameters "
            f"({left['reason']})"
        )
    if document.get("verified"):
        stdout.print("weights are what manifest.json says (SHA-256)")
    for line in _record_lines(document):
        stdout.print(line)
    for run in document.get("recovery", ()):
        show_recovery(run)


def show_recovery(run: dict[str, Any]) -> None:
    """Print what a recovery did, in a line."""
    change = f"{run['held_out_ppl_before']:.4f} -> {run['held_out_ppl_after']:.4f}"
    if not run["improved"]:
        change = f"{run['held_out_ppl_before']:.4f}, not improved: the factors are the start's"
    stdout.print(
        f"recovered by {run['config']['method']}: held-out perplexity {change}, "
        f"{run['steps']} steps, {run['tokens']} tokens, {run['minutes']:.1f} minutes"
    )


def _record_lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield what the record says of the run: how, on what text, of what model, by what versions."""
    config, calibration = document["config"], document["calibration"]
    if config is None:
        yield "factors are not of neuronmm compress: the record has no config"
    else:
        method = {"method": config["method"], **config}
        yield _listed({key: method[key] for key in method if key not in ("version", "ratio")})
    if calibration is not None:
        known = ("tokens", "batches", "sha256")
        how = _listed({key: calibration[key] for key in calibration if key not in known})
        tokens, digest = (calibration.get(key, "unknown") for key in ("tokens", "sha256"))
        yield f"calibrated on {tokens} tokens{how and ': '}{how}; their SHA-256 {digest}"
    provenance = {name: v for name, v in document["provenance"].items() if isinstance(v, str)}
    model, dtype = provenance.pop("model", ""), provenance.pop("compute_dtype", None)
    origin = [f"from {model}"] if model else []
    origin += [] if dtype is None else [f"computed in {dtype}"]
    if origin or provenance:
        yield ", ".join([*origin, _listed(provenance)])


def _listed(fields: dict[str, Any]) -> str:
    """Return fields as `name value, name value`; those without a value are left out."""
    return ", ".join(
        f"{name} {_text(value)}" for name, value in fields.items() if value is not None
    )


def _text(value: object) -> str:
    if isinstance(value, dict):  # as it is written on the command line
        return ",".join(f"{key}:{each}" for key, each in value.items()) or "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
