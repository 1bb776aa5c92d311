"""Plans of the prefill kernels `xw` and `xuv`: candidates with their modelled costs.

A stage is a list of passes: groups of PSUM tiles that sum over the contraction while their
operands arrive. DMA runs ahead of TensorE, so a stage takes what the slower of the two takes,
and the first strip also what TensorE waits for its first operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from neuronmm_ops.hardware import (
    DMA_START_NS,
    RESULT_CYCLES,
    Engine,
)
from neuronmm_ops.kernels.planner.costs import Costs, Pass, Stage, edges
from neuronmm_ops.kernels.planner.problem import Block, Plan, Problem
from neuronmm_ops.kernels.stages.tiling import BANKS, COLUMNS, P, tiles_in

Blocks = tuple[tuple[str, Block], ...]
STRIPS = (512, 1024, 1536, 2048)
SMALL_STRIPS = (256, 128)
"""Where no larger one fits."""
BLOCKS = (512, 1024, 2048, 4096)
K_BLOCKS = (0, 512, 1024, 2048, 4096)


def candidates(problem: Problem) -> list[Plan]:
    """All plans of the prefill forms that fit, quickest first."""
    plans = _xw_plans if problem.op == "xw" else _xuv_plans
    tokens = problem.core_tokens[0]
    found = [plan for strip in strips(tokens) for plan in plans(problem, strip, tokens)]
    for strip in SMALL_STRIPS:
        found = found or plans(problem, strip, tokens)
    return sorted(found, key=lambda plan: (plan.time_ms, plan.hbm_bytes, plan.blocks))


def strips(tokens: int) -> list[int]:
    """Strip widths worth trying."""
    return [s for s in STRIPS if s < tokens] + [s for s in STRIPS if s >= tokens][:1]


def _xuv_plans(problem: Problem, strip: int, tokens: int) -> list[Plan]:
    costs = Costs(problem.machine, problem.itemsize, problem.bf16_partial_sums)
    width, r = min(strip, tokens), problem.ranks[0]
    held = tiles_in(r, P) * width * costs.item
    seconds = row_stages(costs, width, r, problem.N, held)[:3]
    found: list[Plan] = []
    for first in project_stages(costs, width, problem.K, r) if seconds else []:
        for second in seconds:
            last: tuple[Stage, ...] = ()
            if narrow := tokens % width:
                last = (
                    _project_stage(costs, narrow, problem.K, r, first.blocks, first.sbuf_bytes),
                    _write_rows(costs, narrow, r, problem.N, second.blocks, second.sbuf_bytes),
                )
            found.append(_plan(problem, costs, strip, (first, second), last))
    return found


def _xw_plans(problem: Problem, strip: int, tokens: int) -> list[Plan]:
    costs = Costs(problem.machine, problem.itemsize)
    width, K, N = min(strip, tokens), problem.K, problem.N
    found: list[Plan] = []
    for stage in dense_stages(costs, width, K, N):
        last: tuple[Stage, ...] = ()
        if narrow := tokens % width:
            last = (_dense(costs, narrow, K, N, stage.blocks, stage.sbuf_bytes),)
        found.append(_plan(problem, costs, strip, (stage,), last))
    return found


def _plan(
    problem: Problem,
    costs: Costs,
    strip: int,
    stages: tuple[Stage, ...],
    last: tuple[Stage, ...],
) -> Plan:
    """The plan of full strips in `stages`, and of a narrower one in the end in `last`."""
    tokens = problem.core_tokens[0]
    blocks: dict[str, Block] = {"token_block": strip}
    for stage in stages:
        blocks.update(stage.blocks)
    blocks.update(layout=costs.layout, engines=costs.engines)
    if problem.op == "xuv":
        blocks["v_banks"] = costs.banks if costs.layout == "pe" else BANKS
    if problem.bf16_partial_sums:
        blocks["bf16_partial_sums"] = True
    full = tokens // min(strip, tokens)
    fetched = stages[0].time(0.0)[1]
    time = DMA_START_NS + stages[0].first_ns + (last or stages)[-1].tail_ns
    for stage in stages[1:]:
        once, fetched = stage.time(fetched)
        time += once
    steady, fetched = _strip_ns(stages, fetched)
    time += (full - 1) * steady + _strip_ns(last, fetched)[0]
    dma = full * sum([s.dma_ns for s in stages]) + sum([s.dma_ns for s in last])
    time = max(time, 2 * DMA_START_NS + dma)
    traffic = full * sum([s.hbm_bytes for s in stages]) + sum([s.hbm_bytes for s in last])
    return Plan(
        problem=problem,
        phase="prefill",
        kernel=problem.op,
        blocks=tuple(blocks.items()),
        time_ms=time / 1e6,
        hbm_bytes=round(traffic * problem.M / tokens),
        sbuf_bytes=max([s.sbuf_bytes for s in stages]),
        psum_banks=BANKS,
        bound="PE" if sum([s.pe_ns - s.dma_ns for s in stages]) >= 0 else "DMA",
    )


def _strip_ns(stages: tuple[Stage, ...], fetched: float) -> tuple[float, float]:
    """(time of a strip that is not the first, DMA done ahead after it)."""
    total = 0.0
    for stage in stages:
        once, fetched = stage.time(fetched)
        total += once
    return max(total, sum([s.dma_ns for s in stages])), fetched


def project_stages(costs: Costs, width: int, K: int, r: int) -> list[Stage]:
    """Blocks of `strip.project` on x [K, width] from HBM that fit, quickest first."""
    found: list[Stage] = []
    widths = sorted({min(tiles_in(b, P) * P, tiles_in(r, P) * P) for b in (*BLOCKS, *_even(r))})
    sums = costs.item if costs.bf16_partial_sums else 4
    partial, limit = tiles_in(r, P) * width * sums, 0.8 * costs.machine.usable_sbuf_bytes
    for k_block in K_BLOCKS:
        if k_block and (k_block >= K or 16 * k_block < K or partial > limit):
            continue
        for tokens in sorted({min(COLUMNS, width), min(2 * COLUMNS, width), width}):
            # groups of half the banks leave the others to slow additions in SBUF
            for banks in (costs.banks, BANKS // 2) if k_block else (costs.banks,):
                if tiles_in(tokens, COLUMNS) <= banks:
                    for block in widths:
                        found.extend(_project(costs, width, K, r, k_block, tokens, block, banks))
    return sorted(found, key=lambda s: s.first_ns)[:8]


def _even(r: int) -> list[int]:
    """Widths that cut r into even blocks of at most eight and of at most four tiles, and r."""
    tiles = tiles_in(r, P)
    return [tiles_in(tiles, tiles_in(tiles, most)) * P for most in (4, 8, tiles)]


def _project(
    costs: Costs,
    width: int,
    K: int,
    r: int,
    k_block: int,
    tokens: int,
    block: int,
    banks: int,
) -> Iterator[Stage]:
    rows = k_block or K
    count = tiles_in(rows, P)
    columns = tiles_in(tokens, COLUMNS)
    group = max(1, banks // columns)
    groups = tiles_in(width, tokens)
    block_tiles = tiles_in(min(block, r), P)
    passes_per_block = tiles_in(block_tiles, group)
    reused = groups > 1 or passes_per_block > 1
    u_bytes = count * min(block, r) * costs.item if reused else 3 * min(block, r) * costs.item
    strip_bytes = tiles_in(r, P) * width * costs.item
    if k_block and not costs.bf16_partial_sums:  # fp32, and the columns that are just rounded
        strip_bytes = tiles_in(r, P) * width * 4 + block_tiles * width * costs.item
    x_tile = width * costs.item
    held = u_bytes + strip_bytes + costs.staging(width)
    room = costs.machine.usable_sbuf_bytes - held
    for keep in _keeps(count, room // x_tile - 2):
        if keep < count and groups > 1:
            continue
        sbuf = held + min(keep + 2, count) * x_tile
        blocks: Blocks = (
            ("resident", keep),
            ("u_block", block),
            ("tokens", tokens),
            ("banks", banks),
            ("k_block", k_block),
        )
        yield _project_stage(costs, width, K, r, blocks, sbuf)


def _project_stage(costs: Costs, width: int, K: int, r: int, blocks: Blocks, sbuf: int) -> Stage:
    keep, block, tokens, banks, k_block = [int(value) for _, value in blocks]
    rows, tokens = k_block or K, min(tokens, width)
    group = max(1, banks // tiles_in(tokens, COLUMNS))
    sizes = (width, r, tokens, block, group, keep)
    stage = Stage(
        blocks=blocks,
        passes=tuple(_project_passes(costs, min(rows, K), *sizes, adds=False)),
        again=tuple(_project_passes(costs, rows, *sizes, adds=True)) if rows < K else (),
        times=max(0.0, K / rows - 1),
        hbm_bytes=0,
        sbuf_bytes=sbuf,
        room_bytes=costs.machine.usable_sbuf_bytes - sbuf,
    )
    return replace(stage, hbm_bytes=_traffic(stage.loaded_bytes, min(rows, K)))


def _keeps(count: int, most: int) -> list[int]:
    """How many x^T tiles may stay: all, or as many as there is room for, or fewer for fetching."""
    if most >= count:
        return [count]
    return sorted({most, most * 5 // 8} - {0}) if most > 0 else [0] * (most == 0)


def _project_passes(
    costs: Costs,
    K: int,
    width: int,
    r: int,
    tokens: int,
    block: int,
    group: int,
    keep: int,
    adds: bool,
) -> Iterator[Pass]:
    """Passes over K rows of the contraction, whose sums are added to those before, or are first."""
    count = tiles_in(K, P)
    alike: dict[tuple[int, ...], Pass] = {}
    for b in range(0, r, block):
        columns = min(block, r - b)
        for g in range(0, width, tokens):
            own = min(tokens, width - g)
            for first in range(0, columns, group * P):
                side = min(group * P, columns - first)
                loads = count if b == 0 and first == 0 else max(0, count - keep)
                fresh = columns if g == 0 and first == 0 else 0
                key = (side, own, loads, fresh)
                if key not in alike:
                    alike[key] = _project_pass(costs, K, r, *key, adds)
                yield alike[key]


def _project_pass(
    costs: Costs, K: int, r: int, side: int, own: int, loads: int, fresh: int, adds: bool
) -> Pass:
    """One group [side, own] over K rows: loads of x tiles, and of `fresh` columns of u."""
    count = tiles_in(K, P)
    dma = loads * costs.transposed(min(P, K), own)
    if fresh:
        dma += count * costs.load(K, fresh)
    pe = count * costs.matmuls(side, own) + loads * costs.turned(own)
    tiles = tiles_in(side, P) * tiles_in(own, COLUMNS)
    evict = tiles * costs.evict(min(own, COLUMNS), adds)
    return Pass(pe, dma, evict, count, (loads * own + count * fresh) * costs.item, tiles)


def _traffic(loaded_bytes: float, K: int) -> int:
    """HBM bytes of loads given per partition: all tiles are whole but the last one of K."""
    return round(loaded_bytes * P * K / (tiles_in(K, P) * P))


def row_stages(costs: Costs, width: int, r: int, N: int, held: int) -> list[Stage]:
    """Blocks of `strip.write_rows` on a strip [r, width] in SBUF that fit, quickest first."""
    found: list[Stage] = []
    for block in sorted({min(b, N) for b in BLOCKS}):
        for rows in (1, 2, 4):
            if rows > 1 and (rows // 2) * P >= width:
                continue
            result = rows * block * costs.item
            reused = rows * P < width or tiles_in(block, COLUMNS) > (BANKS - 2) // rows
            tiles = tiles_in(r, P) if reused else min(4, tiles_in(r, P))
            weights = tiles * block * costs.item
            sbuf = held + weights + 2 * result + min(block, N) * costs.item
            if sbuf > costs.machine.usable_sbuf_bytes:
                continue
            blocks: Blocks = (("v_block", block), ("token_tiles", rows))
            found.append(_write_rows(costs, width, r, N, blocks, sbuf))
    return sorted(found, key=lambda s: s.time(0.0)[0] + s.tail_ns)


def _write_rows(costs: Costs, width: int, r: int, N: int, blocks: Blocks, sbuf: int) -> Stage:
    block, rows = [int(value) for _, value in blocks]
    depth = tiles_in(r, P)
    columns = min(block, N)
    # groups of token tiles, by what PSUM holds of a block's columns
    side_by_side = max(1, costs.banks // min(rows, tiles_in(width, P)))
    parts = tiles_in(tiles_in(columns, COLUMNS), side_by_side)
    groups = tiles_in(width, rows * P) * parts
    store = sum([n * costs.load(t, columns) for t, n in edges(width, P)]) / groups
    tiles = tiles_in(width, P) * tiles_in(columns, COLUMNS) / groups
    pe = depth * costs.matmuls(width, columns) / groups
    evict = tiles * costs.evict(min(columns, COLUMNS))
    load = depth * costs.load(r, columns)
    held = depth * columns * costs.item
    banks = min(BANKS, round(tiles))
    first = Pass(pe, load, evict, depth, held, banks, store)
    later = Pass(pe, 0.0, evict, depth, 0, banks, store)
    return Stage(
        blocks=blocks,
        passes=(first, *[later] * (groups - 1)),
        again=(first, *[later] * (groups - 1)),
        times=max(0.0, N / block - 1),
        hbm_bytes=costs.item * N * (r + width),
        sbuf_bytes=sbuf,
        tail_ns=_tail(costs, min(width, rows * P), columns),
        room_bytes=costs.machine.usable_sbuf_bytes - sbuf,
    )


def _tail(costs: Costs, tokens: int, columns: int) -> float:
    """From the last matmul to the last byte: its token tiles are evicted and stored in turn."""
    begin = costs.machine.ns(Engine.TENSOR, RESULT_CYCLES[Engine.TENSOR]) + DMA_START_NS
    evict = min(tiles_in(columns, COLUMNS), BANKS) * costs.evict(min(columns, COLUMNS))
    stored = 0.0
    for tile in range(1, tiles_in(tokens, P) + 1):
        stored = max(stored, tile * evict) + costs.load(min(tokens, P), columns)
    return begin + stored


def dense_stages(costs: Costs, width: int, K: int, N: int) -> list[Stage]:
    """Blocks of `xw` that fit, quickest first."""
    found: list[Stage] = []
    count = tiles_in(K, P)
    banks = costs.banks
    for block in sorted({min(b, N) for b in BLOCKS}):
        for rows in (1, 2, 4, 8):
            if rows > banks or (rows > 1 and (rows // 2) * P >= width):
                continue
            reused = rows * P < width or tiles_in(block, COLUMNS) > banks // rows
            w_bytes = (count if reused else 4) * block * costs.item
            result = 2 * rows * block * costs.item + block * costs.item
            x_tile = width * costs.item
            held = w_bytes + result + costs.staging(width)
            room = costs.machine.usable_sbuf_bytes - held
            for keep in _keeps(count, room // x_tile - 3):
                sbuf = held + min(keep + 2, count) * x_tile
                blocks: Blocks = (
                    ("resident", keep),
                    ("block", block),
                    ("token_tiles", rows),
                    ("banks", banks),
                )
                found.append(_dense(costs, width, K, N, blocks, sbuf))
    return sorted(found, key=lambda s: s.first_ns + s.tail_ns)


def _dense(
    costs: Costs,
    width: int,
    K: int,
    N: int,
    blocks: Blocks,
    sbuf: int,
) -> Stage:
    keep, block, rows, banks = [int(value) for _, value in blocks]
    columns = min(block, N)
    first = _dense_passes(costs, width, K, columns, rows, banks, tiles_in(K, P))
    later = _dense_passes(costs, width, K, columns, rows, banks, max(0, tiles_in(K, P) - keep))
    stage = Stage(
        blocks=blocks,
        passes=(first[0], *later[1:]),
        again=tuple(later),
        times=max(0.0, N / block - 1),
        hbm_bytes=0,
        sbuf_bytes=sbuf,
        tail_ns=_tail(costs, min(width, rows * P), columns),
        room_bytes=costs.machine.usable_sbuf_bytes - sbuf,
    )
    return replace(stage, hbm_bytes=_traffic(stage.loaded_bytes, K) + costs.item * N * width)


def _dense_passes(
    costs: Costs, width: int, K: int, columns: int, rows: int, banks: int, loads: int
) -> list[Pass]:
    """Passes of one column block; each loads `loads` tiles of x."""
    count = tiles_in(K, P)
    step = max(1, banks // rows) * COLUMNS
    passes: list[Pass] = []
    for g in range(0, width, rows * P):
        own = min(rows * P, width - g)
        for c in range(0, columns, step):
            part = min(step, columns - c)
            dma = loads * costs.transposed(min(P, K), width)
            held = loads * width
            if not passes:
                dma += count * costs.load(K, columns)
                held += count * columns
            stores = tiles_in(own, P) * costs.load(min(own, P), columns) if c == 0 else 0.0
            evicts = tiles_in(own, P) * tiles_in(part, COLUMNS)
            pe = count * costs.matmuls(own, part) + loads * costs.turned(width)
            evict = evicts * costs.evict(min(part, COLUMNS))
            passes.append(Pass(pe, dma, evict, count, held * costs.item, evicts, stores))
    return passes
