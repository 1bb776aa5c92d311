"""Instructions that the simulated NeuronCore knows by name and signature only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from neuronmm_ops.neuroncore.isa.enums import reduce_cmd
from neuronmm_ops.neuroncore.isa.instruction import Scalar
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor

Pair = tuple[int, int]


def _not_covered(nearest: str) -> Callable[[Callable[..., Any]], Callable[..., NoReturn]]:
    """Make a signature a function that raises NotImplementedError; marked `not_covered`."""

    def mark(function: Callable[..., Any]) -> Callable[..., NoReturn]:
        @functools.wraps(function)
        def absent(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(
                f"nisa.{function.__name__} is not covered by the simulated NeuronCore; "
                f"nearest: {nearest}"
            )

        absent.__dict__["not_covered"] = True
        return absent

    return mark


@_not_covered("nc_matmul with float8 operands, or perf_mode=matmul_perf_mode.double_row")
def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: Pair | None = None,
    tile_size: Pair | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> None:
    """Matmul of MX operands with block scales, NeuronCore-v4: not covered."""


@_not_covered("tensor_scalar with a scale per partition, into a float8 tile")
def quantize_mx(
    dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None
) -> None:
    """Quantisation to MX formats with block scales, NeuronCore-v4: not covered."""


@_not_covered("tensor_scalar, then activation")
def activate2(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Scalar,
    imm1: Scalar,
    op0: Any,
    op1: Any,
    relu_param: Scalar = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: str | None = None,
) -> None:
    """Two operators, a function and a reduction on ScalarE, NeuronCore-v4: not covered."""


@_not_covered("max8 with nc_find_index8 and nc_match_replace8, 8 values at a time")
def topk(
    val_dst: NkiTensor, idx_dst: NkiTensor, src: NkiTensor, n: int, name: str | None = None
) -> None:
    """The K largest of 16 partitions, on GpSimdE: not covered.

    The documentation does not say which partitions of the 16 hold the result.
    """
