"""Plans of `lm_head`. All times modelled."""

from __future__ import annotations

from neuronmm_ops.hardware import DEFAULT_TARGET, DMA_DONE_NS, DMA_START_NS, Engine
from neuronmm_ops.kernels.lm_head.decode import NO_ID
from neuronmm_ops.kernels.planned import PlannedKernel, TensorShape
from neuronmm_ops.kernels.planner import decode_search
from neuronmm_ops.kernels.planner.decode import Stages
from neuronmm_ops.kernels.planner.decode_costs import VECTOR, DecodeCosts, Source, Sums
from neuronmm_ops.kernels.planner.instructions import evict_ns, load_ns, result_ns
from neuronmm_ops.kernels.planner.launches import planned_kernels
from neuronmm_ops.kernels.planner.problem import FOUND_BYTES, Plan, Problem
from neuronmm_ops.kernels.planner.search import quickest
from neuronmm_ops.kernels.planner.timeline import Step
from neuronmm_ops.kernels.stages import tiling
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    OUTPUT_UNIT,
    PARTITIONS,
    SEARCHED,
    Span,
)

FOUND = 4 * (SEARCHED + 2)
"""Bytes per partition of what a part of the sums leaves."""
MERGED = 4 * 4
"""The same where column groups lie side by side, and what is made of them."""
CHAIN = 5
"""Small instructions one after the other that make an id and a logit of what was merged."""


def decode(problem: Problem) -> list[Plan]:
    """The best plans of the kernel that fit, the fastest first."""
    return decode_search.best_plans(DecodeCosts(problem), decode_stages, {})


def decode_stages(s: Stages) -> None:
    """The stages of the kernel."""
    costs, V = s.costs, s.problem.N
    chunks = s.chunks(s.problem.K)
    widest = max(chunks).size * s.problem.itemsize
    s.hold(s.transposed(chunks) + 2 * widest)
    block, last_block = int(s.blocks["block"]), int(s.blocks["last_block"])
    blocks = tiling.output_blocks(Span(0, s.own(V)), block, last_block)
    sums = [_sums(costs, columns.size, V, i + 1 == len(blocks)) for i, columns in enumerate(blocks)]
    parts = max(1, sum([len(each.parts) for each in sums]))
    s.hold(parts * (FOUND + MERGED * costs.groups))
    source: Source = "hbm"
    for i, each in enumerate(sums):
        searched = s.rows(each) + (4 * each.width if costs.scaled else 0)
        searched += 2 * len(each.parts) * (2 * BANK_COLUMNS + 8 * SEARCHED)
        s.hold(searched)
        s.run(chunks, source, each, first=i == 0, last=i + 1 == len(sums))
        s.hold(-searched)
        source = "transposed"
    _merge(s, parts)


def _sums(costs: DecodeCosts, columns: int, V: int, last: bool) -> Sums:
    """The sums of a block, which VectorE passes over: to scale them, for the greatest, its id."""
    step = BANK_COLUMNS if last else 0
    passes = 3 if costs.scaled else 2
    return costs.sums(columns, V, OUTPUT_UNIT, step, VECTOR, scaled=costs.scaled, passes=passes)


def _merge(s: Stages, parts: int) -> None:
    """What follows the last search: two cores merge twice, with an exchange between."""
    machine, problem = s.costs.machine, s.problem
    latency = result_ns(machine, Engine.VECTOR)
    small = evict_ns(machine, Engine.VECTOR, 1) + latency
    merge = 4 * (evict_ns(machine, Engine.VECTOR, parts * s.costs.groups) + latency)
    exchange = (DMA_START_NS + DMA_DONE_NS + CHAIN * small) * (problem.lnc == 2)
    s.timeline.wait(merge + exchange + CHAIN * small)
    step = Step(0.0, store_ns=load_ns(machine, problem.M, FOUND_BYTES))
    s.hbm_bytes += FOUND_BYTES * problem.M * (s.core == 0)
    s.timeline.run([step])


def plan_lm_head(
    M: int,
    H: int,
    V: int,
    *,
    dtype: str = "bfloat16",
    weight_dtype: str = "",
    target: str = DEFAULT_TARGET,
    lnc: int = 1,
) -> PlannedKernel:
    """The quickest greedy output head: ids and greatest logits of x [M, H] @ w [H, V].

    Args:
        M: tokens, 1 to 128.
        H: features.
        V: ids.
        dtype: bfloat16, float16 or float32.
        weight_dtype: float8_e4m3fn or int8, with an fp32 scale a column; empty for `dtype`.
        target: trn1, trn2, trn3 or an alias of theirs.
        lnc: NeuronCores that share the launch: 1, or 2 on trn2 and trn3.

    Raises:
        ValueError: sizes or names that are none, or more tokens than 128.
    """
    problem = Problem("lm_head", M, ((H, V),), dtype, target, lnc, weight_dtype=weight_dtype)
    if M > PARTITIONS:
        raise ValueError(
            f"lm_head takes up to {PARTITIONS} tokens, got {M}; pass the last of each sequence"
        )
    if V >= NO_ID:
        raise ValueError(f"ids must be below 2^23, got {V}; split w by columns")
    w = [TensorShape((H, V), weight_dtype or dtype)]
    if weight_dtype:
        w.append(TensorShape((V,), "float32"))
    return planned_kernels(quickest(problem), lambda M: [TensorShape((M, H), dtype), *w])[0]
