"""A kernel planned for given operands: what the time of a whole model is composed of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore import Kernel


class TensorShape(NamedTuple):
    """An operand of a kernel.

    Attributes:
        shape: its sizes.
        dtype: bfloat16, float16, float32, float8_e4m3fn, int8 or int32.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PlannedKernel:
    """One launch of a kernel. Times and traffic are modelled by the plan's own formulas.

    Attributes:
        name: of the kernel.
        kernel: the function, on as many cores as it was planned for.
        operands: its tensors in order; None where one is left out.
        arguments: its compile-time arguments by name.
        times_ms: predicted under each of `hardware.DMA_MODELS`.
        hbm_bytes: predicted HBM traffic, all cores.
        launches: how often it runs in a row, on parts of that size; times and bytes are of one.
    """

    name: str
    kernel: Kernel
    operands: tuple[TensorShape | None, ...]
    arguments: dict[str, Any]
    times_ms: tuple[float, ...]
    hbm_bytes: int
    launches: int = 1
