"""A kernel planned for given operands: what the time of a whole model is composed of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from neuroncore import Kernel, Profile, TensorSpec, simulate
from neuroncore.dtypes import dtype_of
from neuronmm_ops.kernels.problem import Plan
from neuronmm_ops.kernels.simulated import simulated_kernel
from neuronmm_ops.plan.tracing import Cost, of_least_regret, operands_of, trace, tracing


class TensorShape(NamedTuple):
    """An operand of a kernel.

    Attributes:
        shape: its sizes.
        dtype: bfloat16, float16, float32, float8_e4m3fn, int8 or int32.
    """

    shape: tuple[int, ...]
    dtype: str


Operand = TensorShape | tuple["Operand", ...] | None


@dataclass(frozen=True)
class PlannedKernel:
    """One launch of a kernel.

    Attributes:
        kernel: the function, on as many cores as it takes.
        operands: its tensors in order, or tuples of them; None where one is left out.
        arguments: its compile-time arguments by name.
    """

    kernel: Kernel
    operands: tuple[Operand, ...]
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def specs(self) -> list[Any]:
        """The operands as the simulator takes them."""
        return [_spec(operand) for operand in self.operands]

    def cost(self, target: str) -> Cost | None:
        """What one launch costs; None where the simulated core refuses it."""
        return trace(self.kernel, self.specs, target, self.arguments)

    def profile(self, target: str, cores_busy: int = 1) -> Profile:
        """The modelled profile of one launch; no values are computed.

        Args:
            target: trn1, trn2 or trn3.
            cores_busy: NeuronCores of the chip that share its HBM.

        Raises:
            NkiValidationError: the kernel breaks a rule of the target, or does not fit on it.
        """
        options: dict[str, Any] = {"target": target, "cores_busy": cores_busy}
        options |= tracing(self.arguments)
        return simulate(self.kernel, *self.specs, **options).profile


def planned_kernels(plan: Plan) -> list[PlannedKernel]:
    """The launches of a plan, without biases."""
    problem, kernels = plan.problem, list[PlannedKernel]()
    kernel = simulated_kernel(problem.op, plan.kernel, problem.lnc)
    for tokens in plan.launches:
        specs = operands_of(replace(problem, M=tokens), kernel)
        kernels.append(PlannedKernel(kernel, shapes_of(specs), plan.arguments))
    return kernels


def shapes_of(specs: Sequence[Any]) -> tuple[Operand, ...]:
    """Operands of a launch, from those that the simulator takes."""
    operands: list[Operand] = []
    for spec in specs:
        is_list = isinstance(spec, tuple)
        operands.append(
            shapes_of(spec) if is_list else spec and TensorShape(spec.shape, str(spec.dtype))
        )
    return tuple(operands)


def _spec(operand: Operand) -> Any:
    if operand is None or isinstance(operand, TensorShape):
        return operand and TensorSpec(operand.shape, dtype_of(operand.dtype))
    return tuple([_spec(each) for each in operand])


def quickest(choices: Sequence[PlannedKernel], target: str) -> PlannedKernel | None:
    """The launch of least regret over the DMA models; None where the core refuses all."""
    costs = [(planned, planned.cost(target)) for planned in choices]
    fitting = [(planned, cost) for planned, cost in costs if cost is not None]
    if not fitting:
        return None
    number, _ = of_least_regret([cost.times_ms for _, cost in fitting])
    return fitting[number][0]
