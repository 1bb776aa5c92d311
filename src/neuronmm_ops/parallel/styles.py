"""Styles for `torch.distributed.tensor.parallel.parallelize_module`."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from neuronmm_ops.nn import SVDMLP, LinearPair, StoredLinear, SVDLinear
from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.svd_qkv import QKVProjection
from neuronmm_ops.parallel.agreement import check_ranks_agree
from neuronmm_ops.parallel.layers import Divided, ShardedMLP, divided_, part_dims
from neuronmm_ops.parallel.sharding import Divide, Kind, check_groups, pair_dims, part
from neuronmm_ops.storages import storage_of

_REPLACED = (
    "{style} divides what a forward of its own computes, got {name} whose forward was replaced, as "
    "accelerate does; remove its hooks first, or load the model on one device"
)


class _Linearwise(ParallelStyle):
    """What both styles of a single layer do."""

    kind: Kind

    def __init__(self, divide: Divide = "both") -> None:
        pair_dims(self.kind, divide)
        self.divide: Divide = divide

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = _tp(device_mesh)
        check_ranks_agree([module], device_mesh, self.src_data_rank)
        _check_projection(type(self).__name__, "", module, self.kind, tp)
        return _divided(module, device_mesh, self.kind, self.divide, self.src_data_rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(divide={self.divide!r})"


class SVDColumnwise(_Linearwise):
    """Divides an `SVDLinear` by its outputs: for the projections to queries, keys and values.

    Each rank calls it with the whole x and gets its N / tp columns of the result, as from torch's
    `ColwiseParallel`; called with a DTensor, it returns one. An `nn.Linear` is divided by that.

    Args:
        divide: which factors the ranks divide: `both`, with an all-gather of `[M, r]` between
            them, or `one`, v alone, without an exchange.

    Raises:
        ValueError: divide is unknown.
    """

    kind = "column"


class SVDRowwise(_Linearwise):
    """Divides an `SVDLinear` by its inputs: for attention's output projection.

    Each rank calls it with its K / tp columns of x and gets the whole result, as from torch's
    `RowwiseParallel`; called with a DTensor, it returns one. An `nn.Linear` is divided by that.

    Args:
        divide: which factors the ranks divide: `both`, with an all-reduce of `[M, r]` between them
            and an all-gather of the result, or `one`, u alone, with the all-reduce only.

    Raises:
        ValueError: divide is unknown.
    """

    kind = "row"


class SVDMLPParallel(ParallelStyle):
    """Divides an `SVDMLP`: gate and up by their outputs, down by its inputs.

    Each rank calls it with the whole x and gets the whole result. Projections that are an
    `nn.Linear` are divided by torch's own styles; they need a tp that divides I.

    Args:
        divide: which factors the ranks divide, `both` or `one`.

    Raises:
        ValueError: divide is unknown.
    """

    def __init__(self, divide: Divide = "both") -> None:
        pair_dims("row", divide)
        self.divide: Divide = divide

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = _tp(device_mesh)
        kinds: dict[str, Kind] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
        projections = [module._modules.get(name) for name in kinds]
        check_ranks_agree(projections, device_mesh, self.src_data_rank)
        if type(module) is not SVDMLP:
            raise TypeError(
                "SVDMLPParallel divides an SVDMLP"
                + (
                    " once, got one that is divided already"
                    if isinstance(module, ShardedMLP)
                    else f", got {type(module).__name__}; divide its Linears one by one"
                )
            )
        named: list[tuple[str, nn.Module, Kind]] = [
            (name, module.get_submodule(name), kind) for name, kind in kinds.items()
        ]
        if "forward" in vars(module):
            raise TypeError(_REPLACED.format(style="SVDMLPParallel", name="an MLP"))
        for name, projection, kind in named:
            _check_projection("SVDMLPParallel", name, projection, kind, tp)
        for _, projection, kind in named:
            _divided(projection, device_mesh, kind, self.divide, self.src_data_rank)
        module.__class__ = ShardedMLP
        assert isinstance(module, ShardedMLP)
        module.mesh = device_mesh
        return module

    def __repr__(self) -> str:
        return f"SVDMLPParallel(divide={self.divide!r})"


def _tp(mesh: DeviceMesh) -> int:
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ()) or "without names"
        raise ValueError(
            f"the mesh must have one dimension, got {mesh.ndim} ({names}); "
            "give the one of tensor parallelism: mesh['tp']"
        )
    return mesh.size()


def _check_projection(style: str, name: str, module: nn.Module, kind: Kind, tp: int) -> None:
    """Refuse what cannot be divided; a projection of an MLP has a `name`, and any I will do."""
    if isinstance(module, Divided):
        raise TypeError(f"{style} divides a layer once, got one that is divided already")
    if type(module) not in (SVDLinear, StoredLinear, QKVProjection, nn.Linear):
        what = f"{name} of type {type(module).__name__}" if name else type(module).__name__
        remedy = "SVDLinear.from_pair" if isinstance(module, LinearPair) else "unwrap or replace it"
        raise TypeError(
            f"{style} divides SVDLinear, StoredLinear and nn.Linear, got {what}; {remedy} first"
        )
    if "forward" in vars(module):
        raise TypeError(_REPLACED.format(style=style, name=name or "a layer"))
    if isinstance(module, CompressedLinear):
        check_groups(name or "a layer", module.storage, kind, module.in_features, tp)
    if not name or type(module) is nn.Linear:
        assert isinstance(module, (nn.Linear, CompressedLinear))
        width = module.out_features if kind == "column" else module.in_features
        part(width, 0, tp, f"{name}'s I" if name else "N" if kind == "column" else "K")


def _divided(
    module: nn.Module, mesh: DeviceMesh, kind: Kind, divide: Divide, source: int | None
) -> nn.Module:
    """Divide a compressed layer, in place; torch divides an nn.Linear."""
    if not isinstance(module, CompressedLinear):
        style = ColwiseParallel() if kind == "column" else RowwiseParallel()
        style.src_data_rank = source
        return style._apply(module, mesh)
    for name, dim in part_dims(module, kind, divide).items():
        tensor = getattr(module, name)
        if tensor is None:
            continue
        placement = Replicate() if dim is None else Shard(dim)
        local = _distributed(tensor.detach(), mesh, placement, source)
        if isinstance(tensor, nn.Parameter):
            setattr(module, name, nn.Parameter(local, requires_grad=tensor.requires_grad))
        else:
            module._buffers[name] = local
    return divided_(module, mesh, kind, divide)


def _distributed(
    tensor: Tensor, mesh: DeviceMesh, placement: Placement, source: int | None
) -> DTensor:
    """Divide a tensor, in the memory order that it has."""
    is_sent = tensor.dtype is torch.uint8 or storage_of(tensor.dtype) is None
    if not is_sent:  # gloo and older NCCL send no fp8, but bytes
        sent = _distributed(tensor.view(torch.uint8), mesh, placement, source)
        return DTensor.from_local(
            sent.to_local().view(tensor.dtype),
            *(mesh, [placement]),
            run_check=False,
            shape=sent.shape,
            stride=sent.stride(),
        )
    if tensor.dim() == 2 and tensor.stride(0) == 1:
        turned = Shard(1 - placement.dim) if isinstance(placement, Shard) else placement
        sent = distribute_tensor(tensor.t(), mesh, [turned], src_data_rank=source)
        return cast(DTensor, sent.t())
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=source)
