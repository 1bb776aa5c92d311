"""The ranks that a model runs on, and what its launches on one of them are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from neuroncore import Kernel
from neuroncore.hardware import resolve_target
from neuronmm_ops.estimate.launches import Tracer, of_op
from neuronmm_ops.estimate.linears import DTYPE, divided
from neuronmm_ops.models import ModelShape
from neuronmm_ops.plan import Matrices, Other
from neuronmm_ops.plan.exchange import Collectives
from neuronmm_ops.plan.launches import PlannedKernel
from neuronmm_ops.plan.layouts import LAYOUTS, Layout
from neuronmm_ops.storages import BY_DTYPE


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks of one target that a model is divided over.

    Attributes:
        whole: sizes of the model.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores of a rank.
        tp: ranks.
        compute: "fp8" where prefill may round activations, of weights in fp8; "x" nowhere.
        layouts: that ranks may take.
        least_us: as `Collectives`.
    """

    whole: ModelShape
    target: str
    lnc: int
    tp: int
    compute: str = "x"
    layouts: Collection[Layout] = LAYOUTS
    least_us: float = 0.0

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of one rank."""
        return divided(self.whole, self.tp)

    @cached_property
    def tracer(self) -> Tracer:
        """What traces the launches."""
        cores = resolve_target(self.target).cores
        return Tracer(self.target, min(cores, self.tp * self.lnc))

    @cached_property
    def links(self) -> Collectives:
        """What the ranks exchange."""
        return Collectives(self.target, self.lnc, self.tp, self.least_us)

    @property
    def machine(self) -> dict[str, Any]:
        """Of a plan, by the names of its arguments."""
        return {"dtype": DTYPE, "target": self.target, "lnc": self.lnc}

    def op(
        self, op: str, M: int, matrices: Matrices, stored: str, others: tuple[Other, ...] = ()
    ) -> tuple[PlannedKernel, ...]:
        """The launches of an op's plan on a rank; the arguments are those of `of_op`."""
        computes = BY_DTYPE[stored].computes if stored else ()
        compute = self.compute if self.compute in computes else "x"
        return of_op(op, M, matrices, DTYPE, self.target, self.lnc, stored, others, compute)

    def on_cores(self, kernel: Kernel) -> Kernel:
        """A kernel on all cores of a rank."""
        return kernel if self.lnc == 1 else kernel[self.lnc]
