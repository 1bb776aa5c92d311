"""Plans of the decode kernels: in which blocks they could run, and what each would cost.

The kernels are `xw_decode`, `xuv_decode` and `svd_mlp_decode`. All times are modelled, by `clock`.
"""

from __future__ import annotations

from neuronmm_ops.hardware import DMA_START_NS
from neuronmm_ops.kernels.planner.clock import (
    SUM_BANKS,
    Blocks,
    Clock,
    Shape,
    cut_sizes,
    rounded_up,
)
from neuronmm_ops.kernels.planner.problem import Block, Plan, Problem
from neuronmm_ops.kernels.stages.tiling import ALIGN, COLUMNS, SMALL, P, tiles_in

KEPT = 8
"""Plans that are returned, best first."""


def candidates(problem: Problem) -> list[Plan]:
    """Plans for up to 128 tokens, the fastest first; each fits in SBUF and PSUM.

    One argument after the other takes its best value, the others fixed: they hardly interact.
    """
    if problem.M > P:
        return []
    shape = Shape(problem)
    found: dict[tuple[tuple[str, Block], ...], Plan] = {}
    for chunk in (16384, SMALL, 512):
        best = _first(shape, chunk)
        for choices in _choices(shape, chunk):
            plans = [_plan(shape, {**best, **choice}) for choice in choices]
            fitting = [plan for plan in plans if plan.sbuf_bytes <= shape.room]
            found |= {plan.blocks: plan for plan in fitting}
            if fitting:
                best = dict(min(fitting, key=_rank).blocks)
        if found:
            break
    return sorted(found.values(), key=_rank)[:KEPT]


def _rank(plan: Plan) -> tuple[float, int, str]:
    return plan.time_ms, plan.sbuf_bytes, repr(plan.blocks)


def _first(s: Shape, chunk: int) -> Blocks:
    """Arguments to begin with: the smallest tiles."""
    least = min(1024, s.most)
    shared: Blocks = {"span": 1024, "block": least, "last": least, "chunk": chunk}
    if s.problem.op == "xw":
        return {**shared, "keep": False}
    ranks = s.problem.ranks
    if s.problem.op == "xuv":
        return {**shared, "ranks": _even(ranks[0], s.most)}
    together = sum(s.banks(r, P) for r in ranks[:2]) <= SUM_BANKS
    cut = _even(ranks[2] if together else max(ranks), s.most)
    inner = min(rounded_up(s.own(s.problem.inner), P), COLUMNS * s.lanes)
    return {**shared, "ranks": cut, "together": together, "inner": inner, "spill": True}


def _choices(s: Shape, limit: int) -> list[list[Blocks]]:
    """For each argument, or pair of them, the values worth a look."""
    own = rounded_up(max(1, s.own(s.problem.N)), ALIGN)
    widths = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
    blocks = sorted({min(w, s.most, own) for w in widths})
    pairs: list[Blocks] = [
        {"block": min(block, rounded_up(own - last, ALIGN)) if last < own else last, "last": last}
        for block in blocks[-3:]
        for last in blocks
        if last <= 6144
    ]
    found: list[list[Blocks]] = []
    if s.problem.op == "xw":
        found.append([{"keep": False}, {"keep": True}])
    if s.problem.op == "svd_mlp":
        width = rounded_up(max(1, s.own(s.problem.inner)), P)
        inners = sorted({min(c * COLUMNS * s.lanes, width) for c in range(1, SUM_BANKS + 1)})
        found.append([{"spill": True}, {"spill": False}])
        found.append([{"inner": inner} for inner in inners])
    usual = (512, 1024, 2048, 4096)
    even = [_even(max(1, s.own(s.problem.K)), most) for most in usual[1:]]
    found.append([{"span": span} for span in sorted({*usual, *even})])
    found.append(pairs)
    found.append([{"chunk": chunk} for chunk in (16384, 8192, SMALL) if chunk <= limit])
    return found


def _plan(s: Shape, blocks: Blocks) -> Plan:
    """What a kernel costs with these arguments."""
    p = s.problem
    clock = Clock(s, blocks)
    {"xw": _run_xw, "xuv": _run_xuv, "svd_mlp": _run_svd_mlp}[p.op](clock)
    return Plan(
        p,
        "decode",
        f"{p.op}_decode",
        tuple(blocks.items()),
        clock.end_ns / 1e6,
        clock.hbm_bytes,
        clock.sbuf_bytes,
        clock.psum_banks + 1,
        "PE" if clock.pe_ns > clock.dma_ns else "DMA",
    )


def _run_xw(c: Clock) -> None:
    p = c.s.problem
    pieces = cut_sizes(p.K, c.span)
    own = c.s.own(p.N)
    blocks = c.blocks_of(own)
    keep = bool(c.blocks["keep"])
    loads = 1 if keep or not blocks else len(blocks)
    other = c.blocks_of(p.N - own) if p.lnc == 2 else []
    also = min(len(other), 1) if keep else len(other)  # the other core loads all of x too
    c.hbm_bytes += (loads - 1 + also) * p.M * p.K * c.s.item
    c.hold(c.s.buffers(pieces) if not keep else c.s.turned(pieces) + c.span * c.s.item)
    for i in range(loads):
        c.load_x(pieces, start=i == 0)
    c.write(pieces, p.N, blocks, turns=0 if keep else p.K * max(0, len(blocks) - 1))


def _run_xuv(c: Clock) -> None:
    p = c.s.problem
    (r,) = p.ranks
    pieces = cut_sizes(c.s.own(p.K), c.span)
    c.hold(c.s.buffers(pieces))
    low = c.project(pieces, [r], together=False, source=p.K)
    c.release(c.s.buffers(pieces))
    c.hold(c.s.turned(low[0]) + c.s.natural(r))
    c.write(low[0], p.N, c.blocks_of(c.s.own(p.N)), turns=0)


def _run_svd_mlp(c: Clock) -> None:
    p, s = c.s.problem, c.s
    gate, up, down = p.ranks
    pieces = cut_sizes(s.own(p.K), c.span)
    c.hold(s.natural(gate) + s.natural(up) + s.buffers(pieces))
    low = c.project(pieces, [gate, up], bool(c.blocks["together"]), source=p.K)
    c.release(s.buffers(pieces))
    c.hold(s.turned(low[0]) + s.turned(low[1]))
    inner = s.own(p.inner)
    spans_of_h = cut_sizes(inner, int(c.blocks["inner"]))
    h = [w for size in spans_of_h for w in s.lane_widths(size, P)]
    spill = bool(c.blocks["spill"])
    kept = 0 if spill else sum(s.lane(size, P) for size in spans_of_h) * s.item
    c.hold(kept)
    for size in spans_of_h:
        c.gated(low, size, spill)
    c.release(s.turned(low[0]) + s.turned(low[1]) + s.natural(gate) + s.natural(up))
    if spill:
        h = cut_sizes(inner, c.span)
        c.hbm_bytes += 2 * p.M * p.inner * s.item
        c.pe += 2 * DMA_START_NS + s.load_ns(h[:1])
    c.hold(s.buffers(h))
    last = c.project(h, [down], together=False, source=p.inner if spill else 0)
    c.release(s.buffers(h) + kept)
    c.hold(s.turned(last[0]) + s.natural(down))
    c.write(last[0], p.N, c.blocks_of(s.own(p.N)), turns=0)


def _even(size: int, most: int) -> int:
    """The width of the fewest equal parts of at most `most`, a multiple of 128."""
    return min(most, rounded_up(tiles_in(size, tiles_in(size, most)), P))
