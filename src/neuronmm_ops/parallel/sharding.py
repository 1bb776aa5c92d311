"""Which part of a low-rank layer each rank holds, and what the ranks send. Plain torch.

A layer is `column` (queries, keys, values, gate, up: every rank has x and makes a part of N) or
`row` (attention's output, down: every rank has a part of K and the ranks' sums are the result).
`divide` says which factors the ranks divide: with `one` only the factor at the cut side, and the
other is whole on every rank; with `both` the ranks exchange `x @ u` `[M, r]` and each reads
1 / tp of both. Parts are `ceil(size / tp)` wide, as DTensor's are.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.storages import STORAGES

Kind = Literal["column", "row"]
Divide = Literal["one", "both"]
KINDS: tuple[Kind, ...] = ("column", "row")
DIVIDES: tuple[Divide, ...] = ("one", "both")

# How `x @ u` and its product with v are cut, each being an `xw`.
_CUTS: dict[tuple[Kind, Divide], tuple[str | None, str | None]] = {
    ("column", "one"): (None, "N"),
    ("column", "both"): ("N", "N"),
    ("row", "one"): ("K", None),
    ("row", "both"): ("K", "N"),
}


class Exchange(NamedTuple):
    """A collective of the ranks for M tokens.

    Attributes:
        collective: `all_reduce` or `all_gather`.
        widths: of the whole matrices `[M, width]` that share it.
    """

    collective: Literal["all_reduce", "all_gather"]
    widths: tuple[int, ...]

    def wire_bytes(self, tp: int, itemsize: int = 2) -> float:
        """Return what one of tp ranks sends for a token, in a ring."""
        if self.collective == "all_gather":
            return (tp - 1) * sum(part_width(width, tp) for width in self.widths) * itemsize
        return 2 * (tp - 1) / tp * sum(self.widths) * itemsize


def pair_dims(kind: Kind, divide: Divide) -> dict[str, int | None]:
    """Return the dimension in which each tensor of a pair is cut, None where it is whole.

    Args:
        kind: `column` or `row`.
        divide: `one` or `both`.

    Returns:
        By the names of a state dict: `u` `[K, r]`, `v` `[r, N]`, `u_scale` `[r]`, `v_scale` `[N]`,
        `bias` `[N]`. A bias that is whole belongs to one rank where ranks add their results.

    Raises:
        ValueError: kind or divide is unknown.
    """
    _check_layout(kind, divide)
    u, v = (_matrix_dims(cut) for cut in _CUTS[kind, divide])
    scales = {"u_scale": u["w_scale"], "v_scale": v["w_scale"]}
    return {"u": u["w"], "v": v["w"], **scales, "bias": v["bias"]}


def check_divisible(name: str, storage: str | None) -> None:
    """Refuse, with a ValueError, to divide factors of which groups of rows share scales."""
    if storage is not None and STORAGES[storage].group is not None:
        raise ValueError(
            f"{name}: factors in {storage}, whose groups of rows share scales, are not divided "
            "between ranks; use tp = 1 or another storage"
        )


def part(size: int, rank: int, tp: int, what: str, *, padded: bool = False) -> slice:
    """Return which of `size` columns or rows a rank has: equal parts, in the order of the ranks.

    Args:
        size: of the whole.
        rank: of this process, 0 to tp - 1.
        tp: ranks that divide it.
        what: its name, for the error.
        padded: whether `size` may be no multiple of tp. Then parts are `ceil(size / tp)` wide, the
            last ones that are left may be narrower or empty, and `shard` fills them with zeros.

    Raises:
        ValueError: tp does not divide the size, or there is no such rank.
    """
    if tp < 1 or not 0 <= rank < tp:
        raise ValueError(f"rank must be in 0..tp - 1 with tp >= 1, got rank {rank} of tp {tp}")
    if size % tp and not padded:
        raise ValueError(
            f"tp must divide {what}, got {what} = {size} and tp = {tp}; "
            f"use a tp that divides {size}"
        )
    width = part_width(size, tp)
    return slice(min(rank * width, size), min((rank + 1) * width, size))


def part_width(size: int, tp: int) -> int:
    """Return `ceil(size / tp)`, the width of every part with its zeros."""
    return -(-size // tp)


def shard(
    tensor: Tensor, dim: int | None, rank: int, tp: int, what: str, *, padded: bool = False
) -> Tensor:
    """Return a rank's part of a tensor, a contiguous copy.

    Args:
        tensor: the whole.
        dim: in which it is cut, as `pair_dims` gives it; None is a copy of the whole.
        rank: of this process.
        tp: ranks that divide it.
        what: its name, for the error.
        padded: whether tp need not divide it: the part is then filled up with zeros, which are
            exact, to `ceil(size / tp)`.

    Raises:
        ValueError: as `part`.
    """
    if dim is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    own = part(tensor.shape[dim], rank, tp, what, padded=padded)
    kept = own.stop - own.start
    shape = list(tensor.shape)
    shape[dim] = part_width(shape[dim], tp)
    result = tensor.new_zeros(shape)
    result.narrow(dim, 0, kept).copy_(tensor.narrow(dim, own.start, kept))
    return result


def check_heads(heads: int, kv_heads: int, tp: int) -> int:
    """Check that ranks can divide attention's heads, and return how many hold each kv head.

    Args:
        heads: of queries.
        kv_heads: of keys and values.
        tp: ranks.

    Returns:
        1 where tp divides the kv heads, `tp / kv_heads` where tp is a multiple of them.

    Raises:
        ValueError: tp does not divide the heads, or neither divides the kv heads nor is a multiple.
    """
    if tp < 1 or heads % tp:
        raise ValueError(
            f"tp must divide the heads, got {heads} heads and tp = {tp}; "
            f"use a tp that divides {heads}"
        )
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"tp must divide the key/value heads or be a multiple of them, got {kv_heads} and "
            f"tp = {tp}; use another tp"
        )
    return max(1, tp // kv_heads)


def exchanges(
    kind: Kind, N: int, r: int | Sequence[int] | None, divide: Divide = "both"
) -> tuple[Exchange, ...]:
    """Return what the ranks of a layer exchange, in order.

    Args:
        kind: `column` or `row`.
        N: columns of the result.
        r: the rank, or those of column layers that share a gather; None for a dense layer.
        divide: which factors the ranks divide.

    Raises:
        ValueError: kind or divide is unknown.
    """
    _check_layout(kind, divide)
    ranks = (r,) if isinstance(r, int) else tuple(r or ())
    if kind == "column":
        return (Exchange("all_gather", ranks),) if ranks and divide == "both" else ()
    if not ranks:
        return (Exchange("all_reduce", (N,)),)
    if divide == "both":
        return Exchange("all_reduce", ranks), Exchange("all_gather", (N,))
    return (Exchange("all_reduce", (min(sum(ranks), N),)),)


def wire_bytes(
    kind: Kind,
    N: int,
    r: int | Sequence[int] | None,
    tp: int,
    divide: Divide = "both",
    itemsize: int = 2,
) -> float:
    """Return the bytes that one rank sends for a token in ring collectives.

    A ring's all-reduce of n elements sends `2 (tp - 1) / tp * n`, its all-gather of n (all parts
    with their zeros) `(tp - 1) / tp * n`: https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.

    Args:
        kind: `column` or `row`.
        N: columns of the result.
        r: the rank, or those of column layers that share a gather; None for a dense layer.
        tp: ranks.
        divide: which factors the ranks divide.
        itemsize: bytes of an element.

    Raises:
        ValueError: kind or divide is unknown.
    """
    return sum((each.wire_bytes(tp, itemsize) for each in exchanges(kind, N, r, divide)), 0.0)


def _matrix_dims(cut: str | None) -> dict[str, int | None]:
    """In which dimension, counted from 0, each tensor of an `xw` is cut."""
    spec = SPECS["xw"]
    dims = (None,) * len(spec.tensors) if cut is None else spec.cut(cut).dims
    return {
        operand.name: None if dim is None else dim + len(operand.sizes)
        for operand, dim in zip(spec.tensors, dims, strict=True)
    }


def _check_layout(kind: str, divide: str) -> None:
    for what, value, values in (("kind", kind, KINDS), ("divide", divide, DIVIDES)):
        if value not in values:
            raise ValueError(f"{what} must be {' or '.join(values)}, got {value!r}")
