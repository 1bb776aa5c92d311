"""What a search may vary of `lm_head`'s kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops.kernels.knobs import Knobs, decode_knobs
from neuronmm_ops.kernels.lm_head.decode import NO_ID
from neuronmm_ops.kernels.stages.tiling import PARTITIONS

if TYPE_CHECKING:
    from neuronmm_ops.kernels.problem import Problem


def decode(problem: Problem) -> list[Knobs]:
    """Knobs of `lm_head_decode`. Raises ValueError for more ids than fp32 counts."""
    if problem.N >= NO_ID:
        raise ValueError(f"ids must be below 2^23, got {problem.N}; split w by columns")
    return decode_knobs(problem)


def prefill(problem: Problem) -> list[Knobs]:
    """There is no kernel for more tokens, which raise ValueError."""
    if problem.M <= PARTITIONS:
        return []
    raise ValueError(
        f"lm_head takes up to {PARTITIONS} tokens, got {problem.M}; pass the last of each sequence"
    )
