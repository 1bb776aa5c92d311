"""Plans of `svd_mlp` in both phases."""

from __future__ import annotations

from neuronmm_ops.kernels.planner import prefill_mlp
from neuronmm_ops.kernels.planner.problem import Plan, Problem
from neuronmm_ops.kernels.svd_mlp import plan_decode


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit."""
    return plan_decode.candidates(problem) + prefill_mlp.candidates(problem)
