"""Launches of kernels, traced once each on the simulated core, and the quickest of several ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neuronmm_ops.bench.runner import traced
from neuronmm_ops.hardware import DMA_MODELS
from neuronmm_ops.kernels import nki_kernel, plan_op
from neuronmm_ops.kernels.planned import PlannedKernel, TensorShape
from neuronmm_ops.kernels.planner.problem import Matrices
from neuronmm_ops.neuroncore import Kernel, TensorSpec
from neuronmm_ops.neuroncore.dtypes import dtype_of
from neuronmm_ops.ops.definitions import SPECS


@dataclass(frozen=True)
class Launch:
    """A kernel, on as many cores as it takes, with its operands and its compile-time arguments."""

    kernel: Kernel
    operands: tuple[TensorShape | None, ...]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """What two launches that take the same time have in common."""
        arguments = repr(sorted(self.arguments.items()))
        return self.kernel.func, self.kernel.lnc, self.operands, arguments


class Way(NamedTuple):
    """One way to compute something: launches one after the other, and what ranks exchange.

    Attributes:
        launches: on each rank.
        collectives_ms: of each collective between them.
    """

    launches: tuple[Launch, ...]
    collectives_ms: tuple[float, ...] = ()


class Cost(NamedTuple):
    """Modelled times under each of `DMA_MODELS`, and the HBM traffic of one rank."""

    times_ms: tuple[float, ...] = (0.0,) * len(DMA_MODELS)
    hbm_bytes: float = 0

    def plus(self, other: Cost, times: float = 1) -> Cost:
        """The sum of this and so many of the other."""
        both = zip(self.times_ms, other.times_ms, strict=True)
        found = tuple([own + times * more for own, more in both])
        return Cost(found, self.hbm_bytes + times * other.hbm_bytes)


_traced: dict[tuple[Any, ...], Cost] = {}
"""By target, cores that share the HBM, and launch: a process traces no launch twice."""


class Tracer:
    """Costs of launches on one target; each is traced when it is first asked for.

    Args:
        target: trn1, trn2 or trn3.
        cores_busy: NeuronCores of a chip that share its HBM.
    """

    def __init__(self, target: str, cores_busy: int = 1) -> None:
        self.target, self.cores_busy = target, cores_busy

    def launch(self, launch: Launch) -> Cost:
        """The cost of a launch.

        Raises:
            NkiValidationError: the kernel breaks a rule of the target, or does not fit on it.
        """
        key = self.target, self.cores_busy, *launch.key
        if key not in _traced:
            operands = [
                None if operand is None else TensorSpec(operand.shape, dtype_of(operand.dtype))
                for operand in launch.operands
            ]
            profile = traced(
                launch.kernel, operands, self.target, launch.arguments, self.cores_busy
            )
            times = tuple([profile.times_ms[model] for model in DMA_MODELS])
            _traced[key] = Cost(times, profile.hbm_bytes)
        return _traced[key]

    def launches(self, launches: Iterable[Launch]) -> Cost:
        """The cost of launches that follow each other."""
        total = Cost()
        for launch in launches:
            total = total.plus(self.launch(launch))
        return total

    def quickest(self, ways: Sequence[Way]) -> Way:
        """The way that is never far from the quickest, whichever DMA model holds."""
        if len(ways) == 1:
            return ways[0]
        times = [
            [ms + sum(way.collectives_ms) for ms in self.launches(way.launches).times_ms]
            for way in ways
        ]
        least = [min(under) for under in zip(*times, strict=True)]
        regrets = [max([ms / low for ms, low in zip(t, least, strict=True)]) for t in times]
        return ways[regrets.index(min(regrets))]


def of_plans(plans: Sequence[PlannedKernel]) -> tuple[Launch, ...]:
    """The launches of planned kernels."""
    return tuple([Launch(plan.kernel, plan.operands, plan.arguments) for plan in plans])


def of_op(
    op: str, M: int, matrices: Matrices, dtype: str, target: str, lnc: int, weight_dtype: str = ""
) -> tuple[Launch, ...]:
    """The launches of an op's plan, without bias.

    Args:
        op: name of the op.
        M: tokens.
        matrices: shapes of its weights in the order of its schema.
        dtype: of activations.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores that share a launch.
        weight_dtype: of weights in one byte, which have scales; empty where they are of `dtype`.

    Raises:
        ValueError: as `plan_op`.
    """
    plan = plan_op(op, M, matrices, dtype, target, lnc, weight_dtype=weight_dtype)
    kernel = nki_kernel(plan)
    rest = [TensorShape(shape, weight_dtype or dtype) for shape in matrices]
    if weight_dtype:
        missing = [None for operand in SPECS[op].operands if operand.optional]
        scales = [TensorShape((columns,), "float32") for _, columns in matrices]
        rest = [*rest, *missing, *scales]
    tokens = [TensorShape((count, matrices[0][0]), dtype) for count in plan.launches]
    return tuple([Launch(kernel, (x, *rest), plan.arguments) for x in tokens])
