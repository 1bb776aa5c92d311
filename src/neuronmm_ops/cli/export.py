"""`export`: a compressed checkpoint as another engine reads it."""

import argparse
from pathlib import Path
from typing import Any

from neuroncore.cli.console import stdout
from neuronmm_ops.cli.parser import add_command, add_group, add_output
from neuronmm_ops.extras import transformers_models


def add(commands: Any) -> None:
    """Add the command to the parser."""
    described = "write a compressed checkpoint for another engine"
    engines = add_group(commands, "export", "engine", described, "nxdi small -o nxdi --tp 8")
    described = "for NxD Inference, on Trainium and Inferentia2"
    example = "small -o nxdi --tp 8"
    command = add_command(engines, "nxdi", _export, _show, described, example=example)
    command.add_argument("model", type=Path, metavar="DIR", help="a compressed checkpoint")
    add_output(command, "the new directory; replaces only an earlier export")
    command.add_argument("--tp", type=int, default=1, help="ranks, one per NeuronCore (default 1)")
    command.add_argument(
        "--divide",
        choices=("both", "one"),
        default="both",
        help="which factors of a pair cores divide (default both); one for sequence parallelism",
    )
    command.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype in which the engine computes (default auto: the checkpoint's)",
    )
    described = "an ordinary checkpoint, its factors multiplied out: loads anywhere, no smaller"
    _add_whole(engines, "dense", _export_dense, _show_dense, described, "small -o same")
    described = "an ONNX graph in float32, two MatMuls a pair, without a KV cache"
    _add_whole(engines, "onnx", _export_onnx, _show_onnx, described, "small -o graph")


def _add_whole(engines: Any, name: str, run: Any, show: Any, described: str, example: str) -> None:
    """Add an export that takes a checkpoint and a new directory, and nothing else."""
    command = add_command(engines, name, run, show, described, example=example)
    command.add_argument("model", type=Path, metavar="DIR", help="a compressed checkpoint")
    add_output(command, "the new directory")


def _export_dense(options: argparse.Namespace) -> dict[str, Any]:
    return transformers_models().export_dense(options.model, options.output)


def _show_dense(document: dict[str, Any]) -> None:
    stdout.print(
        f"wrote {document['output']}: {document['layers']} layers multiplied out, "
        f"{document['bytes'] / 1e6:.1f} MB, for any engine that loads the dense model"
    )


def _export_onnx(options: argparse.Namespace) -> dict[str, Any]:
    return transformers_models().export_onnx(options.model, options.output)


def _show_onnx(document: dict[str, Any]) -> None:
    stdout.print(
        f"wrote {document['output']}/model.onnx: {document['layers']} compressed layers, opset "
        f"{document['opset']}, {document['bytes'] / 1e6:.1f} MB of float32"
    )


def _export(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.engines.nxdi import export

    report = export(options.model, options.output, options.tp, options.divide, options.dtype)
    return report.to_dict()


def _show(document: dict[str, Any]) -> None:
    stdout.print(
        f"wrote {document['output']}: {document['low_rank']} low-rank layers, "
        f"{document['dtype']}, {document['bytes'] / 1e6:.1f} MB"
    )
    for note in document["notes"]:
        stdout.print(f"note: {note}")
    stdout.print("on the machine with NxD Inference (not tested on hardware), first run:")
    stdout.print(document["command"], is_whole=True)
