"""How attention's heads lie on partitions and which core has them. Pure: no instruction."""

from __future__ import annotations

from neuroncore.hardware import PARTITIONS
from neuronmm_ops.kernels.nki_object import NKIObject
from neuronmm_ops.kernels.stages.tiling import Span, core_span, spans, tiles_in

QUADRANT = 32
"""Partitions from a multiple of which an engine may begin."""
MOST_NEW = 8
"""New tokens of a sequence that decode takes together, to verify drafts."""


def problem_of(
    batch: int, heads: int, kv_heads: int, head_dim: int, tokens: int, new: int = 1
) -> str:
    """What is wrong with sizes of attention, in one line; empty where nothing is."""
    sizes = f"batch {batch}, heads {heads}, kv_heads {kv_heads}, head_dim {head_dim}, T {tokens}"
    if min(batch, heads, kv_heads, head_dim, tokens, new) < 1:
        return f"sizes must be at least 1; got {sizes}"
    if new > min(MOST_NEW, tokens):
        return f"at most {MOST_NEW} new tokens, and T, pass a cache together; got {new}, {sizes}"
    if heads % kv_heads > 0:
        return f"heads must be a multiple of kv_heads; got {sizes}"
    if head_dim % 2 > 0 or head_dim > PARTITIONS:
        return f"head_dim must be even and at most {PARTITIONS}; got {sizes}"
    if heads * new >= PARTITIONS * kv_heads:
        most = f"at most {PARTITIONS - 1} query heads share a key head"
        return (
            f"{most}; got {sizes}" if new == 1 else f"{most}, each new token's; got {new}, {sizes}"
        )
    return ""


class Shape(NKIObject):
    """Sizes of attention.

    Args:
        batch: sequences.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: features of a head.
        tokens: that the cache has room for, T.
        new: tokens of each sequence that decode adds.
    """

    def __init__(
        self, batch: int, heads: int, kv_heads: int, head_dim: int, tokens: int, new: int = 1
    ) -> None:
        problem = problem_of(batch, heads, kv_heads, head_dim, tokens, new)
        assert problem == "", problem
        self.batch = batch
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.tokens = tokens
        self.new = new
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
SCORES = 16 * 1024
"""Scores of a partition that decode has at a time: of longer caches parts are joined."""
SHARED_TOKENS = 8192
"""From which on two cores share the tokens of one key head: 16 us for 17 on trn2, 31 for 50 at
32,768; at 4,096 the exchange makes it 14 for 13 (modelled)."""


def most_keys(queries: int, stacked: int, head_dim: int) -> int:
    """Key heads of a unit: its queries fill 32 partitions if they can, so that groups share T.

    Args:
        queries: of a key head, of all new tokens.
        stacked: key heads whose features fill the partitions.
        head_dim: features of a head.
    """
    fit = max(1, min(QUADRANT // queries, UNIT_COLUMNS // head_dim))
    return fit // stacked * stacked if fit > stacked else fit


class CacheBlock(NKIObject):
    """Tokens whose keys are used together: rows x tiles, token p * tiles + i in tile i.

    Tile i belongs to group i % groups of partitions, and is column i // groups of its rows: score j
    of a group is that of token start + j * groups + group.

    Args:
        start: first token.
        size: tokens, a multiple of 128 or less than that.
        groups: of partitions that share them; divides the tiles.
        new: these are the new tokens, which are not in the cache.
    """

    def __init__(self, start: int, size: int, groups: int, new: bool) -> None:
        self.start = start
        self.size = size
        self.tiles = max(1, size // PARTITIONS)
        self.rows = size // self.tiles
        self.groups = groups
        self.width = self.tiles // groups
        self.new = new


def cache_blocks(tokens: Span, groups: int, new: int) -> list[CacheBlock]:
    """The new tokens, if any, those of a cache that fill no tile, and blocks that groups share."""
    whole = tokens.size // PARTITIONS * PARTITIONS
    blocks: list[CacheBlock] = []
    if new > 0:
        blocks.append(CacheBlock(0, new, 1, True))
    if whole < tokens.size:
        blocks.append(CacheBlock(tokens.start + whole, tokens.size - whole, 1, False))
    for s in spans(tokens.start, whole, BLOCK_TILES * PARTITIONS):
        shared = s.size // (groups * PARTITIONS) * groups * PARTITIONS
        if shared > 0:
            blocks.append(CacheBlock(s.start, shared, groups, False))
        if shared < s.size:
            blocks.append(CacheBlock(s.start + shared, s.size - shared, 1, False))
    return blocks


def parts_of(blocks: list[CacheBlock], most: int) -> list[list[CacheBlock]]:
    """Blocks in parts, each of at most so many scores of a partition, or of one block."""
    parts: list[list[CacheBlock]] = []
    held = 0
    for block in blocks:
        size = block.rows * block.width
        if len(parts) == 0 or held + size > most:
            parts.append([])
            held = 0
        parts[len(parts) - 1].append(block)
        held += size
    return parts


def reached(tokens: int, window: int) -> int:
    """Tokens of a cache that are read: those that a window may have before its first query."""
    if window == 0:
        return tokens
    return min(tokens, max(1, tiles_in(window - 1, PARTITIONS)) * PARTITIONS)


def shares_tokens(shape: Shape, window: int, cores: int) -> bool:
    """Whether two cores share the tokens of a cache, of one key head of one sequence."""
    is_one = shape.batch * shape.kv_heads == 1
    return cores > 1 and is_one and reached(shape.tokens, window) >= SHARED_TOKENS


def decode_units(shape: Shape, window: int, core: int, cores: int) -> list[Unit]:
    """A core's units: two cores share the key heads, or the sequences where there is one."""
    sequences, keys = Span(0, shape.batch), Span(0, shape.kv_heads)
    if shares_tokens(shape, window, cores):
        return [Unit(0, keys)]
    if shape.kv_heads > 1:
        keys = halves(shape.kv_heads, shape.stacked, core, cores)
    else:
        sequences = core_span(shape.batch, core, cores)
    most = most_keys(shape.group * shape.new, shape.stacked, shape.head_dim)
    units: list[Unit] = []
    for b in range(sequences.start, sequences.start + sequences.size):
        for s in spans(keys.start, keys.size, most):
            units.append(Unit(b, s))
    return units


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
    groups: list[HeadGroup] = []
    for n in range(shape.batch * shape.kv_heads):
        start = max(own.start, n * shape.group)
        end = min(own.start + own.size, (n + 1) * shape.group)
        if end > start:
            b, first = n // shape.kv_heads, n // shape.kv_heads * shape.heads
            groups.append(HeadGroup(b, n % shape.kv_heads, Span(start - first, end - start)))
    return groups
