"""Compressed checkpoints on disk: their record in config.json, checked against the headers.

A checkpoint is a Transformers directory whose `quantization_config` entry is
`{"quant_method": "neuronmm", "format_version": 1, ...CompressionReport}` and whose safetensors
hold `<layer>.u` `[K, r]` and `<layer>.v` `[r, N]` in the place of `<layer>.weight`. Everything here
reads JSON and safetensors headers only.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.errors import CheckpointError

QUANT_METHOD = "neuronmm"
FORMAT_VERSION = 1
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Shapes = dict[str, tuple[int, ...]]


def record_of(report: CompressionReport) -> dict[str, Any]:
    """Return the `quantization_config` entry for a report."""
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        **report.to_dict(),
    }


def report_of(record: Mapping[str, Any]) -> CompressionReport:
    """Read a `quantization_config` entry.

    Raises:
        CheckpointError: it is not ours, of an unknown version, or malformed.
    """
    method, version = record.get("quant_method"), record.get("format_version")
    if method != QUANT_METHOD:
        raise CheckpointError(f"quant_method must be {QUANT_METHOD!r}, got {method!r}")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"format_version must be {FORMAT_VERSION}, got {version!r}; "
            "the checkpoint was written by another version of neuronmm-ops"
        )
    try:
        return CompressionReport.from_dict(record)
    except ValueError as error:
        raise CheckpointError(f"quantization_config is malformed: {error}") from None


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model directory's config.json.

    Raises:
        CheckpointError: the directory or the file is missing, or holds no JSON object.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is no directory; give a local Transformers model directory "
            "(from a hub: hf download ORG/NAME --local-dir DIR)"
        )
    return _read_object(directory / "config.json")


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a model directory.

    Raises:
        CheckpointError: there are none, one named by the index is missing, or the index is
            malformed or names a file outside the directory.
    """
    index = directory / INDEX
    if not index.exists():
        single = directory / SINGLE
        if not single.exists():
            raise CheckpointError(
                f"{directory} has no weights: neither {SINGLE} nor {INDEX}; "
                "only safetensors are read"
            )
        return [single]
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must map tensor names to files in weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} must name safetensors files beside it, got {name!r}")
        if not (directory / name).exists():
            raise CheckpointError(f"{directory} lacks {name}, which {INDEX} names; copy it again")
    return [directory / name for name in names]


def read_shapes(files: Iterable[Path]) -> Shapes:
    """Read the shape of every tensor from the files' headers.

    Raises:
        CheckpointError: a file is no safetensors file, or is truncated.
    """
    shapes: Shapes = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is damaged or truncated ({error}); copy it again"
            ) from None
    return shapes


def check_shapes(shapes: Shapes, layers: Iterable[LayerReport]) -> None:
    """Check that the tensors are those that the record describes.

    Raises:
        CheckpointError: names the tensor, the shape the config asks for and the one in the file.
    """
    for layer in layers:
        for tensor, expected in _expected(layer).items():
            found = shapes.get(tensor)
            if layer.dense and found is None:
                continue  # a tied weight is stored under its other name
            if found != expected:
                actual = "the file has none" if found is None else f"the file has {list(found)}"
                raise CheckpointError(
                    f"{tensor}: config.json asks for {list(expected)}, {actual}; "
                    "config and weights are not of the same checkpoint"
                )


def inspect_checkpoint(directory: Path) -> CompressionReport:
    """Read a compressed checkpoint's record and check it against the headers alone.

    Raises:
        CheckpointError: the directory is no compressed checkpoint, or is inconsistent.
    """
    record = read_config(directory).get("quantization_config")
    if not isinstance(record, dict) or record.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(
            f"{directory} is not a compressed checkpoint: config.json has no quantization_config "
            f"of {QUANT_METHOD}; make one with: neuronmm compress {directory} -o OUT"
        )
    report = report_of(record)
    check_shapes(read_shapes(weight_files(directory)), report.layers)
    return report


def _expected(layer: LayerReport) -> Shapes:
    if layer.r is None:
        return {f"{layer.name}.weight": (layer.N, layer.K)}
    return {f"{layer.name}.u": (layer.K, layer.r), f"{layer.name}.v": (layer.r, layer.N)}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give a Transformers model directory") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} must hold JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
