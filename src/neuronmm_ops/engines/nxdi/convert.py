"""From a checkpoint's tensors to the names and layouts of the modules in `layers`.

A pair of our checkpoints is `<layer>.u` `[K, r]`, `<layer>.v` `[r, N]` and an empty
`<layer>.weight`. NxD's linear layers hold `[out, in]`, and NxD Inference replicates and pads heads
in that layout. So the factor at the side that ranks cut, v of a column layer and u of a row layer,
is stored as `<layer>.weight`, transposed, and NxD Inference treats it as it treats a dense weight.
The others are new tensors of the block: `low_rank_u` of its columns, `low_rank_v` of its row.
"""

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor
from torch.nn import functional as F

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.nxdi.record import COLUMNS, ROWS
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.parallel.sharding import Divide, part_width
from neuronmm_ops.storages import FACTORS, SCALES, dequantized

# Where NxD Inference's models have the modules of a block that hold its columns and its row.
COLUMN_MODULES = {"self_attn": "self_attn.qkv_proj", "mlp": "mlp"}
ROW_MODULES = {"self_attn": "self_attn.o_proj", "mlp": "mlp"}


def padded(size: int, tp: int) -> int:
    """Return the smallest multiple of tp that is not smaller than size."""
    return part_width(size, tp) * tp


def take_pairs(
    state: MutableMapping[str, Tensor], layers: Mapping[str, LayerReport], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Remove the pairs from a state dict, and return them.

    An empty `<layer>.weight` stays, which NxD Inference's own conversion may then treat as a dense
    weight. Factors in one byte are multiplied out with their scales: NxD Inference has no dtype for
    them whose meaning it keeps in every case.

    Args:
        state: by NxD Inference's names, without `model.`, of a directory whose headers fit the
            record.
        layers: from `low_rank_layers`.
        dtype: of factors that were in one byte.

    Returns:
        `<layer>.u` `[K, r]`, `<layer>.v` `[r, N]` and `<layer>.bias` `[N]` where there is one.

    Raises:
        CheckpointError: a tensor is missing.
    """
    pairs: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for factor, scale in zip(FACTORS, SCALES, strict=True):
            pairs[f"{name}.{factor}"] = _factor(state, name, layer, factor, scale, dtype)
        state[f"{name}.weight"] = pairs[f"{name}.u"].new_empty(0)
        if f"{name}.bias" in state:
            pairs[f"{name}.bias"] = state[f"{name}.bias"]
            state[f"{name}.bias"] = pairs[f"{name}.u"].new_empty(0)
    return pairs


def put_pairs(
    state: MutableMapping[str, Tensor],
    pairs: Mapping[str, Tensor],
    layers: Mapping[str, LayerReport],
    tp: int,
    divide: Divide,
) -> None:
    """Add the pairs to NxD Inference's state dict, in place, for the modules of `layers`.

    Args:
        state: what NxD Inference's conversion made of the rest, with what `take_pairs` left.
        pairs: from `take_pairs`.
        layers: from `low_rank_layers`.
        tp: ranks.
        divide: which factors they divide; from `divide_of`.
    """
    for prefix in dict.fromkeys(name.rpartition(".")[0] for name in layers):
        layer, block = prefix.rsplit(".", 1)
        if block == "self_attn":
            _drop_fused(state, prefix)
        columns = [member for member in COLUMNS[block] if f"{prefix}.{member}" in layers]
        if columns:
            module = f"{layer}.{COLUMN_MODULES[block]}.low_rank_u"
            _put_columns(state, pairs, prefix, columns, module, tp, divide)
        if f"{prefix}.{ROWS[block]}" in layers:
            module = f"{layer}.{ROW_MODULES[block]}.low_rank_v"
            _put_row(state, pairs, f"{prefix}.{ROWS[block]}", module, tp, divide)


def _put_columns(
    state: MutableMapping[str, Tensor],
    pairs: Mapping[str, Tensor],
    prefix: str,
    columns: list[str],
    module: str,
    tp: int,
    divide: Divide,
) -> None:
    for member in columns:
        name = f"{prefix}.{member}"
        state[f"{name}.weight"] = pairs[f"{name}.v"].t().contiguous()
        if f"{name}.bias" in pairs:
            state[f"{name}.bias"] = pairs[f"{name}.bias"]
    us = {member: pairs[f"{prefix}.{member}.u"] for member in columns}
    if divide == "one":
        state.update({f"{module}.{member}": u.contiguous() for member, u in us.items()})
        return
    together = torch.cat([u.t() for u in us.values()])  # [sum of r, K]
    extra = padded(len(together), tp) - len(together)
    state[f"{module}.weight"] = F.pad(together, (0, 0, 0, extra))


def _put_row(
    state: MutableMapping[str, Tensor],
    pairs: Mapping[str, Tensor],
    name: str,
    module: str,
    tp: int,
    divide: Divide,
) -> None:
    u, v, bias = pairs[f"{name}.u"], pairs[f"{name}.v"], pairs.get(f"{name}.bias")
    state[f"{name}.weight"] = u.t().contiguous()
    state.pop(f"{name}.bias", None)
    if divide == "one":
        state[f"{module}.weight"] = v.contiguous()
        if bias is not None:
            state[f"{module}.bias"] = bias
        return
    extra = padded(v.shape[1], tp) - v.shape[1]
    state[f"{module}.weight"] = F.pad(v.t(), (0, 0, 0, extra)).contiguous()
    if bias is not None:
        state[f"{module}.bias"] = F.pad(bias, (0, extra))


def _drop_fused(state: MutableMapping[str, Tensor], prefix: str) -> None:
    """Remove what `fused_qkv` made of the empty weights and biases."""
    for name in ("weight", "bias"):
        fused = state.get(f"{prefix}.Wqkv.{name}")
        if fused is not None and not fused.numel():
            del state[f"{prefix}.Wqkv.{name}"]


def _factor(
    state: MutableMapping[str, Tensor],
    name: str,
    layer: LayerReport,
    factor: str,
    scale: str,
    dtype: torch.dtype,
) -> Tensor:
    """Take one factor out, multiplied with its scale."""
    tensor = _taken(state, f"{name}.{factor}")
    if layer.storage is None:
        return tensor
    return dequantized(tensor, _taken(state, f"{name}.{scale}").float(), dtype)


def _taken(state: MutableMapping[str, Tensor], name: str) -> Tensor:
    tensor = state.pop(name, None)
    if tensor is None:
        raise CheckpointError(
            f"{name}: config.json asks for it, the file has none; "
            "config and weights are not of the same checkpoint"
        )
    return tensor
