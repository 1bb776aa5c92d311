"""Whether all ranks are about to divide the same layers."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.stored_linear import StoredLinear
from neuronmm_ops.ops.backends.cpu import name_of


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
    gathered: list[list[dict[str, object]]] = [[] for _ in range(mesh.size())]
    dist.all_gather_object(gathered, [_traits(each) for each in modules], mesh.get_group())
    first, *others = gathered
    for rank, theirs in enumerate(others, 1):
        for ours, other in zip(first, theirs, strict=True):
            for trait in ours | other:
                here, there = ours.get(trait), other.get(trait)
                if here != there:
                    raise ValueError(
                        f"every rank must have the same layer, got {trait} {here} on rank 0 and "
                        f"{there} on rank {rank}; load the same checkpoint on all"
                    )


def _traits(module: nn.Module | None) -> dict[str, object]:
    """What must be the same on all ranks."""
    if not isinstance(module, CompressedLinear | nn.Linear):
        return {"type": "another module"}
    traits: dict[str, object] = {
        "type": "nn.Linear",
        "K": module.in_features,
        "N": module.out_features,
        "bias": "none" if module.bias is None else "one",
        "dtype": name_of(module.weight.dtype),
    }
    if isinstance(module, CompressedLinear):
        kind = "StoredLinear" if isinstance(module, StoredLinear) else "SVDLinear"
        traits |= {"type": kind, "r": module.rank, "storage": module.storage or "the dtype's"}
        traits["dtype"] = name_of(module.dtype)
    return traits
