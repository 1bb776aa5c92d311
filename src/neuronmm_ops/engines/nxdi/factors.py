"""The factors of low-rank layers in NxD's parallel layers, divided by ranks or whole. Imports NxD.

Factors are in the modules as the ops take them, `[K, r]` and `[r, N]`; the state dict that NxD
shards has those that ranks divide as `[out, in]`, as NxD's linear layers do.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.engines.nxdi.convert import padded
from neuronmm_ops.ops import xw
from neuronmm_ops.parallel.sharding import Divide

_parallel = import_module("neuronx_distributed.parallel_layers.layers")
_mappings = import_module("neuronx_distributed.parallel_layers.mappings")


class CutU(_parallel.ColumnParallelLinear):
    """The factors u of a block's column layers side by side, divided by the ranks.

    Args:
        K: columns of x.
        ranks: of the members, in the order of their columns.
        dtype: of the parameter.
        group: of the ranks.
    """

    def __init__(self, K: int, ranks: Mapping[str, int], dtype: torch.dtype, group: Any) -> None:
        width = padded(sum(ranks.values()), group.size())
        super().__init__(K, width, **_options(dtype, group, False))
        self.weight = _operand(self.weight)
        self.ranks = dict(ranks)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return `x @ u` `[..., r]` of each member, for x `[..., K]`; one gather for all."""
        hidden = _gathered(xw(x, self.weight), self.tensor_parallel_group)
        widths = [*self.ranks.values()]
        parts = hidden[..., : sum(widths)].split(widths, -1)  # without the padding
        return dict(zip(self.ranks, parts, strict=True))


class WholeU(nn.Module):
    """The factors u `[K, r]` of a block's column layers, whole on every rank."""

    def __init__(self, K: int, ranks: Mapping[str, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.ranks = dict(ranks)
        for name, r in ranks.items():
            self.register_parameter(name, _whole((K, r), dtype))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return `x @ u` `[..., r]` of each member, for x `[..., K]`."""
        return {name: xw(x, self.get_parameter(name)) for name in self.ranks}


class CutV(_parallel.ColumnParallelLinear):
    """The factor v `[r, N]` of a row layer, divided by the ranks at N."""

    def __init__(self, r: int, N: int, bias: bool, dtype: torch.dtype, group: Any) -> None:
        super().__init__(r, padded(N, group.size()), **_options(dtype, group, bias))
        self.weight = _operand(self.weight)
        self.columns = N

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden @ v + bias` `[..., N]`, whole on every rank, for hidden `[..., r]`."""
        result = _gathered(xw(hidden, self.weight, self.bias), self.tensor_parallel_group)
        return result if result.shape[-1] == self.columns else result[..., : self.columns]


class WholeV(nn.Module):
    """The factor v `[r, N]` of a row layer, whole on every rank."""

    def __init__(self, r: int, N: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _whole((r, N), dtype)
        self.bias = _whole((N,), dtype) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden @ v + bias` `[..., N]` for hidden `[..., r]`."""
        return xw(hidden, self.weight, self.bias)


def column_u(
    K: int, ranks: Mapping[str, int], dtype: torch.dtype, group: Any, divide: Divide
) -> nn.Module:
    """Return the factors u `[K, r]` of a block's column layers, by their names."""
    return CutU(K, ranks, dtype, group) if divide == "both" else WholeU(K, ranks, dtype)


def column_v(
    r: int, N: int, bias: bool, dtype: torch.dtype, group: Any, pad: bool = False
) -> nn.Module:
    """Return the factor v `[r, N]` of a column layer, divided at N, which NxD may pad."""
    linear = _parallel.ColumnParallelLinear(r, N, **_options(dtype, group, bias), pad=pad)
    linear.weight = _operand(linear.weight)
    return linear


def row_u(dense: Any, K: int, r: int, dtype: torch.dtype, pad: bool = False) -> nn.Module:
    """Return the factor u `[K, r]` of a row layer in the place of a dense one, divided at K."""
    linear = _parallel.RowParallelLinear(
        K,
        r,
        bias=False,
        input_is_parallel=True,
        dtype=dtype,
        sequence_parallel_enabled=dense.sequence_parallel_enabled,
        sequence_dimension=dense.sequence_dimension,
        pad=pad,
        reduce_output=False,
        tensor_model_parallel_group=dense.tensor_parallel_group,
        reduce_dtype=dense.reduce_dtype,
    )
    linear.weight = _operand(linear.weight)
    return linear


def row_v(r: int, N: int, bias: bool, dtype: torch.dtype, group: Any, divide: Divide) -> nn.Module:
    """Return the factor v `[r, N]` of a row layer."""
    return CutV(r, N, bias, dtype, group) if divide == "both" else WholeV(r, N, bias, dtype)


def reduced(layer: Any, partial: Tensor) -> Tensor:
    """Add the ranks' parts of `x @ u` `[B, S, r]`, in the layer's dtype for sums."""
    group, wide = layer.tensor_parallel_group, partial.to(layer.reduce_dtype)
    if layer.sequence_parallel_enabled:
        total = _mappings.reduce_scatter_to_sequence_parallel_region(
            wide, layer.sequence_dimension, process_group=group
        )
    else:
        total = _mappings.reduce_from_tensor_model_parallel_region(wide, process_group=group)
    return total.to(partial.dtype)


def _gathered(part: Tensor, group: Any) -> Tensor:
    return _mappings.gather_from_tensor_model_parallel_region(part, process_group=group)


def _whole(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _options(dtype: torch.dtype, group: Any, bias: bool) -> dict[str, Any]:
    return {
        "bias": bias,
        "gather_output": False,
        "dtype": dtype,
        "tensor_model_parallel_group": group,
    }


def _operand(weight: nn.Parameter) -> nn.Parameter:
    """Return a parallel layer's weight `[out, in]` as the ops take it, `[in, out]`.

    NxD cuts the tensor of the state dict, which stays `[out, in]`, by the parameter's attributes,
    and asks the parameter for it. NxD Inference's own function for that keeps what it once read for
    the life of the process, by its name; a second model would get the first one's weights.
    """
    transposed = torch.empty_like(weight.detach().t(), memory_format=torch.contiguous_format)
    operand = nn.Parameter(transposed, requires_grad=False)
    attributes: dict[str, Any] = {**vars(weight)}
    attributes["partition_dim"] = 1 - attributes["partition_dim"]
    attributes["get_tensor_from_state_dict"] = _transposed_weight
    for name, value in attributes.items():
        setattr(operand, name, value)
    return operand


def _transposed_weight(prefix: str, state_dict: Mapping[str, Tensor]) -> Tensor:
    return state_dict[f"{prefix}weight"].t()
