"""Tiles of weights in int4: two rows a byte, and a scale for each 128 rows of a column.

Numbers are multiplied by their scales before the sum, in SBUF: VectorE, the only engine that knows
bits, takes four bytes apart at a time, ScalarE casts, VectorE and GpSimdE multiply. That takes
longer than the DMA of weights in one byte.
"""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, KPart, Span, spans, tiles_in

HALF_BYTE = 0x0F
HALF_BYTES = 0x0F0F0F0F
ZERO = 8.0
"""What a half byte holds for 0."""


class HalfBytes(nl.NKIObject):
    """What makes tiles of activations' dtype of those of bytes.

    Args:
        scale_hbm: fp32 [groups, N], of each 128 rows.
        dtype: of the activations.
    """

    def __init__(self, scale_hbm: NkiTensor, dtype: nl.DType) -> None:
        self.scale_hbm = scale_hbm
        self.dtype = dtype
        # bfloat16 multiplies faster, and holds the scales of our rounding
        self.scale_dtype = nl.bfloat16 if dtype == nl.bfloat16 else nl.float32
        self.zero_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        nisa.memset(self.zero_sb, -ZERO)
        self.shifts_sb: list[NkiTensor] = []

    def scales(self, first: int, rows: int, per: int, columns: Span) -> NkiTensor:
        """Scales of groups from `first` on, [rows, columns]: each on `per` partitions."""
        scale_sb = nl.ndarray((rows, columns.size), dtype=self.scale_dtype)
        for i in range(tiles_in(rows, per)):
            count = min(per, rows - i * per)
            row_hbm = self.scale_hbm[nl.ds(first + i, 1), nl.ds(columns.start, columns.size)]
            own_sb = scale_sb[i * per : i * per + count, :]
            nisa.dma_copy(own_sb, row_hbm.broadcast(0, count), dge_mode=nisa.dge_mode.none)
        return scale_sb

    def scales_of(self, start: int, part: KPart, columns: Span) -> NkiTensor:
        """Scales of a part of a K chunk from row `start` on."""
        return self.scales(start // PARTITIONS, part.rows, PARTITIONS // part.tiles, columns)

    def numbers(self, bytes_sb: NkiTensor, shift: Any) -> NkiTensor:
        """The halves of bytes [k, columns] from bit `shift` on, an int or [k, 1], as floats."""
        halves_sb = nl.ndarray(bytes_sb.shape, dtype=nl.uint8)
        to_sb, from_sb, mask = halves_sb, bytes_sb, HALF_BYTE
        if bytes_sb.shape[1] % 4 == 0:
            to_sb, from_sb, mask = halves_sb.view(nl.uint32), bytes_sb.view(nl.uint32), HALF_BYTES
        nisa.tensor_scalar(to_sb, from_sb, nl.right_shift, shift, op1=nl.bitwise_and, operand1=mask)
        numbers_sb = nl.ndarray(bytes_sb.shape, dtype=self.scale_dtype)
        zero_sb = self.zero_sb[0 : bytes_sb.shape[0], :]
        nisa.activation(numbers_sb, nl.copy, halves_sb, bias=zero_sb)
        return numbers_sb

    def scaled(self, numbers_sb: NkiTensor, scale_sb: NkiTensor) -> NkiTensor:
        """Numbers times scales [k, columns], by VectorE and GpSimdE."""
        scaled_sb = nl.ndarray(numbers_sb.shape, dtype=self.dtype)
        engines = [nisa.vector_engine, nisa.gpsimd_engine]
        shares = spans(0, numbers_sb.shape[1], (numbers_sb.shape[1] + 1) // 2)
        for i in range(len(shares)):
            own = nl.ds(shares[i].start, shares[i].size)
            nisa.tensor_tensor(
                scaled_sb[:, own],
                numbers_sb[:, own],
                scale_sb[:, own],
                nl.multiply,
                engine=engines[i],
            )
        return scaled_sb

    def tile(self, bytes_hbm: NkiTensor, start: int, columns: Span) -> NkiTensor:
        """Up to 128 rows from `start` on, [rows, columns], of bytes [rows / 2, columns].

        Both rows of a byte load it: contractions of prefill have rows in their order.
        """
        rows = 2 * bytes_hbm.shape[0]
        bytes_sb = nl.ndarray((rows, columns.size), dtype=nl.uint8)
        twice_hbm = bytes_hbm.expand_dim(1).broadcast(1, 2)
        nisa.dma_copy(bytes_sb, twice_hbm, dge_mode=nisa.dge_mode.none)
        scale_sb = self.scales(start // PARTITIONS, rows, rows, columns)
        return self.scaled(self.numbers(bytes_sb, self.row_shifts()[0:rows, :]), scale_sb)

    def row_shifts(self) -> NkiTensor:
        """[128, 1]: the bit from which on a byte holds a row, 0 of even ones and 4 of odd ones."""
        if len(self.shifts_sb) == 0:
            shifts_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.uint32)
            nisa.iota(shifts_sb, [[0, 1]], channel_multiplier=1)
            nisa.tensor_scalar(
                shifts_sb, shifts_sb, nl.bitwise_and, 1, op1=nl.left_shift, operand1=2
            )
            self.shifts_sb.append(shifts_sb)
        return self.shifts_sb[0]
