"""Plans that split the tokens of an op into several launches, of however few instructions."""

from typing import Any

import pytest

from neuronmm_ops import kernels


class SplitPlan:
    """A plan in launches of other numbers of tokens."""

    def __init__(self, plan: kernels.Plan, launches: tuple[int, ...]) -> None:
        self.plan = plan
        self.launches = launches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)


def split_plans(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let no launch have more than `most` tokens; return the list in which plans are noted."""
    plan_op, planned = kernels.plan_op, []

    def split(op: str, M: int, *arguments: Any) -> SplitPlan:
        planned.append(M)
        launches = tuple(min(most, M - start) for start in range(0, M, most))
        return SplitPlan(plan_op(op, M, *arguments), launches)

    monkeypatch.setattr(kernels, "plan_op", split)
    return planned
