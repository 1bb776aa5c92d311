"""Plans that split the tokens of an op into several launches, of however few instructions."""

from dataclasses import replace
from typing import Any

import pytest

from neuronmm_ops import plan as plans
from neuronmm_ops.plan import Plan, Problem


def split_plans(monkeypatch: pytest.MonkeyPatch, most: int) -> list[Plan]:
    """Let no launch have more than `most` tokens; return the list in which plans are noted."""
    planned: list[Plan] = []

    def split(*arguments: Any, **options: str) -> Plan:
        problem = Problem(*arguments, **options)
        few = plans.plan_problem(replace(problem, M=max(129, problem.M)))
        plan = replace(few, problem=problem)
        launches = tuple(min(most, problem.M - start) for start in range(0, problem.M, most))
        planned.append(replace(plan, launches=launches))
        return planned[-1]

    monkeypatch.setattr(plans, "plan_op", split)
    return planned
