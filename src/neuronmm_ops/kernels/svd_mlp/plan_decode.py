"""Plans of `svd_mlp_decode`."""

from __future__ import annotations

from neuronmm_ops.kernels.planner.decode import SCALAR, VECTOR, Blocks, Costs, Stages
from neuronmm_ops.kernels.planner.decode_search import best_plans, even, rounded_up
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, PARTITIONS, SUM_BANKS, sizes


def candidates(problem: Problem) -> list[Plan]:
    """The best plans that fit, the fastest first."""
    costs = Costs(problem)
    gate, up, down = problem.ranks
    fuse = sum([costs.sums(r, r).banks for r in (gate, up)]) <= SUM_BANKS
    first: Blocks = {
        "rank_block": even(down if fuse else max(gate, up, down), costs.most_columns),
        "fuse_gate_up": fuse,
    }
    width = rounded_up(costs.own(problem.inner), PARTITIONS)
    bank = BANK_COLUMNS * costs.groups
    inners = sorted({min(count * bank, width) for count in range(1, SUM_BANKS + 1)})
    hidden: list[Blocks] = [
        {"inner_block": inner, "spill": spill} for inner in inners for spill in (True, False)
    ]
    return best_plans(costs, run, {**first, **hidden[0]}, [hidden])


def run(s: Stages) -> None:
    """The stages of the kernel."""
    costs, (gate, up, down) = s.costs, s.problem.ranks
    chunks = s.chunks(s.own(s.problem.K))
    natural = s.natural(gate) + s.natural(up)
    s.hold(natural + s.buffers(chunks))
    low = s.project(chunks, "hbm", (gate, up), bool(s.blocks["fuse_gate_up"]))
    s.hold(-s.buffers(chunks))
    transposed = s.transposed(low[0]) + s.transposed(low[1])
    s.hold(transposed)
    h_chunks, in_sbuf = _hidden(s, low)
    s.hold(-(transposed + natural))
    source = "sums"
    if s.blocks["spill"]:
        h_chunks, source = s.chunks(s.own(s.problem.inner)), "stored"
        s.timeline.reload(costs.load_x(h_chunks[:1]))
    s.hold(s.buffers(h_chunks))
    (d_chunks,) = s.project(h_chunks, source, [down])
    s.hold(-(s.buffers(h_chunks) + in_sbuf))
    s.hold(s.transposed(d_chunks) + s.natural(down))
    s.write(d_chunks, "sums", resident=True)


def _hidden(s: Stages, low: list[list[int]]) -> tuple[list[int], int]:
    """act(gate) * up, block after block; its K chunks, and their SBUF where they stay there."""
    costs, in_sbuf = s.costs, 0
    h_chunks: list[int] = []
    source = "sums"
    for columns in sizes(s.own(s.problem.inner), int(s.blocks["inner_block"])):
        gate, up = [costs.sums(columns, s.problem.inner, engines=e) for e in (SCALAR, VECTOR)]
        acts, h = up.width * 4, up.width * costs.itemsize
        s.hold(acts + h)
        s.run(low[0], source, gate)
        s.run(low[1], source, up)
        if s.blocks["spill"]:
            s.store(up)
            s.hold(-(acts + h))
        else:
            s.hold(-acts)
            in_sbuf += h
        h_chunks.extend(up.chunks)
        source = "transposed"
    return h_chunks, in_sbuf
