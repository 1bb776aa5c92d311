"""Compressed checkpoints on disk, read without Transformers and without reading a weight.

A checkpoint is a Transformers directory whose `quantization_config` entry is
`{"quant_method": "neuronmm", "format_version": 1, ...CompressionReport}` and whose safetensors
hold `<layer>.u` `[K, r]` and `<layer>.v` `[r, N]`, and a `<layer>.weight` `[0]` (see `SVDLinear`);
of factors in one byte also `<layer>.u_scale` `[r]` and `<layer>.v_scale` `[N]`. A dense layer in
one byte has `<layer>.w` `[K, N]` and `<layer>.w_scale` `[N]` in their place.
What cannot be read or does not fit raises CheckpointError.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from neuronmm_ops.compress.record import QUANT_METHOD, is_record, report_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.files import check_regular, check_regular_files, read_document
from neuronmm_ops.storages import STORAGES, pair_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
# What a config.json may say: a model of more would take for ever to build.
_LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 10_000),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads"), 2**24),
    **dict.fromkeys(("intermediate_size", "head_dim", "vocab_size"), 2**24),
}
# Of a record: Transformers copies and prints each of them several times before it looks for one.
_MOST_LAYERS = 20_000


# --- the directory


def read_config(directory: Path) -> dict[str, Any]:
    """Read a model directory's config.json; refuse what lets other weights or code be loaded."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is no directory; give a local Transformers model directory "
            "(from a hub: hf download ORG/NAME --local-dir DIR)"
        )
    try:
        check_regular_files(directory)  # Transformers opens others than those that are read here
    except OSError as error:
        path = error.filename or directory
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    config = read_object(directory / "config.json")
    for sizes in (config, config.get("text_config")):
        _check_sizes(directory / "config.json", sizes if isinstance(sizes, dict) else {})
    entry = config.get("quantization_config")
    if not isinstance(entry, (dict, type(None))):
        raise CheckpointError(
            f"{directory / 'config.json'}: quantization_config must be an object, got {entry!r:.50}"
        )
    layers = (entry or {}).get("layers")
    if isinstance(layers, list) and len(layers) > _MOST_LAYERS:
        raise CheckpointError(
            f"{directory / 'config.json'}: quantization_config must have at most {_MOST_LAYERS} "
            f"layers, got {len(layers)}; copy the file again"
        )
    if "transformers_weights" in config:
        raise CheckpointError(
            f"{directory / 'config.json'} names other weights than are read here, by "
            f"transformers_weights {config['transformers_weights']!r:.50}; remove that entry"
        )
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{directory} has an adapter next to its weights (adapter_config.json), which would be "
            "added to them; merge it by peft's merge_and_unload, or move it to another directory"
        )
    for name, value in _kernels(config):
        raise CheckpointError(
            f"{directory / 'config.json'}: {name} must be one of Transformers' own, got "
            f"{value!r:.50}, code of a hub; set it to sdpa or eager"
        )
    return config


def _check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse what no model has; lists and null mean something in some architectures."""
    for key, most in _LARGEST.items():
        value = config.get(key)
        if not isinstance(value, (list, type(None))) and (
            type(value) is not int or not 1 <= value <= most
        ):
            raise CheckpointError(
                f"{path}: {key} must be an integer from 1 to {most}, got {value!r:.50}; "
                "copy the file again"
            )


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; CheckpointError says why it cannot be."""
    try:
        value = json.loads(read_document(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give a Transformers model directory") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must hold JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


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
    described = read_object(index)
    if not isinstance(described.get("metadata"), dict):
        raise CheckpointError(f"{index} must have an object metadata; copy the file again")
    weight_map = described.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must map tensor names to files in weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} must name safetensors files next to it, got {name!r}")
        if not (directory / name).exists():
            raise CheckpointError(f"{directory} lacks {name}, which {INDEX} names; copy it again")
    return [directory / name for name in names]


def inspect_checkpoint(directory: Path) -> CompressionReport:
    """Read a compressed checkpoint's record and check it against the headers."""
    return inspect_headers(directory)[0]


def inspect_headers(directory: Path) -> tuple[CompressionReport, dict[str, "TensorHeader"]]:
    """Do what `inspect_checkpoint` does, and return the headers by tensor name, too."""
    record = read_config(directory).get("quantization_config")
    if not is_record(record):
        raise CheckpointError(
            f"{directory} is not a compressed checkpoint: config.json has no quantization_config "
            f"of {QUANT_METHOD}; make one with: neuronmm compress {directory} -o OUT"
        )
    report = report_of(record)
    headers = read_headers(weight_files(directory))
    check_float(headers)
    renamed = renamed_in(headers, report.layers)
    check_tensors(headers, [layer for layer in report.layers if layer.name not in renamed])
    return report, headers


# --- the headers


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor; dtype as safetensors writes it, such as `BF16`."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Read the header of every tensor, by the tensor's name."""
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            check_regular(file)
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                    view = tensors.get_slice(name)
                    headers[name] = TensorHeader(file, tuple(view.get_shape()), view.get_dtype())
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} is damaged or truncated ({error}); copy it again"
            ) from None
    return headers


def check_float(headers: Mapping[str, TensorHeader]) -> None:
    """Refuse weights in one byte of layers that the config says nothing of.

    Transformers would cast them to floats as they are, or not at all, without their scales.
    """
    for name, header in headers.items():
        if name.endswith(".weight") and header.dtype not in FLOATS:
            raise CheckpointError(
                f"{name} is {header.dtype} in {header.file}, and config.json has no "
                "quantization_config for it; start from the checkpoint before quantization, or "
                "restore the entry"
            )


def check_tensors(headers: Mapping[str, TensorHeader], layers: Iterable[LayerReport]) -> None:
    """Refuse tensors of other shapes or dtypes than the record describes, and those missing."""
    for layer in layers:
        for tensor, expected in _expected(layer).items():
            header = headers.get(tensor)
            if not layer.is_replaced and (header is None or header.shape == expected[::-1]):
                continue  # a tied weight, stored under its other name, or one of GPT-2, [K, N]
            if header is None or header.shape != expected:
                actual = f"the file has {'none' if header is None else list(header.shape)}"
                raise CheckpointError(
                    f"{tensor}: config.json asks for {list(expected)}, {actual}; "
                    "config and weights are not of the same checkpoint"
                )
            allowed = _dtypes(layer, tensor)
            if header.dtype not in allowed:
                raise CheckpointError(
                    f"{tensor}: config.json asks for {' or '.join(allowed)}, the file has "
                    f"{header.dtype}; config and weights are not of the same checkpoint"
                )
        scale = f"{layer.name}.{'w' if layer.dense else 'u'}_scale"
        if layer.storage is None and scale in headers:
            raise CheckpointError(
                f"{scale}: the file has scales, config.json says nothing of numbers in one byte; "
                "config and weights are not of the same checkpoint"
            )


def renamed_in(headers: Mapping[str, TensorHeader], layers: Iterable[LayerReport]) -> set[str]:
    """Return the names of replaced layers whose matrices are all there, under other names.

    Transformers renames some architectures' modules on saving, and back on loading: under the old
    name nothing is left then, and what is there instead has the same shapes.
    """
    ends = (".u", ".v", ".w")
    sizes = {
        name: (shape, layer.name)
        for layer in layers
        if layer.is_replaced
        for name, shape in _expected(layer).items()
        if name.endswith(ends)
    }
    absent = {name: each for name, each in sizes.items() if name not in headers}
    others = {n: each.shape for n, each in headers.items() if n.endswith(ends) and n not in sizes}
    modules = {name.rsplit(".", 1)[0] for name in headers}
    modules |= {parent for name in modules for parent in _parents(name)}
    is_whole = not any(layer.rpartition(".")[0] in modules for _, layer in absent.values())
    wanted = Counter((name[-2:], shape) for name, (shape, _) in absent.items())
    same = wanted == Counter((name[-2:], shape) for name, shape in others.items())
    return {layer for _, layer in absent.values()} if same and is_whole else set()


def _parents(module: str) -> Iterator[str]:
    """Yield the modules that one is part of."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


# --- helpers


def _kernels(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the implementations, of attention and others, that are repositories of a hub."""
    if isinstance(value, dict):
        for key, inner in value.items():
            inside = name if name.endswith("_implementation") else str(key)
            yield from _kernels(inner, inside)
    elif isinstance(value, str) and "/" in value and name.endswith("_implementation"):
        yield name, value


def _expected(layer: LayerReport) -> dict[str, tuple[int, ...]]:
    """The tensors that the layer is stored as, and their shapes."""
    if layer.r is None:
        if layer.storage is None:
            return {f"{layer.name}.weight": (layer.N, layer.K)}
        w, w_scale = STORAGES[layer.storage].shapes(layer.K, layer.N)
        return {f"{layer.name}.w": w, f"{layer.name}.w_scale": w_scale}
    shapes = pair_shapes(layer.K, layer.N, layer.r, layer.storage)
    return {f"{layer.name}.{name}": shape for name, shape in shapes.items()}


def _dtypes(layer: LayerReport, tensor: str) -> tuple[str, ...]:
    """The dtypes that a tensor of the layer may have."""
    if layer.storage is None:
        return FLOATS
    return ("F32",) if tensor.endswith("_scale") else (STORAGES[layer.storage].header,)
