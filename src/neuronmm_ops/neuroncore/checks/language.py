"""Rules of kernels, registers and loops.

Source: NKI 0.6 documentation, `nki.language`; the language guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuronmm_ops.neuroncore.checks.base import refuse
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore.memory.tensor import NkiTensor


def outputs(tensors: list[Any]) -> None:
    """A kernel returns tensors in shared_hbm."""
    for t in tensors:
        buffer = getattr(t, "buffer", None)
        if buffer is not MemoryRegion.shared_hbm:
            refuse(
                f"kernel output {t!r} must be a tensor in nl.shared_hbm; "
                "allocate it with buffer=nl.shared_hbm and dma_copy the result into it"
            )


def writable_register(register: Any) -> None:
    """A loop's own register is read-only."""
    if getattr(register, "frozen", False):
        refuse("register_move/load: the loop variable is read-only; use another register")


def executes(execute: bool, opcode: str) -> None:
    """Values exist in execute mode only."""
    if not execute:
        refuse(f'{opcode}: the value is data, which mode="trace" does not compute; use "execute"')


def one_tile(name: str, x: Any) -> None:
    """An element-wise function of `nl` gets at least one tile."""
    if not hasattr(x, "geometry"):
        refuse(f"nl.{name}: one input must be a tile; got {x!r}")


def matrix(name: str, x: NkiTensor) -> None:
    """A 2D transpose gets a matrix."""
    if x.ndim != 2:
        refuse(f"nl.{name}: takes two dimensions; got {x}; reshape it")


def transposed_matmul(transpose_x: bool) -> None:
    """nl.matmul takes x with the contraction on partitions."""
    if not transpose_x:
        refuse("nl.matmul: needs transpose_x=True; give x transposed, contraction on partitions")


def broadcast_shape(x: NkiTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same rank, and other sizes only where x has 1."""
    if len(shape) != x.ndim or any(a not in (1, b) for a, b in zip(x.shape, shape, strict=True)):
        refuse(f"nl.broadcast_to: {x} does not broadcast to {list(shape)}; only size 1 repeats")
    return shape


def gather_axis(axis: int) -> None:
    """gather_flattened has one axis: all free dimensions, flattened."""
    if axis != 0:
        refuse(f"nl.gather_flattened: axis must be 0; got {axis}")


def buffer(value: Any) -> None:
    """`buffer=` is an object of nl, not a string."""
    if not isinstance(value, MemoryRegion):
        refuse(
            f"nl.ndarray: buffer must be nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm; got {value!r}"
        )


def loop_step(step: Any) -> None:
    """A dynamic loop's step is a positive compile-time integer."""
    if not isinstance(step, int) or step < 1:
        refuse(f"nl.fori_loop: step must be a positive int; got {step!r}")


def loop_condition(register: Any) -> None:
    """A while body returns its next condition."""
    if not hasattr(register, "value"):
        refuse(f"nl.while_loop: the body must return the condition register; got {register!r}")


def program_axis(axis: int) -> None:
    """The launch grid has one axis."""
    if axis != 0:
        refuse(f"nl.program_id/num_programs: the only axis is 0; got {axis}")


def launch_cores(count: Any) -> None:
    """A kernel runs on one or two physical cores."""
    if count not in (1, 2):
        refuse(f"kernel[{count}]: a launch takes 1 or 2 cores (LNC)")
