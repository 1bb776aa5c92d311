"""Plans that split the tokens of an op into several launches, of however few instructions."""

from dataclasses import replace
from typing import Any

import pytest

from neuronmm_ops import kernels
from neuronmm_ops.kernels.planner import search


def split_plans(monkeypatch: pytest.MonkeyPatch, most: int) -> list[kernels.Plan]:
    """Let no launch have more than `most` tokens; return the list in which plans are noted."""
    planned: list[kernels.Plan] = []

    def split(*arguments: Any, **options: str) -> kernels.Plan:
        problem = kernels.Problem(*arguments, **options)
        plan = next(plan for plan in search.candidates(problem) if plan.phase == "prefill")
        launches = tuple(min(most, problem.M - start) for start in range(0, problem.M, most))
        planned.append(replace(plan, launches=launches))
        return planned[-1]

    monkeypatch.setattr(kernels, "plan_op", split)
    return planned
