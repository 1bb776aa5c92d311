"""Lets the ops take DTensors: how each may be divided follows from the cuts of its spec."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.spec import Cut, OpSpec

# What DTensor takes: of a result, and of each argument, None where that is no tensor.
Sharding = tuple[list[Placement], list[Placement | None]]


def shardings(spec: OpSpec) -> Callable[..., list[Sharding]]:
    """Return what tells DTensor how a call of an op may be divided, given what it is called with.

    That is: not at all, in a leading dimension of x, or as one of `spec.cuts`. Sizes that lie side
    by side have no cut in N: no placement says which columns a rank has then.
    """

    def of_call(*args: Any) -> list[Sharding]:
        tensors, _ = spec.split(spec.complete(args, {}))
        dims = [None if tensor is None else len(tensor.shape) for tensor in tensors]
        whole: list[Placement | None] = [None if count is None else Replicate() for count in dims]
        x_dims = dims[0] or 0
        shardings = [(Replicate(), whole)]
        for lead in range(x_dims - 1):
            divided: list[Placement | None] = [
                Shard(lead) if placement is not None and operand.role == "activation" else placement
                for operand, placement in zip(spec.tensors, whole, strict=True)
            ]
            shardings.append((Shard(lead), divided))
        for name in spec.cuts:
            if name == "N" and any(len(names) > 1 for names in spec.sides):
                continue
            cut = spec.cut(name)
            result = Partial() if cut.is_partial else Shard(x_dims - 1)
            shardings.append((result, _placements(spec, cut, dims)))
        options: tuple[Any, ...] = (None,) * len(spec.options)
        return [
            ([result] * len(spec.outputs), list(spec.joined(tuple(placed), options))[: len(args)])
            for result, placed in shardings
        ]

    return of_call


def _placements(spec: OpSpec, cut: Cut, dims: list[int | None]) -> list[Placement | None]:
    """How each tensor of a call lies on the ranks for a cut, None for one that is missing."""
    placements: list[Placement | None] = []
    named = dict(zip((operand.name for operand in spec.tensors), cut.dims, strict=True))
    for operand, dim, count in zip(spec.tensors, cut.dims, dims, strict=True):
        if operand.role == "scale" and count != len(operand.sizes):  # of groups of a factor's rows
            dim = named[operand.name.removesuffix("_scale")]
        if count is None:
            placements.append(None)
        elif dim is not None:
            placements.append(Shard(count + dim))
        else:
            # The ranks' results are added, and a bias once: DTensor gives each rank its part.
            is_added = cut.is_partial and operand.role == "bias"
            placements.append(Partial() if is_added else Replicate())
    return placements


for _spec in SPECS.values():
    # DTensor may move what an op would change in place: it refuses ops that it does not know.
    if not _spec.states:
        register_sharding(getattr(torch.ops.neuronmm, _spec.name).default)(shardings(_spec))
