"""The files of an export: config.json, weights, and what belongs to the tokenizer."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from neuronmm_ops.checkpoint import INDEX, SINGLE, TensorHeader, read_object
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.manifest import MANIFEST
from neuronmm_ops.output import OURS
from neuronmm_ops.storages import SCALES, dequantized

_NOT_COPIED = (
    *("config.json", "compression.json", "generation_config.json", "tokenizer_config.json", INDEX),
    MANIFEST,
)


def transformers_4_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json as Transformers 4 has it, which later versions read, too."""
    written = {key: value for key, value in config.items() if key != "dtype"}
    written["torch_dtype"] = dtype
    rope = written.pop("rope_parameters", None)
    if rope is None:
        return written
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            "rope_parameters differ between layers, which NxD Inference's models of "
            f"{config['model_type']} do not take"
        )
    rope = dict(rope)
    written["rope_theta"] = rope.pop("rope_theta", 10000.0)
    written["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return written


def write_others(source: Path, directory: Path, config: Mapping[str, Any]) -> None:
    """Copy the tokenizer's files; write what NxD Inference's own tools ask for besides."""
    for path in sorted(source.iterdir()):
        known = path.is_file() and OURS.fullmatch(path.name) and path.suffix != ".safetensors"
        if known and path.name not in _NOT_COPIED:
            shutil.copyfile(path, directory / path.name)
    tokenizer = source / "tokenizer_config.json"
    if tokenizer.is_file():
        fields = read_object(tokenizer)
        if fields.get("tokenizer_class") == "TokenizersBackend":  # of Transformers 5
            fields["tokenizer_class"] = "PreTrainedTokenizerFast"
            fields.pop("backend", None)
        write_json(directory / tokenizer.name, fields)
    generation = source / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, directory / generation.name)
    else:
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(directory / generation.name, {key: config.get(key) for key in ids})


def write_weights(
    headers: Mapping[str, TensorHeader],
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> int:
    """Write the weights, one file in memory at a time; return their bytes."""
    # Dense matrices in a storage, by the names that they get.
    stored = {f"{n.removesuffix('.w')}.weight": n for n in headers if n.endswith(".w")}
    scales = tuple(f".{name}" for name in (*SCALES, "w", "w_scale"))
    names = [name for name in headers if not name.endswith(scales)]
    sizes = {name: headers[stored.get(name, name)] for name in names}
    shards = _shards(
        {name: tensor_bytes(header, dtype.itemsize) for name, header in sizes.items()}, shard_bytes
    )
    total, weight_map = 0, dict[str, str]()
    for index, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: _read(headers, stored[name]).t() if name in stored else _read(headers, name)
            for name in shard
        }
        tensors = {
            name: (t.to(dtype) if t.is_floating_point() else t).contiguous()
            for name, t in tensors.items()
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod((directory / "config.json").stat().st_mode)
        total += sum(tensor.nbytes for tensor in tensors.values())
        weight_map |= dict.fromkeys(shard, file)
        del tensors
    if len(shards) > 1:
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def _read(headers: Mapping[str, TensorHeader], name: str) -> Tensor:
    """Read a tensor; a factor that has scales, times these."""
    with safe_open(headers[name].file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    scale = f"{name}_scale"
    return dequantized(tensor, _read(headers, scale) if scale in headers else None, torch.float32)


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Group names in their order, each group's bytes up to a limit."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def tensor_bytes(header: TensorHeader, itemsize: int) -> int:
    """Return the bytes of a tensor in a dtype of that size."""
    return torch.Size(header.shape).numel() * itemsize


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as Transformers writes its configs."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
