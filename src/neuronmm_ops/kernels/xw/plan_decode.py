"""Plans of `xw_decode`."""

from __future__ import annotations

from neuronmm_ops.kernels.planner.decode import Blocks, Costs, Stages
from neuronmm_ops.kernels.planner.decode_search import best_plans
from neuronmm_ops.kernels.planner.problem import Plan, Problem


def candidates(problem: Problem) -> list[Plan]:
    """The best plans that fit, the fastest first."""
    resident: list[Blocks] = [{"resident": False}, {"resident": True}]
    return best_plans(Costs(problem), run, resident[0], [resident])


def run(s: Stages) -> None:
    """The stages of the kernel."""
    chunks, resident = s.chunks(s.problem.K), bool(s.blocks["resident"])
    widest = max(chunks) * s.problem.itemsize
    s.hold(s.transposed(chunks) + widest if resident else s.buffers(chunks))
    s.write(chunks, "hbm", resident)
