"""The engine's own model with low-rank layers in place of those that the checkpoint has.

Queries, keys and values are multiplied out on loading: the engine's decode kernel makes them of one
dense matrix, inside of attention. All other layers stay low rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.checkpoint import TensorHeader
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.places import COLUMNS, ROWS, name_in_model
from neuronmm_ops.engines.vllm_neuron.engine import GroupCoordinator, Slice, set_loader
from neuronmm_ops.engines.vllm_neuron.launch import Kernels
from neuronmm_ops.engines.vllm_neuron.layers import LowRankMLP, LowRankOutput, member_for
from neuronmm_ops.engines.vllm_neuron.weights import Files, parameter
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.ops.backends.launch import DTYPE_NAMES
from neuronmm_ops.parallel.sharding import part, part_width

_EVEN = 2
"""The engine's output kernel divides its columns between the cores of a logical one."""
Layers = Mapping[str, LayerReport]
_PARTS = (
    ("mlp", (*COLUMNS["mlp"], ROWS["mlp"])),
    ("self_attn", COLUMNS["self_attn"]),
    ("self_attn", (ROWS["self_attn"],)),
)


def put_low_rank_(
    model: nn.Module,
    layers: Layers,
    headers: Mapping[str, TensorHeader],
    group: GroupCoordinator,
    kernels: Kernels,
) -> None:
    """Put low-rank layers in place of the dense ones of an engine's model, before it is loaded.

    Args:
        model: as the engine's factory makes it: `model.layers[i]` with `self_attn`, `mlp`.
        layers: the checkpoint's record, by name; those it does not list are dense.
        headers: of the checkpoint's tensors.
        group: the ranks.
        kernels: run the products.

    Raises:
        CheckpointError: a low-rank layer is none that the engine's blocks have, or has a bias.
        ValueError: the ranks do not divide a layer that stays dense, or the model's dtype is none
            of a NeuronCore's.
    """
    for layer in layers.values():
        name = name_in_model(layer, "vLLM-Neuron")
        if name is None and layer.is_replaced:
            raise CheckpointError(
                f"{layer.name} must be as it was in vLLM-Neuron, got it in {layer.storage}; "
                "compress again without --head-storage"
            )
        if layer.is_replaced and f"{layer.name}.bias" in headers:
            raise CheckpointError(
                f"{layer.name} must have no bias in vLLM-Neuron, the file has {layer.name}.bias"
            )
    blocks: Any = model.get_submodule("model.layers")
    dtype = blocks[0].self_attn.qkv_proj_weight.dtype
    if dtype not in DTYPE_NAMES:
        raise ValueError(
            f"dtype must be bfloat16, float16 or float32 in vLLM-Neuron, got {dtype}; change "
            "dtype in config.json"
        )
    files = Files(headers)
    for index, block in enumerate(blocks):
        mlp, qkv, (output,) = (
            [_layer(f"model.layers.{index}.{part_of}.{name}", layers, headers) for name in names]
            for part_of, names in _PARTS
        )
        if any(layer.is_replaced for layer in mlp):
            block.mlp = LowRankMLP(mlp[0], mlp[1], mlp[2], group, kernels, dtype)
        else:
            # The engine's own MLP would drop the columns that are left.
            part(mlp[0].N, 0, group.world_size, "intermediate_size of a dense MLP")
        if any(layer.is_replaced for layer in qkv):
            _multiply_out(block.self_attn, qkv, files, group.world_size)
        if output.is_replaced:
            metadata = f"layers.{index}.self_attn"
            _divide_output(block.self_attn, metadata, output, files, group, kernels, dtype)


def _layer(name: str, layers: Layers, headers: Mapping[str, TensorHeader]) -> LayerReport:
    """The record of a layer, or what the file's header says of a dense one."""
    report = layers.get(name)
    if report is not None:
        return report
    header = headers.get(f"{name}.weight")
    if header is None or len(header.shape) != 2:
        raise CheckpointError(
            f"{name}.weight must be a matrix, the file has "
            f"{'none' if header is None else list(header.shape)}; copy the checkpoint again"
        )
    N, K = header.shape
    return LayerReport(name, K, N, None, True, None, None, 0, 0)


def _multiply_out(attention: Any, layers: list[LayerReport], files: Files, tp: int) -> None:
    """Have the fused queries, keys and values made of the factors when they are loaded."""
    queries, keys, _ = layers
    # Ranks that are more than the key/value heads share one.
    sharing = max(1, tp // (keys.N // attention.head_dim))
    dtype = attention.qkv_proj_weight.dtype

    def read(slices: list[Slice], rank: int) -> Tensor:
        q = part(queries.N, rank, tp, f"columns of {queries.name}")
        kv = part(keys.N, rank // sharing, tp // sharing, f"columns of {keys.name}")
        pairs = zip(layers, (q, kv, kv), strict=True)
        return torch.cat([files.columns(layer, columns) for layer, columns in pairs], dim=1).to(
            dtype
        )

    set_loader(attention.qkv_proj_weight, read)


def _divide_output(
    attention: Any,
    metadata: str,
    layer: LayerReport,
    files: Files,
    group: GroupCoordinator,
    kernels: Kernels,
    dtype: torch.dtype,
) -> None:
    """Have attention end with the first factor, and multiply by the second after its reduction.

    The engine's kernel multiplies by the first one in the model's dtype, and by a dense matrix.
    """
    tp = group.world_size
    width = layer.N if layer.r is None else _EVEN * part_width(layer.r, _EVEN)

    def read(slices: list[Slice], rank: int) -> Tensor:
        wanted = part(layer.K, rank, tp, f"rows of {layer.name}")
        rows = files.matrix(layer, None if layer.r is None else 0, rows=wanted)
        return F.pad(rows, (0, width - rows.shape[1])).to(dtype)

    attention.o_proj_weight = parameter((layer.K // tp, width), dtype, read)
    if layer.r is None:
        return
    output = member_for(replace(layer, r=width), "row", group, kernels, dtype, LowRankOutput)
    output.group = group
    for key in ("u", "u_scale"):
        setattr(output, key, None)
        output.shapes.pop(key, None)
    attention.o_proj = output

    def expand_output(module: Any, args: Any, kwargs: dict[str, Any], h: Tensor) -> Tensor:
        state = kwargs["attn_metadata"][metadata]
        is_prefill = state["max_query_len"] > state["decode_token_threshold"]
        return module.o_proj(h, is_prefill)

    attention.register_forward_hook(expand_output, with_kwargs=True)
