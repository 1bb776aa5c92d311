"""How attention's heads lie on partitions and which core has them. Pure: no instruction."""

from __future__ import annotations

from neuronmm_ops.hardware import PARTITIONS
from neuronmm_ops.kernels.nki_object import NKIObject
from neuronmm_ops.kernels.stages.tiling import Span, core_span, spans, tiles_in

QUADRANT = 32
"""Partitions from a multiple of which an engine may begin."""


def problem_of(batch: int, heads: int, kv_heads: int, head_dim: int, tokens: int) -> str:
    """What is wrong with sizes of attention, in one line; empty where nothing is."""
    seen = f"batch {batch}, heads {heads}, kv_heads {kv_heads}, head_dim {head_dim}, T {tokens}"
    if min(batch, heads, kv_heads, head_dim, tokens) < 1:
        return f"sizes must be at least 1; got {seen}"
    if heads % kv_heads > 0:
        return f"heads must be a multiple of kv_heads; got {seen}"
    if head_dim % 2 > 0 or head_dim > PARTITIONS:
        return f"head_dim must be even and at most {PARTITIONS}; got {seen}"
    if heads >= PARTITIONS * kv_heads:
        return f"at most {PARTITIONS - 1} query heads share a key head; got {seen}"
    return ""


class Shape(NKIObject):
    """Sizes of attention.

    Args:
        batch: sequences.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: features of a head.
        tokens: in the cache, T.
    """

    def __init__(self, batch: int, heads: int, kv_heads: int, head_dim: int, tokens: int) -> None:
        problem = problem_of(batch, heads, kv_heads, head_dim, tokens)
        assert problem == "", problem
        self.batch = batch
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.tokens = tokens
        self.group = heads // kv_heads
        # key heads whose features lie one below the other on the partitions
        self.stacked = PARTITIONS // head_dim if head_dim % QUADRANT == 0 else 1


class Unit(NKIObject):
    """Key heads of a sequence that decode computes together, with their query heads.

    Args:
        sequence: which of the batch.
        keys: range of the key heads.
    """

    def __init__(self, sequence: int, keys: Span) -> None:
        self.sequence = sequence
        self.keys = keys


def most_keys(group: int, stacked: int) -> int:
    """Key heads of a unit: their rows and those of their queries are on 128 partitions."""
    fit = PARTITIONS // (group + 1)
    return fit // stacked * stacked if fit > stacked else fit


def decode_units(shape: Shape, core: int, cores: int) -> list[Unit]:
    """A core's units: two cores share the key heads, or the sequences where there is one."""
    sequences, keys = Span(0, shape.batch), Span(0, shape.kv_heads)
    if shape.kv_heads > 1:
        keys = halves(shape.kv_heads, shape.stacked, core, cores)
    else:
        sequences = core_span(shape.batch, core, cores)
    found: list[Unit] = []
    for b in range(sequences.start, sequences.start + sequences.size):
        for s in spans(keys.start, keys.size, most_keys(shape.group, shape.stacked)):
            found.append(Unit(b, s))
    return found


def halves(size: int, unit: int, core: int, cores: int) -> Span:
    """A core's range, of whole units where each core gets one."""
    if cores == 1:
        return Span(0, size)
    unit = unit if size >= 2 * unit else 1
    half = tiles_in(size, 2 * unit) * unit
    return Span(0, half) if core == 0 else Span(half, size - half)


QUERY_BLOCK = 512
"""Tokens of prefill that pass a key together: the columns of a PSUM bank."""


class Group(NKIObject):
    """Query heads of a sequence that share a key head.

    Args:
        sequence: which of the batch.
        key: which key head.
        heads: range of the query heads.
    """

    def __init__(self, sequence: int, key: int, heads: Span) -> None:
        self.sequence = sequence
        self.key = key
        self.heads = heads


def prefill_groups(shape: Shape, core: int, cores: int) -> list[Group]:
    """A core's groups: two cores share all query heads, along key heads where these are even."""
    own = halves(shape.batch * shape.heads, shape.group, core, cores)
    found: list[Group] = []
    for n in range(shape.batch * shape.kv_heads):
        start = max(own.start, n * shape.group)
        end = min(own.start + own.size, (n + 1) * shape.group)
        if end > start:
            b, first = n // shape.kv_heads, n // shape.kv_heads * shape.heads
            found.append(Group(b, n % shape.kv_heads, Span(start - first, end - start)))
    return found
