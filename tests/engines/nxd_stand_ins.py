"""The parts of NxD that the integration uses, as far as it uses them.

Written for the tests, by the public source: parameters of every function have its names, order and
defaults, so that a call which the source would not take fails here, too. Layers really divide
their weights and really add and gather over gloo.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class Group:
    """The default process group, or one rank alone."""

    def size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0


GROUP = Group()
CALLS: list[str] = []  # collectives, in order, and the last dimension


# --- neuronx_distributed.parallel_layers.mappings


def reduce_from_tensor_model_parallel_region(input_: Tensor, process_group: Any = None) -> Tensor:
    CALLS.append(f"all_reduce {input_.shape[-1]}")
    if (process_group or GROUP).size() > 1:
        dist.all_reduce(input_)  # in place, as NxD's
    return input_


def gather_from_tensor_model_parallel_region(input_: Tensor, process_group: Any = None) -> Tensor:
    CALLS.append(f"all_gather {input_.shape[-1]}")
    return _gather(input_, -1, process_group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: Any = None,
    tile_cc: bool = False,
) -> Tensor:
    return _gather(input_, sequence_dimension, process_group)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, process_group: Any = None, dtype: Any = None
) -> Tensor:
    CALLS.append(f"reduce_scatter {input_.shape[-1]}")
    group = process_group or GROUP
    if group.size() == 1:
        return input_
    total = input_.clone()
    dist.all_reduce(total)
    return total.chunk(group.size(), sequence_dimension)[group.rank()].contiguous()


def _gather(input_: Tensor, dim: int, process_group: Any) -> Tensor:
    group = process_group or GROUP
    if group.size() == 1:
        return input_
    assert input_.is_contiguous()
    parts = [torch.empty_like(input_) for _ in range(group.size())]
    dist.all_gather(parts, input_)
    return torch.cat(parts, dim)


# --- neuronx_distributed.parallel_layers.layers


def _cut(parameter: Any, dim: int, tp: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim = True, dim
    parameter.partition_stride, parameter.num_partitions = 1, tp
    parameter.rank_ordering = None


def missing(size: int, tp: int) -> int:
    return -size % tp


class BaseParallelLinear(nn.Module):
    """What NxD gives each rank a part of."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


class DividedLinear(BaseParallelLinear):
    """Its parameters are NaN until they are loaded."""

    def __init__(
        self,
        sizes: tuple[int, int],
        dim: int,
        bias: bool,
        pad: bool,
        dtype: torch.dtype,
        group: Any,
    ) -> None:
        """Make this rank's part of a weight `[N, K]`, divided in a dimension, and of the bias."""
        super().__init__()
        self.tensor_parallel_group = group or GROUP
        tp = self.tensor_parallel_group.size()
        self.pad, self.add_bias = pad, bias
        self.pad_size = missing(sizes[dim], tp) if pad else 0
        assert (sizes[dim] + self.pad_size) % tp == 0, f"{sizes[dim]} is not divisible by {tp}"
        shape = list(sizes)
        shape[dim] = (sizes[dim] + self.pad_size) // tp
        self.weight: Any = nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))
        _cut(self.weight, dim, tp)
        self.bias: Any = None
        if bias:
            self.bias = nn.Parameter(torch.full(shape[:1], torch.nan, dtype=dtype))


class ColumnParallelLinear(DividedLinear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Any = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
        rank_ordering: list[int] | None = None,
    ) -> None:
        sizes = (output_size, input_size)
        super().__init__(sizes, 0, bias, pad, dtype, tensor_model_parallel_group)
        self.gather_output, self.output_size = gather_output, output_size + self.pad_size
        if bias:
            _cut(self.bias, 0, self.tensor_parallel_group.size())

    def forward(self, input: Tensor, slice_indices: Any = None) -> Tensor:  # noqa: A002
        return F.linear(input, self.weight, self.bias)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> None:
        if self.pad and self.pad_size:
            extra = (0, 0, 0, self.pad_size)
            model_state_dict[prefix] = F.pad(model_state_dict[prefix], extra)


class RowParallelLinear(DividedLinear):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        stride: int = 1,
        init_method: Any = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        tile_cc: bool = False,
        rank_ordering: list[int] | None = None,
    ) -> None:
        super().__init__(
            (output_size, input_size), 1, bias, pad, dtype, tensor_model_parallel_group
        )
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.reduce_dtype = dtype if reduce_dtype is None else reduce_dtype

    def forward(self, input_: Tensor, slice_indices: Any = None) -> Tensor:
        partial = F.linear(input_, self.weight)
        if self.sequence_parallel_enabled:
            total = reduce_scatter_to_sequence_parallel_region(
                partial, self.sequence_dimension or 0
            )
        else:
            total = reduce_from_tensor_model_parallel_region(partial)
        return total if self.bias is None else total + self.bias

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> None:
        if self.pad and self.pad_size and not prefix.endswith("bias"):
            model_state_dict[prefix] = F.pad(model_state_dict[prefix], (0, self.pad_size))


# --- neuronx_distributed.trace: how a state dict becomes a rank's parameters


def shard(model: nn.Module, state: dict[str, Tensor], rank: int) -> None:
    """Give a rank's model its part of a converted state dict; every parameter must be in it."""
    _preshard(model, state, "")
    own = _shard(model, state, rank)
    absent, unexpected = model.load_state_dict(own, strict=False)
    assert not absent, absent
    assert not unexpected, unexpected


def shard_checkpoint(
    make: Callable[[], nn.Module], state: dict[str, Tensor], tp: int
) -> list[dict[str, Tensor]]:
    """ModelBuilder's: one rank's model, on the meta device, and one state dict for all ranks.

    The hooks change the state dict once; each rank is given its part of a copy.
    """
    with torch.device("meta"):
        model = make()
    _preshard(model, state, "")
    known = set(model.state_dict())
    state = {name: tensor for name, tensor in state.items() if name in known}
    return [_shard(model, dict(state), rank) for rank in range(tp)]


def _preshard(module: Any, state: dict[str, Tensor], prefix: str) -> None:
    if hasattr(module, "preshard_hook"):
        module.preshard_hook(state, f"{prefix}weight")
        return
    for name, child in module.named_children():
        _preshard(child, state, f"{prefix}{name}.")


def _shard(model: nn.Module, state: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    own: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False):
            key, attributes = inside + name, vars(parameter)
            if key not in state:
                continue
            tensor = state[key]
            if isinstance(module, BaseParallelLinear):
                if "get_tensor_from_state_dict" in attributes:
                    tensor = attributes["get_tensor_from_state_dict"](inside, state)
                if attributes.get("tensor_model_parallel"):
                    dim, tp = attributes["partition_dim"], attributes["num_partitions"]
                    tensor = tensor.split(tensor.shape[dim] // tp, dim)[rank]
            assert tensor.shape == parameter.shape, (key, tensor.shape, parameter.shape)
            own[key] = tensor
    return own
