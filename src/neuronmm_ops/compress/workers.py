"""Many processes that compress one model: each holds all of it and takes a share of the work.

Outside of `together` there is one worker, and what is here leaves values as they are. Workers are
numbered from 0, as the ranks of `torch.distributed` are; a rank is a matrix's everywhere else.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from neuronmm_ops.errors import WorkerLostError
from neuronmm_ops.nn.dense_linear import DenseLinear

T = TypeVar("T")
# u and v, and their scales where they are in one byte; or one matrix in one byte and its scales.
Factors = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]

_depth = 0  # blocks of `together` that are open


@contextmanager
def together() -> Generator[None]:
    """Let all processes of the default process group share the work of a block.

    Each must call the same functions with the same arguments, and gets the same results. Without
    this block a call is the process's own, so that one process of a training job may compress
    alone. An error on one worker is raised there alone: the others wait for it until its process
    ends, or the group's timeout passes.

    Raises:
        ValueError: there is no process group.
    """
    global _depth
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "workers need a process group; start them with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def count() -> int:
    """Return how many workers there are."""
    return dist.get_world_size() if _depth else 1


def index() -> int:
    """Return this worker's number."""
    return dist.get_rank() if _depth else 0


def share(items: Sequence[T]) -> Sequence[T]:
    """Return this worker's items, every `count()`-th of them; none where there are too few."""
    return items[index() :: count()]


def spread(linears: Mapping[str, DenseLinear]) -> dict[str, int]:
    """Return who factors each Linear: the most expensive first, to the worker with least to do."""
    costs = {n: m.in_features * m.out_features * _smaller(m) for n, m in linears.items()}
    loads = [0] * count()
    owners: dict[str, int] = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners


def gather(value: T) -> list[T]:
    """Return every worker's value, in the order of their numbers. For small values."""
    if count() == 1:
        return [value]
    values: list[T | None] = [None] * count()
    _run(lambda: dist.all_gather_object(values, value))
    return values  # pyright: ignore  (every place has been filled)


def gather_names(values: Mapping[str, T]) -> dict[str, T]:
    """Return the union of every worker's named values. For small values."""
    return {name: value for part in gather(dict(values)) for name, value in part.items()}


def sum_(*tensors: Tensor) -> None:
    """Replace each tensor by its sum over the workers, in place.

    Call `gather` first: gloo, which that goes through, finds a dead worker at once, NCCL waits.
    """
    if count() > 1:
        for tensor in tensors:
            _run(lambda tensor=tensor: dist.all_reduce(tensor))


def sum_names(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return each name's sum over the workers that have it, in the place of their own tensor.

    Args:
        tensors: fp64, contiguous, of one shape for each name.
        device: of what a worker is given that had none.
    """
    if count() == 1:
        return dict(tensors)
    shapes = gather_names({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    summed: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        local = tensors.get(name)
        total = torch.zeros(shape, dtype=torch.float64, device=device) if local is None else local
        sum_(total)
        summed[name] = total
    return summed


def exchange(
    local: Mapping[str, Factors], owners: Mapping[str, int], linears: Mapping[str, DenseLinear]
) -> dict[str, Factors]:
    """Return the factors that all workers have found.

    Args:
        local: name to `(u[K, r], v[r, N])`, and where they are in one byte their scales, of the
            Linears that this worker owns, or `(w[K, N], its scales)`; without those that stay as
            they are.
        owners: of every Linear the worker that has its factors.
        linears: every Linear, on the device of its factors.
    """
    if count() == 1:
        return dict(local)
    kinds = gather_names({n: [(f.shape, f.dtype) for f in pair] for n, pair in local.items()})
    factors: dict[str, Factors] = {}
    for name in (name for name in owners if name in kinds):
        weight = linears[name].weight
        pair = local.get(name) or [weight.new_empty(s, dtype=dtype) for s, dtype in kinds[name]]
        whole = tuple(_broadcast(factor, owners[name]) for factor in pair)
        factors[name] = whole  # pyright: ignore  (of as many as the owner's)
    return factors


def only_first(act: Callable[[], object]) -> None:
    """Let worker 0 do something, such as write to the disk, while the others wait for it."""
    if index() == 0:
        act()
    gather(None)


def _broadcast(tensor: Tensor, owner: int) -> Tensor:
    tensor = tensor.detach().contiguous()
    # As bytes: gloo does not know every dtype.
    _run(lambda: dist.broadcast(tensor.view(torch.uint8), owner))
    return tensor


def _run(collective: Callable[[], object]) -> None:
    try:
        collective()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # gloo's message begins with a place in its source, and ends with advice.
        reason = re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0]
        raise WorkerLostError(
            f"worker {index()} of {count()} has lost another, which has ended or does not answer: "
            f"{reason}"
        ) from error


def _smaller(linear: DenseLinear) -> int:
    return min(linear.in_features, linear.out_features)
