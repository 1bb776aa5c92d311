"""Plans of `svd_mlp` in both phases."""

from __future__ import annotations

from neuronmm_ops.kernels.planner import decode, prefill_mlp
from neuronmm_ops.kernels.planner.problem import Plan, Problem


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit."""
    return decode.candidates(problem) + prefill_mlp.candidates(problem)
