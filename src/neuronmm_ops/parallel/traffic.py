"""What tensor parallelism costs a model's decoder layers: bytes sent, and bytes of weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from neuronmm_ops.models import ModelShape
from neuronmm_ops.parallel.sharding import (
    DIVIDES,
    Divide,
    Exchange,
    Kind,
    check_heads,
    exchanges,
    pair_dims,
    part_width,
)

# Layers that take the same x, and how they are cut. Those of one line share a gather.
_GROUPS: tuple[tuple[tuple[str, ...], Kind], ...] = (
    (("q_proj", "k_proj", "v_proj"), "column"),
    (("o_proj",), "row"),
    (("gate_proj", "up_proj"), "column"),
    (("down_proj",), "row"),
)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends and holds of a model's decoder layers in a layout.

    Attributes:
        layout: `dense`, or the value of `divide`.
        wire_bytes: that it sends for a token, in ring collectives.
        exchanges: collectives for a token.
        weight_bytes: of its part of the projections.
    """

    layout: str
    wire_bytes: float
    exchanges: int
    weight_bytes: int


def traffic(
    shape: ModelShape, ranks: Mapping[str, int], tp: int, itemsize: int = 2
) -> list[Traffic]:
    """Return a row each for the dense model, `one` and `both`.

    Args:
        shape: of the model.
        ranks: of its projections by Transformers' names; those without one stay dense.
        tp: ranks of the group; key/value heads are replicated where they are fewer.
        itemsize: bytes of an element, of activations and weights.

    Raises:
        ValueError: tp does not fit the heads, or there is no such projection.
    """
    unknown = sorted(set(ranks) - set(shape.projections))
    if unknown:
        raise ValueError(
            f"projections are {', '.join(shape.projections)}; got {', '.join(unknown)}"
        )
    replicas = check_heads(shape.heads, shape.kv_heads, tp)
    rows = [_row("dense", "both", shape, {}, tp, replicas, itemsize)]
    return rows + [_row(d, d, shape, ranks, tp, replicas, itemsize) for d in DIVIDES]


def _row(
    layout: str,
    divide: Divide,
    shape: ModelShape,
    ranks: Mapping[str, int],
    tp: int,
    replicas: int,
    itemsize: int,
) -> Traffic:
    found: list[Exchange] = []
    elements = 0
    for names, kind in _GROUPS:
        low_rank = [ranks[name] for name in names if name in ranks]
        if tp > 1 and (low_rank or kind == "row"):
            found += exchanges(kind, shape.projections[names[0]][1], low_rank or None, divide)
        for name in names:
            K, N = shape.projections[name]
            copies = replicas if name in ("k_proj", "v_proj") else 1
            elements += _elements(K, ranks.get(name), N * copies, kind, divide, tp)
    sent = sum(exchange.wire_bytes(tp, itemsize) for exchange in found)
    return Traffic(
        layout,
        wire_bytes=shape.layers * sent,
        exchanges=shape.layers * len(found),
        weight_bytes=shape.layers * elements * itemsize,
    )


def _elements(K: int, r: int | None, N: int, kind: Kind, divide: Divide, tp: int) -> int:
    """Elements of a rank's part of a projection, with its zeros."""
    if r is None:
        return K * part_width(N, tp) if kind == "column" else part_width(K, tp) * N
    dims = pair_dims(kind, divide)
    return sum(
        prod(part_width(size, tp) if n == dims[name] else size for n, size in enumerate(sizes))
        for name, sizes in (("u", (K, r)), ("v", (r, N)))
    )
