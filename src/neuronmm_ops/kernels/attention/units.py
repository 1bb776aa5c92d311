"""How attention's heads lie on partitions and which core has them. Pure: no instruction."""

from __future__ import annotations

from neuroncore.hardware import PARTITIONS
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


UNIT_COLUMNS = 1024
"""Features of the values of a unit, at most, where it has more than one key: two PSUM banks."""
BLOCK_TILES = 16
"""Tiles of 128 tokens in a block of the cache."""


def most_keys(group: int, stacked: int, head_dim: int) -> int:
    """Key heads of a unit: its queries fill 32 partitions if they can, so that groups share T."""
    fit = max(1, min(QUADRANT // group, UNIT_COLUMNS // head_dim))
    return fit // stacked * stacked if fit > stacked else fit


class Segment(NKIObject):
    """Scores of a block that all of its first groups have.

    Args:
        groups: how many.
        first: of the columns of a row.
        count: of columns.
    """

    def __init__(self, groups: int, first: int, count: int) -> None:
        self.groups = groups
        self.first = first
        self.count = count


class CacheBlock(NKIObject):
    """Tokens of the cache that are loaded together: rows x tiles, token p * tiles + i in tile i.

    Tile i belongs to group i % groups of partitions, and is column i // groups of its rows.

    Args:
        start: first token.
        size: tokens, a multiple of 128 or less than that.
        groups: of partitions that may share them.
        last: the new token is the last one.
    """

    def __init__(self, start: int, size: int, groups: int, last: bool) -> None:
        self.start = start
        self.size = size
        self.tiles = max(1, size // PARTITIONS)
        self.rows = size // self.tiles
        self.groups = min(groups, self.tiles)
        self.width = tiles_in(self.tiles, self.groups)
        self.last = last

    def groups_at(self, column: int) -> int:
        """Groups that have so many columns and one more."""
        return min(self.groups, self.tiles - column * self.groups)

    def width_of(self, group: int) -> int:
        """Columns of a group."""
        return tiles_in(self.tiles - group, self.groups)

    def segments(self) -> list[Segment]:
        """All scores."""
        full = self.tiles // self.groups
        found: list[Segment] = [Segment(self.groups, 0, full)]
        if full < self.width:
            found.append(Segment(self.groups_at(full), full, 1))
        return found


def cache_blocks(tokens: int, groups: int) -> list[CacheBlock]:
    """Blocks of a cache; the tokens that fill no tile are the first to be loaded."""
    whole = tokens // PARTITIONS * PARTITIONS
    found: list[CacheBlock] = []
    if whole < tokens:
        found.append(CacheBlock(whole, tokens - whole, 1, True))
    for s in spans(0, whole, BLOCK_TILES * PARTITIONS):
        found.append(CacheBlock(s.start, s.size, groups, s.start + s.size == tokens))
    return found


def decode_units(shape: Shape, core: int, cores: int) -> list[Unit]:
    """A core's units: two cores share the key heads, or the sequences where there is one."""
    sequences, keys = Span(0, shape.batch), Span(0, shape.kv_heads)
    if shape.kv_heads > 1:
        keys = halves(shape.kv_heads, shape.stacked, core, cores)
    else:
        sequences = core_span(shape.batch, core, cores)
    most = most_keys(shape.group, shape.stacked, shape.head_dim)
    found: list[Unit] = []
    for b in range(sequences.start, sequences.start + sequences.size):
        for s in spans(keys.start, keys.size, most):
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


class HeadGroup(NKIObject):
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


def prefill_groups(shape: Shape, core: int, cores: int) -> list[HeadGroup]:
    """A core's groups: two cores share all query heads, along key heads where these are even."""
    own = halves(shape.batch * shape.heads, shape.group, core, cores)
    found: list[HeadGroup] = []
    for n in range(shape.batch * shape.kv_heads):
        start = max(own.start, n * shape.group)
        end = min(own.start + own.size, (n + 1) * shape.group)
        if end > start:
            b, first = n // shape.kv_heads, n // shape.kv_heads * shape.heads
            found.append(HeadGroup(b, n % shape.kv_heads, Span(start - first, end - start)))
    return found
