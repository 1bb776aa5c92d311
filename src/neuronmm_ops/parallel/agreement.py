"""Whether all ranks are about to divide the same layers."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.stored_linear import StoredLinear
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.spec import FLOAT_DTYPES
from neuronmm_ops.storages import STORAGES

_KINDS = ("another module", "SVDLinear", "nn.Linear", "StoredLinear")
_STORAGES = ("the dtype's", *STORAGES)
# What is compared, and the words of those that are sent as a number.
_TRAITS: dict[str, tuple[str, ...] | None] = {
    "type": _KINDS,
    "K": None,
    "N": None,
    "r": None,
    "bias": ("none", "one"),
    "storage": _STORAGES,
    "dtype": ("another", *map(name_of, FLOAT_DTYPES)),
}


def check_ranks_agree(
    modules: Sequence[nn.Module | None], mesh: DeviceMesh, source: int | None
) -> None:
    """Refuse modules that are others on another rank: sending parts of those would hang.

    Args:
        modules: that are to be divided.
        mesh: of one dimension.
        source: the rank whose values count; None means that nothing is to be sent, not even this.

    Raises:
        ValueError: on every rank, if type, sizes, bias or dtype of a module differ.
    """
    if source is None:
        return
    own = torch.tensor([_traits(module) for module in modules], device=mesh.device_type)
    gathered = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(gathered, own, group=mesh.get_group())
    first, *others = [tensor.tolist() for tensor in gathered]
    for rank, theirs in enumerate(others, 1):
        for ours, found in zip(first, theirs, strict=True):
            for (trait, words), a, b in zip(_TRAITS.items(), ours, found, strict=True):
                if a != b:
                    here, there = (a, b) if words is None else (words[a], words[b])
                    raise ValueError(
                        f"every rank must have the same layer, got {trait} {here} on rank 0 and "
                        f"{there} on rank {rank}; load the same checkpoint on all"
                    )


def _traits(module: nn.Module | None) -> list[int]:
    """The values of `_TRAITS`."""
    if isinstance(module, CompressedLinear):
        kind = 3 if isinstance(module, StoredLinear) else 1
        sizes = (module.in_features, module.out_features, module.rank or 0)
        storage = 0 if module.storage is None else _STORAGES.index(module.storage)
        return [kind, *sizes, int(module.bias is not None), storage, _dtype(module.dtype)]
    if isinstance(module, nn.Linear):
        sizes = (module.in_features, module.out_features, 0)
        return [2, *sizes, int(module.bias is not None), 0, _dtype(module.weight.dtype)]
    return [0] * len(_TRAITS)


def _dtype(dtype: torch.dtype) -> int:
    return FLOAT_DTYPES.index(dtype) + 1 if dtype in FLOAT_DTYPES else 0
