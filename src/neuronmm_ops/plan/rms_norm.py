"""The launch of `rms_norm`: over how many partitions a token is spread."""

from __future__ import annotations

from functools import lru_cache

from neuroncore.hardware import DEFAULT_TARGET
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.kernels.simulated import simulated_kernel
from neuronmm_ops.kernels.stages.tiling import PARTITIONS
from neuronmm_ops.plan.launches import PlannedKernel, TensorShape, quickest

MOST_PARTS = 16
"""Over how many times as many partitions as it must a token is spread, where tokens must queue."""


def plan_rms_norm(
    M: int,
    H: int,
    *,
    residual: bool,
    dtype: str = "bfloat16",
    target: str = DEFAULT_TARGET,
    lnc: int = 1,
) -> PlannedKernel:
    """The quickest `rms_norm` of x [M, H], with or without a residual that is added before.

    Args:
        M: tokens.
        H: features.
        residual: whether there is one.
        dtype: bfloat16, float16 or float32.
        target: trn1, trn2, trn3 or an alias of theirs.
        lnc: NeuronCores that share the launch: 1, or 2 on trn2 and trn3.

    Raises:
        ValueError: sizes or names that are none, or tokens that do not fit SBUF.
    """
    return _planned(Problem("rms_norm", M, ((H, 1),), dtype, target, lnc), residual)


@lru_cache(maxsize=1024)
def _planned(problem: Problem, residual: bool) -> PlannedKernel:
    M, H = problem.M, problem.K
    x, weight = TensorShape((M, H), problem.dtype), TensorShape((H,), problem.dtype)
    operands = (x, x if residual else None, weight)
    kernel = simulated_kernel("rms_norm", "rms_norm", problem.lnc)
    # two tiles of x, and of its residual and result, lie next to the weight
    least = (1 + 2 * (2 + residual)) * problem.itemsize * H // problem.machine.planned_sbuf_bytes
    divisors = [parts for parts in range(least + 1, min(H, PARTITIONS) + 1) if H % parts == 0]
    choices = [
        PlannedKernel(kernel, operands, {"parts": parts})
        for parts in divisors
        if parts <= MOST_PARTS * divisors[0] or parts * problem.core_tokens[0] <= PARTITIONS
    ]
    planned = quickest(choices, problem.target)
    if planned is None:
        raise ValueError(
            f"rms_norm spreads a token over a divisor of H, and none of at most {PARTITIONS} "
            f"makes {H} {problem.dtype} features fit SBUF on {problem.target}; pad H"
        )
    return planned
