"""`Knobs`: what a search may vary of a kernel, and the knobs that decode kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neuroncore.hardware import DMA_SATURATED_BYTES, PARTITIONS, PSUM_BANKS, Engine
from neuronmm_ops.kernels.stages.decode_tiling import EDGE_TILE_BYTES, SUM_BANKS, column_groups
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    DOUBLED_BANKS,
    DOUBLED_FEATURES,
    HIDDEN_TILES,
    OUTPUT_UNIT,
    core_span,
    tiles_in,
)

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem

Arguments = dict[str, Any]
Axis = Sequence[Arguments] | Callable[[Arguments], Sequence[Arguments]]
"""Values of a knob, or of knobs that go together; or what makes them of the present arguments."""
WIDTHS = (512, 1024, 2048, 4096)
"""Columns of a weight that are loaded together."""
NARROW_BLOCKS = (256, 128, 64, 32, 16)
"""Tokens of a block where a wider one does not fit."""
DOUBLED_GAIN = 0.95
"""Share of the other plans' time, at most, from which activations are rounded to fp8."""


def _all_allowed(arguments: Arguments) -> bool:
    del arguments
    return True


@dataclass(frozen=True)
class Knobs:
    """What a search may vary of a kernel.

    Attributes:
        kernel: name of its function.
        starts: arguments to begin with, those that need most SBUF first; the first that fits.
        axes: of each knob, or of knobs that go together, the values to try; what gains most first.
        allows: whether arguments are worth a trace.
        gain: share of other kernels' time, at most, from which this one is taken.
        repeats: times that a launch has all that the kernel computes where candidates are
            compared: what follows in a launch may begin before.
    """

    kernel: str
    starts: Sequence[Arguments]
    axes: Sequence[Axis]
    allows: Callable[[Arguments], bool] = _all_allowed
    gain: float = 1.0
    repeats: int = 1


def axis(name: str, values: Iterable[int | bool | str]) -> list[Arguments]:
    """The values of one knob."""
    return [{name: value} for value in dict.fromkeys(values)]


def pairs_of(first: Sequence[Arguments], second: Sequence[Arguments]) -> list[Arguments]:
    """The values of two knobs together, where one change alone may help nothing."""
    return [{**one, **other} for one in first for other in second]


def widths(size: int, values: Sequence[int] = WIDTHS) -> list[int]:
    """Those of `values` that are below `size`, and the least that covers it."""
    return sorted({min(value, rounded_up(size, PARTITIONS)) for value in values})


def rounded_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return tiles_in(size, unit) * unit


def even(size: int, most: int) -> int:
    """The width of the fewest equal parts of at most `most`, a multiple of 128."""
    return min(most, rounded_up(tiles_in(size, tiles_in(size, most)), PARTITIONS))


# --- decode


def sum_columns(problem: Problem) -> int:
    """Columns of a weight whose sums PSUM holds together."""
    groups = column_groups(problem.M, problem.machine.pe_tile)
    return SUM_BANKS * BANK_COLUMNS * groups


def core_part(problem: Problem, size: int) -> int:
    """The first core's part of a dimension."""
    return core_span(size, 0, problem.lnc).size


def waits_for_serial_groups(problem: Problem) -> bool:
    """Whether a weight tile would take TensorE longer than its load if column groups took turns.

    A [128, 128] tile of one byte moves past few tokens in 128 cycles then, and past several column
    groups at a time in a part of them.
    """
    machine = problem.machine
    load_ns = PARTITIONS * PARTITIONS / machine.dma_peak_gbps
    is_slower = machine.ns(Engine.TENSOR, PARTITIONS) > load_ns
    grouped = column_groups(problem.M, machine.pe_tile) > 1
    one_byte = problem.storage is not None and problem.storage.group is None
    return one_byte and problem.itemsize == 2 and grouped and is_slower


def decode_knobs(
    problem: Problem,
    own: Sequence[Arguments] = ({},),
    axes: Sequence[Axis] = (),
    stationary: Arguments | None = None,
) -> list[Knobs]:
    """Knobs of a decode kernel: its own, what they may start from, and those that all have.

    Where serial column groups would hold it up, also of its form with `stationary` weights, if it
    has one: its own arguments of that. Others hardly change its time.
    """
    most = sum_columns(problem)
    N = rounded_up(core_part(problem, problem.N), OUTPUT_UNIT)
    first = {"k_chunk": 1024, "block": min(1024, most), "last_block": min(1024, most)}
    if problem.casts:
        first["dma_cast"] = 0
    narrow = axis("tile_bytes", (16384, EDGE_TILE_BYTES, 512))
    starts = [{**first, **size} for size in pairs_of(own, narrow)]
    blocks = sorted({min(w, most, N) for w in (512, 1024, 1536, 2048, 3072, 4096, 6144, 12288)})
    lasts = [block for block in blocks if block <= 6144]
    pairs: list[Arguments] = []
    for last in lasts:
        widest = rounded_up(N - last, OUTPUT_UNIT) or last
        widths = [min(blocks[-1], widest)]
        if len(problem.outputs) > 1:
            widths += blocks[-3:]
        elif last < N:  # wider ones are all one block
            widths += [min(block, widest) for block in blocks[-3:]]
        pairs += pairs_of(axis("block", widths), axis("last_block", [last]))
    K = core_part(problem, problem.K)
    tiles = axis("tile_bytes", (16384, 8192, EDGE_TILE_BYTES))
    chunks = sorted({512, 1024, 2048, 4096, *[even(K, size) for size in (1024, 2048, 4096)]})
    casts = [pairs_of(axis("dma_cast", (0, 4, 8, 16)), tiles)] if problem.casts else []
    shared = [*casts, pairs_of(axis("k_chunk", chunks), tiles)]
    kernel = f"{problem.op}_decode"
    of_kernel = [Knobs(kernel, starts, [pairs, *axes, *shared])]
    if stationary is not None and waits_for_serial_groups(problem):
        fixed: Arguments = {**first, **stationary, "block": blocks[-1], "stationary": True}
        ends = axis("last_block", [min(width, lasts[-1]) for width in (1024, 2048)])
        starts = [{**fixed, **size} for size in narrow]
        of_kernel.append(Knobs(kernel, starts, [pairs_of(ends, tiles[:2])]))
    return of_kernel


def inner_blocks(problem: Problem) -> list[int]:
    """Columns of gate and up whose sums may be in PSUM together: 1 to 6 banks a column group."""
    width = rounded_up(core_part(problem, problem.inner), PARTITIONS)
    bank = sum_columns(problem) // SUM_BANKS
    return sorted({min(count * bank, width) for count in range(1, SUM_BANKS + 1)})


def balances(problem: Problem) -> list[Arguments]:
    """Whether cores balance what they load, where they do not share inner features evenly."""
    own = core_part(problem, problem.inner)
    uneven = problem.lnc > 1 and 2 * own != problem.inner
    return axis("balance", (False, True) if uneven else (False,))


def stationary_inner(problem: Problem) -> Arguments:
    """As `inner_blocks`, the one with stationary weights: rows of one byte that DMAs move well."""
    blocks = inner_blocks(problem)
    wide = [block for block in blocks if block >= DMA_SATURATED_BYTES]
    return {"inner_block": [*wide, blocks[-1]][0]}


# --- prefill


def layouts(problem: Problem) -> list[Arguments]:
    """How x may be transposed: by a DMA or by TensorE, which needs two PSUM banks for it."""
    machine = problem.machine
    engines = 1 if machine.shared_ports else 2
    by_dma: Arguments = {"layout": "dma", "engines": engines, "banks": PSUM_BANKS}
    by_tensor: Arguments = {"layout": "pe", "engines": engines, "banks": PSUM_BANKS - 2}
    dma = problem.itemsize == 2 or machine.has("wide_transposes")
    return [by_dma, by_tensor] if dma else [by_tensor]


def token_blocks(problem: Problem, most: int = 2048) -> list[int]:
    """Tokens of a block: all that are narrower than a core's, and the first that is not."""
    tokens = problem.core_tokens[0]
    return [w for w in (512, 1024, 2048) if w <= most and (w == 512 or w // 2 < tokens)]


def resident_axis(K: int, parts: Sequence[int] = (8, 6, 4, 2, 0)) -> list[Arguments]:
    """x^T tiles of K features that may stay in SBUF: all, or as many eighths of them."""
    return axis("resident", [tiles_in(K, PARTITIONS) * part // 8 for part in parts])


def fits_groups(problem: Problem, arguments: Arguments) -> bool:
    """Whether a group of PSUM tiles of the output is no wider than a block of tokens needs."""
    width = min(int(arguments["token_block"]), problem.core_tokens[0])
    token_tiles = int(arguments["token_tiles"])
    return token_tiles == 1 or token_tiles // 2 * PARTITIONS < width


def doubled_layout(problem: Problem) -> Arguments | None:
    """Arguments of `double_row`; None where the problem rules it out."""
    contracted = max([rows for rows, _ in problem.matrices])
    if not problem.doubles_rows or contracted > DOUBLED_FEATURES:
        return None
    layout = {**layouts(problem)[0], "banks": DOUBLED_BANKS, "double_row": True}
    return layout if layout["layout"] == "dma" else None


def doubled_widths(size: int, most: int = 4) -> list[int]:
    """Columns of a weight with `double_row`: of up to `most` groups of PSUM tiles."""
    group = DOUBLED_BANKS * PARTITIONS
    whole = rounded_up(size, PARTITIONS)
    return sorted({min(count * group, whole) for count in (1, 2, 4) if count <= most})


def narrower(starts: Sequence[Arguments]) -> list[Arguments]:
    """The starts, then the last of them with ever fewer tokens a block."""
    return [*starts, *[{**starts[-1], "token_block": block} for block in NARROW_BLOCKS]]


def hidden_axis(problem: Problem) -> list[Arguments]:
    """Tokens of a block, and groups of its hidden block that go through HBM.

    About as many as SBUF cannot hold with the weights, or all.
    """
    groups = problem.inner // (HIDDEN_TILES * PARTITIONS)
    settings: list[Arguments] = []
    for block in token_blocks(problem, 1024):
        size = HIDDEN_TILES * min(block, problem.core_tokens[0]) * problem.itemsize
        held = tiles_in(problem.inner, HIDDEN_TILES * PARTITIONS) * size
        room = problem.machine.planned_sbuf_bytes
        for part in (7, 5, 3):
            spill = min(groups, max(0, tiles_in(held - room * part // 8, size)))
            settings.append({"token_block": block, "spill": spill, "resident_spilled": 0})
        settings.append({"token_block": block, "spill": groups, "resident_spilled": 0})
    return [dict(items) for items in dict.fromkeys([tuple(each.items()) for each in settings])]


def kept_axis(arguments: Arguments) -> list[Arguments]:
    """How many of the groups that go through HBM stay in SBUF once they are back."""
    spill = int(arguments["spill"])
    return axis("resident_spilled", [0, spill // 4, spill // 2, spill])
