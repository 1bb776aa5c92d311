"""What the tests of planned kernels share: their traces, and their times under each DMA model."""

from typing import Any

import pytest

from neuronmm_ops.hardware import DMA_MODELS, DmaModel
from neuronmm_ops.kernels import Plan
from neuronmm_ops.kernels.planned import PlannedKernel
from neuronmm_ops.neuroncore import Profile, TensorSpec, simulate
from neuronmm_ops.neuroncore.dtypes import dtype_of


def arguments(plan: Plan) -> dict[str, Any]:
    """The compile-time arguments of a plan."""
    return {**plan.arguments}


def trace(planned: PlannedKernel, target: str, dma_model: DmaModel = "transfers") -> Profile:
    """The kernel on its operands, without values."""
    specs = [
        None if operand is None else TensorSpec(operand.shape, dtype_of(operand.dtype))
        for operand in planned.operands
    ]
    return simulate(
        planned.kernel, *specs, target=target, mode="trace", dma_model=dma_model,
        **planned.arguments,
    ).profile  # fmt: skip


def check_plan(planned: PlannedKernel, target: str, rel: float = 0.05) -> None:
    """Traffic as the simulator counts it, and time near it, under each DMA model."""
    for model, time_ms in zip(DMA_MODELS, planned.times_ms, strict=True):
        profile = trace(planned, target, model)
        assert planned.hbm_bytes == profile.hbm_bytes
        assert time_ms == pytest.approx(profile.time_ms, rel=rel), (model, planned.arguments)
