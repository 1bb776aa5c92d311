"""A model directory: its config.json, its weight files, and whether they fit one another.

What cannot be read raises CheckpointError.
"""

import json
from pathlib import Path
from typing import Any

from neuronmm_ops.checkpoint.headers import are_renamed, check_shapes, read_headers
from neuronmm_ops.compress.record import QUANT_METHOD, is_record, report_of
from neuronmm_ops.compress.report import CompressionReport
from neuronmm_ops.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model directory's config.json."""
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
    """List the safetensors files that Transformers loads: the single one, else the index's."""
    index, single = directory / INDEX, directory / SINGLE
    # Saving a sharded model again as one file leaves the index of the shards behind.
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(
            f"{directory} has no weights: neither {SINGLE} nor {INDEX}; only safetensors are read"
        )
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


def inspect_checkpoint(directory: Path) -> CompressionReport:
    """Read a compressed checkpoint's record and check it against the headers."""
    record = read_config(directory).get("quantization_config")
    if not is_record(record):
        raise CheckpointError(
            f"{directory} is not a compressed checkpoint: config.json has no quantization_config "
            f"of {QUANT_METHOD}; make one with: neuronmm compress {directory} -o OUT"
        )
    report = report_of(record)
    headers = read_headers(weight_files(directory))
    if not are_renamed(headers, report.layers):
        check_shapes(headers, report.layers)
    return report


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
