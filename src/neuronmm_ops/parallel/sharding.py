"""Which part of a low-rank layer each rank holds. Plain torch.

A layer is `column` (queries, keys, values, gate, up: every rank has x and makes a part of N) or
`row` (attention's output, down: every rank has a part of K and the ranks' sums are the result).
`divide` says which factors the ranks divide: with `one` only the factor at the cut side, and the
other is whole on every rank; with `both` the ranks exchange `x @ u` `[M, r]` and each reads
1 / tp of both. Parts are `ceil(size / tp)` wide, as DTensor's are.
"""

from collections.abc import Sequence
from typing import Literal

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


def pair_dims(kind: Kind, divide: Divide, storage: str | None = None) -> dict[str, int | None]:
    """Return the dimension in which each tensor of a pair is cut, None where it is whole.

    Args:
        kind: `column` or `row`.
        divide: `one` or `both`.
        storage: of the factors; where rows share scales in groups, these are cut as the factor.

    Returns:
        By the names of a state dict: `u` `[K, r]`, `v` `[r, N]`, `u_scale` `[r]`, `v_scale` `[N]`,
        `bias` `[N]`. A bias that is whole belongs to one rank where ranks add their results.

    Raises:
        ValueError: kind or divide is unknown.
    """
    _check_layout(kind, divide)
    u, v = (_matrix_dims(cut, storage) for cut in _CUTS[kind, divide])
    scales = {"u_scale": u["w_scale"], "v_scale": v["w_scale"]}
    return {"u": u["w"], "v": v["w"], **scales, "bias": v["bias"]}


def matrix_dims(kind: Kind, storage: str | None) -> dict[str, int | None]:
    """Return which dimension of each tensor of a dense layer ranks divide.

    Its tensors are `w` `[K, N]`, `w_scale` `[N]` and `bias` `[N]`.

    Raises:
        ValueError: kind is unknown.
    """
    _check_layout(kind, "one")
    return _matrix_dims("N" if kind == "column" else "K", storage)


def check_groups(name: str, storage: str | None, kind: Kind, K: int, tp: int) -> None:
    """Refuse, with a ValueError, to cut groups of rows that share scales."""
    group = None if storage is None else STORAGES[storage].group
    if kind == "row" and group is not None and K % (group * tp):
        raise ValueError(
            f"{name}: tp must divide the groups of {group} rows that share scales in {storage}, "
            f"got {K} rows and tp = {tp}; use another tp or storage"
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


def split_gathered(gathered: Tensor, widths: Sequence[int], tp: int) -> list[Tensor]:
    """Take apart what ranks sent side by side.

    Args:
        gathered: `[..., tp * sum(widths)]`, the parts of one rank after those of another.
        widths: of each part.
        tp: ranks.

    Returns:
        `[..., tp * width]` for each width.
    """
    parts = gathered.unflatten(-1, (tp, -1)).split(list(widths), -1)
    return [part.flatten(-2) for part in parts]


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


def _matrix_dims(cut: str | None, storage: str | None) -> dict[str, int | None]:
    """In which dimension, counted from 0, each tensor of an `xw` is cut."""
    spec = SPECS["xw"]
    dims = (None,) * len(spec.tensors) if cut is None else spec.cut(cut).dims
    by_matrix = {
        operand.name: None if dim is None else dim + len(operand.sizes)
        for operand, dim in zip(spec.tensors, dims, strict=True)
        if operand.role != "activation"
    }
    if storage is not None and STORAGES[storage].group is not None:
        by_matrix["w_scale"] = by_matrix["w"]
    return by_matrix


def _check_layout(kind: str, divide: str) -> None:
    for what, value, values in (("kind", kind, KINDS), ("divide", divide, DIVIDES)):
        if value not in values:
            raise ValueError(f"{what} must be {' or '.join(values)}, got {value!r}")
