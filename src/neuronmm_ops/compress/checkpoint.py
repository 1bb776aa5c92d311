"""Compressed checkpoints on disk: their record in config.json, checked against the headers.

A checkpoint is a Transformers directory whose `quantization_config` entry is
`{"quant_method": "neuronmm", "format_version": 1, ...CompressionReport}` and whose safetensors
hold `<layer>.u` `[K, r]` and `<layer>.v` `[r, N]`, and a `<layer>.weight` `[0]` (see `SVDLinear`).
Everything here reads JSON and safetensors headers only.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from neuronmm_ops.compress.record import QUANT_METHOD, report_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

FLOATS = ("F64", "F32", "F16", "BF16")

Shapes = dict[str, tuple[int, ...]]


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model directory's config.json.

    Raises:
        CheckpointError: the directory or the file is missing, or holds no JSON object, or one
            whose quantization_config is none.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is no directory; give a local Transformers model directory "
            "(from a hub: hf download ORG/NAME --local-dir DIR)"
        )
    config = _read_object(directory / "config.json")
    entry = config.get("quantization_config")
    if not isinstance(entry, (dict, type(None))):
        raise CheckpointError(
            f"{directory / 'config.json'}: quantization_config must be an object, got {entry!r:.50}"
        )
    return config


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
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} is damaged or truncated ({error}); copy it again"
            ) from None
    return shapes


def check_float(files: Iterable[Path]) -> None:
    """Check that tensors are floats, for a checkpoint whose config says nothing of quantization.

    Transformers would cast the integers to floats as they are, without their scales.

    Raises:
        CheckpointError: names the first tensor of another dtype.
    """
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                dtype = tensors.get_slice(name).get_dtype()
                if name.endswith(".weight") and dtype not in FLOATS:
                    raise CheckpointError(
                        f"{name} is {dtype} in {file}, and config.json has no quantization_config; "
                        "start from the checkpoint before quantization, or restore the entry"
                    )


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
    shapes = read_shapes(weight_files(directory))
    if _are_renamed(shapes, report.layers):
        return report
    check_shapes(shapes, report.layers)
    return report


def _are_renamed(shapes: Shapes, layers: Iterable[LayerReport]) -> bool:
    """Say whether the factors are all there, under other names.

    Transformers renames some architectures' tensors on saving, and back on loading.
    """
    factors = {n: shape for layer in layers if layer.r for n, shape in _expected(layer).items()}
    stored = [(n[-2:], shape) for n, shape in shapes.items() if n.endswith((".u", ".v"))]
    same = Counter(stored) == Counter((n[-2:], shape) for n, shape in factors.items())
    return same and not set(factors) & set(shapes)


def _expected(layer: LayerReport) -> Shapes:
    if layer.r is None:
        return {f"{layer.name}.weight": (layer.N, layer.K)}
    return {f"{layer.name}.u": (layer.K, layer.r), f"{layer.name}.v": (layer.r, layer.N)}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give a Transformers model directory") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must hold JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
