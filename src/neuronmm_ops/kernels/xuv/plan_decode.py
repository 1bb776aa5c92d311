"""Plans of `xuv_decode`."""

from __future__ import annotations

from neuronmm_ops.kernels.planner.decode import Costs, Stages
from neuronmm_ops.kernels.planner.decode_search import best_plans, even
from neuronmm_ops.kernels.planner.problem import Plan, Problem


def candidates(problem: Problem) -> list[Plan]:
    """The best plans that fit, the fastest first."""
    costs = Costs(problem)
    return best_plans(costs, run, {"rank_block": even(problem.ranks[0], costs.most_columns)})


def run(s: Stages) -> None:
    """The stages of the kernel."""
    chunks = s.chunks(s.own(s.problem.K))
    s.hold(s.buffers(chunks))
    (low,) = s.project(chunks, "hbm", s.problem.ranks)
    s.hold(-s.buffers(chunks))
    s.hold(s.transposed(low) + s.natural(s.problem.ranks[0]))
    s.write(low, "sums", resident=True)
