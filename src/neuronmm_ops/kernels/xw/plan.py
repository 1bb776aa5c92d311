"""Plans of `xw` in both phases."""

from __future__ import annotations

from neuronmm_ops.kernels.planner import prefill
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.xw import plan_decode


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit."""
    return plan_decode.candidates(problem) + prefill.candidates(problem)
