"""The launches of a plan, with their operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neuronmm_ops.kernels import nki_kernel
from neuronmm_ops.kernels.planned import PlannedKernel, TensorShape
from neuronmm_ops.kernels.planner.problem import Plan
from neuronmm_ops.kernels.planner.search import plan_part

Operands = Sequence[TensorShape | None]


def planned_kernels(plan: Plan, operands: Callable[[int], Operands]) -> list[PlannedKernel]:
    """The launches of a plan; `operands` are those of so many tokens."""
    name, kernel = plan.kernel, nki_kernel(plan)
    found: list[PlannedKernel] = []
    for tokens in plan.launches:
        part = plan if tokens == plan.problem.M else plan_part(plan, tokens)
        given = tuple(operands(tokens))
        arguments = {**part.arguments}
        found.append(PlannedKernel(name, kernel, given, arguments, part.times_ms, part.hbm_bytes))
    return found
