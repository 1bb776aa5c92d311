"""Launches of kernels, traced once each on the simulated core, and the quickest of several ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from neuronmm_ops.estimate.ends import ENDS, times_at
from neuronmm_ops.plan import Matrices, Other, plan_op
from neuronmm_ops.plan.exchange import Collective
from neuronmm_ops.plan.launches import PlannedKernel, planned_kernels
from neuronmm_ops.plan.layouts import Group, Layout


class Way(NamedTuple):
    """One way to compute something: launches one after the other, and what ranks exchange.

    Attributes:
        launches: on each rank.
        collectives: between them.
        layouts: of the weights by group, with tensor parallel.
    """

    launches: tuple[PlannedKernel, ...] = ()
    collectives: tuple[Collective, ...] = ()
    layouts: tuple[tuple[Group, Layout], ...] = ()

    def then(self, other: Way) -> Way:
        """This way and another after it."""
        return Way(
            self.launches + other.launches,
            self.collectives + other.collectives,
            self.layouts + other.layouts,
        )

    @property
    def collectives_ms(self) -> float:
        """Of all collectives."""
        return sum([each.ms for each in self.collectives])


class PassCost(NamedTuple):
    """Modelled times at each of `ENDS`, and the HBM traffic of one rank."""

    times_ms: tuple[float, ...] = (0.0,) * len(ENDS)
    hbm_bytes: float = 0

    def plus(self, other: PassCost, times: float = 1) -> PassCost:
        """The sum of this and so many of the other."""
        both = zip(self.times_ms, other.times_ms, strict=True)
        times_ms = tuple([time_ms + times * more for time_ms, more in both])
        return PassCost(times_ms, self.hbm_bytes + times * other.hbm_bytes)


_traced: dict[tuple[Any, ...], PassCost] = {}
"""By target, cores that share the HBM, and launch: a process traces no launch twice."""


class Tracer:
    """Costs of launches on one target; each is traced when it is first asked for.

    Args:
        target: trn1, trn2 or trn3.
        cores_busy: NeuronCores of a chip that share its HBM.
    """

    def __init__(self, target: str, cores_busy: int = 1) -> None:
        self.target, self.cores_busy = target, cores_busy

    def launch(self, launch: PlannedKernel) -> PassCost:
        """The cost of a launch.

        Raises:
            NkiValidationError: the kernel breaks a rule of the target, or does not fit on it.
        """
        kernel, arguments = launch.kernel, repr(sorted(launch.arguments.items()))
        on = self.target, self.cores_busy
        key = (*on, kernel.func, kernel.lnc, launch.operands, arguments)
        if key not in _traced:
            profile = launch.profile(self.target, self.cores_busy)
            _traced[key] = PassCost(times_at(profile), profile.hbm_bytes)
        return _traced[key]

    def launches(self, launches: Iterable[PlannedKernel]) -> PassCost:
        """The cost of launches that follow each other."""
        total = PassCost()
        for launch in launches:
            total = total.plus(self.launch(launch))
        return total

    def quickest(self, ways: Sequence[Way]) -> Way:
        """The way that is never far from the quickest, whatever holds of what is not known."""
        if len(ways) == 1:
            return ways[0]
        times = [
            [ms + way.collectives_ms for ms in self.launches(way.launches).times_ms] for way in ways
        ]
        least = [min(under) for under in zip(*times, strict=True)]
        regrets = [max([ms / low for ms, low in zip(t, least, strict=True)]) for t in times]
        return ways[regrets.index(min(regrets))]


def of_op(
    op: str,
    M: int,
    matrices: Matrices,
    dtype: str,
    target: str,
    lnc: int,
    weight_dtype: str = "",
    others: tuple[Other, ...] = (),
    compute: str = "x",
) -> tuple[PlannedKernel, ...]:
    """The launches of an op's plan, without bias; the arguments are those of `plan_op`.

    Raises:
        ValueError: as `plan_op`.
    """
    options: dict[str, Any] = {"weight_dtype": weight_dtype, "others": others, "compute": compute}
    plan = plan_op(op, M, matrices, dtype, target, lnc, **options)
    return tuple(planned_kernels(plan))
