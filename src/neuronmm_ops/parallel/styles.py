"""Styles for `torch.distributed.tensor.parallel.parallelize_module`."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from neuronmm_ops.nn import SVDMLP, SVDLinear
from neuronmm_ops.nn.storage import storage_of
from neuronmm_ops.parallel.agreement import check_ranks_agree
from neuronmm_ops.parallel.layers import ShardedLinear, ShardedMLP
from neuronmm_ops.parallel.sharding import Divide, Kind, pair_dims, part


class SVDColumnwise(ParallelStyle):
    """Divides an `SVDLinear` by its outputs: for the projections to queries, keys and values.

    Each rank calls it with the whole x and gets its N / tp columns of the result, as from torch's
    `ColwiseParallel`; called with a DTensor, it returns one.

    Args:
        divide: which factors the ranks divide: `both`, with an all-gather of `[M, r]` between
            them, or `one`, v alone, without an exchange.

    Raises:
        ValueError: divide is unknown.
    """

    def __init__(self, divide: Divide = "both") -> None:
        pair_dims("column", divide)
        self.divide: Divide = divide

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = _tp(device_mesh)
        check_ranks_agree([module], device_mesh, self.src_data_rank)
        layer = _svd_linear(module, self, "ColwiseParallel")
        part(layer.out_features, 0, tp, "N")
        return _divided(layer, device_mesh, "column", self.divide, self.src_data_rank)

    def __repr__(self) -> str:
        return f"SVDColumnwise(divide={self.divide!r})"


class SVDRowwise(ParallelStyle):
    """Divides an `SVDLinear` by its inputs: for attention's output projection.

    Each rank calls it with its K / tp columns of x and gets the whole result, as from torch's
    `RowwiseParallel`; called with a DTensor, it returns one.

    Args:
        divide: which factors the ranks divide: `both`, with an all-reduce of `[M, r]` between them
            and an all-gather of the result, or `one`, u alone, with the all-reduce only.

    Raises:
        ValueError: divide is unknown.
    """

    def __init__(self, divide: Divide = "both") -> None:
        pair_dims("row", divide)
        self.divide: Divide = divide

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = _tp(device_mesh)
        check_ranks_agree([module], device_mesh, self.src_data_rank)
        layer = _svd_linear(module, self, "RowwiseParallel")
        part(layer.in_features, 0, tp, "K")
        return _divided(layer, device_mesh, "row", self.divide, self.src_data_rank)

    def __repr__(self) -> str:
        return f"SVDRowwise(divide={self.divide!r})"


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
        for name, kind in kinds.items():
            _check_projection(name, getattr(module, name), kind, tp)
        for name, kind in kinds.items():
            projection = getattr(module, name)
            if isinstance(projection, SVDLinear):
                _divided(projection, device_mesh, kind, self.divide, self.src_data_rank)
                continue
            style = ColwiseParallel() if kind == "column" else RowwiseParallel()
            style.src_data_rank = self.src_data_rank
            style._apply(projection, device_mesh)
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


def _svd_linear(module: nn.Module, style: ParallelStyle, torchs: str) -> SVDLinear:
    if type(module) is SVDLinear:
        return module
    kind = type(style).__name__
    if isinstance(module, ShardedLinear):
        raise TypeError(f"{kind} divides an SVDLinear once, got one that is divided already")
    remedy = "use SVDLinear.from_pair first" if hasattr(module, "linears") else f"use {torchs}"
    raise TypeError(f"{kind} divides an SVDLinear, got {type(module).__name__}; {remedy}")


def _check_projection(name: str, projection: nn.Module, kind: Kind, tp: int) -> None:
    """Refuse what `SVDMLPParallel` cannot divide, before it divides the first projection."""
    if type(projection) is SVDLinear:
        return
    if type(projection) is not nn.Linear:
        raise TypeError(
            f"SVDMLPParallel divides SVDLinear and nn.Linear, got {name} of type "
            f"{type(projection).__name__}; replace or unwrap it first"
        )
    inner = projection.out_features if kind == "column" else projection.in_features
    part(inner, 0, tp, f"{name}'s I")


def _divided(
    layer: SVDLinear, mesh: DeviceMesh, kind: Kind, divide: Divide, source: int | None
) -> SVDLinear:
    """Make an SVDLinear a ShardedLinear, in place."""
    for name, dim in pair_dims(kind, divide).items():
        tensor = getattr(layer, name)
        if tensor is None:
            continue
        placement = Replicate() if dim is None else Shard(dim)
        local = _distributed(tensor.detach(), mesh, placement, source)
        if isinstance(tensor, nn.Parameter):
            setattr(layer, name, nn.Parameter(local, requires_grad=tensor.requires_grad))
        else:
            layer._buffers[name] = local
    layer.__class__ = ShardedLinear
    assert isinstance(layer, ShardedLinear)
    layer.mesh, layer.kind, layer.divide = mesh, kind, divide
    return layer


def _distributed(
    tensor: Tensor, mesh: DeviceMesh, placement: Placement, source: int | None
) -> DTensor:
    """Divide a tensor, in the memory order that it has."""
    if storage_of(tensor.dtype) is not None:  # gloo and older NCCL send no fp8, but bytes
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
