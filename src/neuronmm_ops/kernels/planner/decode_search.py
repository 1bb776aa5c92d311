"""The search for the arguments of a decode kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from neuronmm_ops.kernels.planner.decode import Blocks, Stages
from neuronmm_ops.kernels.planner.decode_costs import DecodeCosts
from neuronmm_ops.kernels.planner.problem import Block, Plan
from neuronmm_ops.kernels.stages.tiling import EDGE_TILE_BYTES, OUTPUT_UNIT, PARTITIONS, tiles_in

DMA_CASTS = (0, 4, 8, 16)
"""Values of `dma_cast` worth a look."""
KEPT = 8
"""Plans that are returned, best first."""


def best_plans(
    costs: DecodeCosts,
    run: Callable[[Stages], None],
    first: Blocks,
    choices: Sequence[list[Blocks]] = (),
) -> list[Plan]:
    """Plans for up to 128 tokens, the fastest first; each fits in SBUF and PSUM.

    One argument after the other takes its best value, the others fixed: they hardly interact.

    Args:
        costs: of the problem.
        run: the kernel's stages.
        first: the kernel's own arguments to begin with.
        choices: for each of them the values worth a look.
    """
    plan = cache(lambda items: _plan(costs, run, dict(items)))
    least = min(1024, costs.most_columns)
    for tile_bytes in (16384, EDGE_TILE_BYTES, 512):
        best: Blocks = {"k_chunk": 1024, "block": least, "last_block": least, **first}
        best["tile_bytes"] = tile_bytes
        if costs.casts:
            best["dma_cast"] = 0
        found: dict[tuple[tuple[str, Block], ...], Plan] = {}
        shared = _choices(costs, tile_bytes)
        for values in [*choices, *shared, *shared]:
            plans = [plan(tuple({**best, **value}.items())) for value in values]
            fitting = [p for p in plans if p.sbuf_bytes <= costs.machine.usable_sbuf_bytes]
            found.update({p.blocks: p for p in fitting})
            best = dict(min(fitting, key=_rank).blocks) if fitting else best
        if found:
            kept = sorted(found.values(), key=_rank)[:KEPT]
            return [_of_all_cores(p, costs, run) for p in kept]
    return []


def evaluated(costs: DecodeCosts, run: Callable[[Stages], None], blocks: Blocks) -> Plan:
    """What a kernel costs with these arguments, by all cores."""
    return _of_all_cores(_plan(costs, run, blocks), costs, run)


def _rank(plan: Plan) -> tuple[float, int, str]:
    return plan.time_ms, plan.sbuf_bytes, repr(plan.blocks)


def _choices(costs: DecodeCosts, limit: int) -> list[list[Blocks]]:
    """Values of the arguments that all kernels have."""
    own = rounded_up(costs.own(costs.problem.N), OUTPUT_UNIT)
    widths = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288)
    blocks = sorted({min(width, costs.most_columns, own) for width in widths})
    pairs: list[Blocks] = []
    for last in [width for width in blocks if width <= 6144]:
        widest = rounded_up(own - last, OUTPUT_UNIT) or last
        usual = {min(block, widest) for block in blocks[-3:]}
        pairs.extend([{"block": block, "last_block": last} for block in sorted(usual)])
    usual = (512, 1024, 2048, 4096)
    even_chunks = [even(costs.own(costs.problem.K), most) for most in usual[1:]]
    chunks: list[Blocks] = [{"k_chunk": size} for size in sorted({*usual, *even_chunks})]
    tiles = [size for size in (16384, 8192, EDGE_TILE_BYTES) if size <= limit]
    casts: list[list[Blocks]] = (
        [[{"dma_cast": every} for every in DMA_CASTS]] if costs.casts else []
    )
    return [chunks, pairs, [{"tile_bytes": size} for size in tiles], *casts]


def _plan(costs: DecodeCosts, run: Callable[[Stages], None], blocks: Blocks, core: int = 0) -> Plan:
    """What a kernel costs with these arguments, by one core."""
    stages = Stages(costs, blocks, core)
    run(stages)
    done, problem = stages.timeline, costs.problem
    return Plan(
        problem,
        "decode",
        f"{problem.op}_decode",
        tuple(blocks.items()),
        done.end_ns / 1e6,
        stages.hbm_bytes,
        stages.sbuf_bytes,
        stages.psum_banks + 1,
        "PE" if done.work_ns > done.transfer_ns else "DMA",
        stages.instructions,
        (problem.M,),
    )


def _of_all_cores(plan: Plan, costs: DecodeCosts, run: Callable[[Stages], None]) -> Plan:
    """The plan with the traffic and the instructions of the core of the lesser part, too."""
    if plan.problem.lnc == 1:
        return plan
    other = _plan(costs, run, plan.arguments, core=1)
    traffic = plan.hbm_bytes + other.hbm_bytes
    return replace(plan, hbm_bytes=traffic, instructions=plan.instructions + other.instructions)


def rounded_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return tiles_in(size, unit) * unit


def even(size: int, most: int) -> int:
    """The width of the fewest equal parts of at most `most`, a multiple of 128."""
    return min(most, rounded_up(tiles_in(size, tiles_in(size, most)), PARTITIONS))
