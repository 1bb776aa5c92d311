"""Weights of the decode kernels, of the dtype of the activations or in one byte with a scale."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.decode_tiling import cast_by_dma, cast_shares, lanes_of
from neuronmm_ops.kernels.stages.facts import facts
from neuronmm_ops.kernels.stages.half_bytes import HalfBytes
from neuronmm_ops.kernels.stages.tiling import Span, tiles_in
from neuronmm_ops.storages import STORAGES

STORED = tuple([
    (getattr(nl, storage.tensor_dtype), storage.is_multiplied, storage.group or 0)
    for storage in STORAGES.values()
])  # fmt: skip
"""Dtypes of storages, whether TensorE multiplies them with 16-bit activations, and the rows that
share a scale: 0 is all, 128 is of int4, two rows a byte."""


def is_multiplied(weight: NkiTensor, dtype: nl.DType) -> bool:
    """Whether TensorE multiplies a stored weight with activations of `dtype` as it is."""
    stored = STORED[0]
    for other in STORED:
        if other[0] == weight.dtype:
            stored = other
    assert stored[0] == weight.dtype, f"a scale is for stored weights, got {weight.dtype}"
    return stored[1] and dtype != nl.float32


def group_of(weight: NkiTensor) -> int:
    """Rows of a weight that share a scale; 0: all, or it has none."""
    for stored in STORED:
        if stored[0] == weight.dtype:
            return stored[2]
    return 0


def rows_of(weight: NkiTensor) -> int:
    """Rows of the matrix that a weight in HBM stands for: int4 has two in one."""
    return weight.shape[0] * 2 if group_of(weight) > 0 else weight.shape[0]


def check_scale(weight: NkiTensor, scale: NkiTensor) -> None:
    """Check the shape of a stored weight's scales."""
    size, columns, group = scale.shape[0], weight.shape[1], group_of(weight)
    if group == 0:
        assert size == columns, f"scales must be [{columns}], got [{size}]"
    else:
        groups = tiles_in(rows_of(weight), group)
        assert size == groups, f"scales must be [{groups}, {columns}], got {size} rows"


def as_read(weight: NkiTensor) -> NkiTensor:
    """A weight as the core reads it: up to 240 both formats of e4m3 have the same bits."""
    if weight.dtype == nl.float8_e4m3fn and not facts().reads_e4m3fn:
        return weight.view(nl.float8_e4m3)
    return weight


class DecodeWeight(nl.NKIObject):
    """A weight in HBM.

    Args:
        hbm: [K, N], of the dtype of the activations, or of a storage.
        dtype: of the activations.
        scale: fp32 [N], a factor of each column of a weight in one byte, or [groups, N] of int4's
            groups of rows, which `halves` has then; else None.
        dma_cast: of weights that are cast, the DMA casts every n-th K tile; 0: none.
    """

    def __init__(
        self, hbm: NkiTensor, dtype: nl.DType, scale: NkiTensor | None, dma_cast: int = 0
    ) -> None:
        self.group = 0
        if is_none(scale):
            assert hbm.dtype == dtype, (
                f"a weight without a scale must have the dtype of x, {dtype}; got {hbm.dtype}"
            )
        else:
            check_scale(hbm, scale)
            self.group = group_of(hbm)
        self.hbm = as_read(hbm)
        self.dtype = dtype
        # scales of groups are multiplied before the sum, and nobody else sees them
        self.halves: Any = None
        self.scale = scale
        if not is_none(scale) and self.group > 0:
            self.halves = HalfBytes(scale, dtype)
            self.scale = None
        self.dma_cast = dma_cast
        self.casts = not is_none(scale) and not is_multiplied(hbm, dtype)
        self.rows = rows_of(hbm)

    def cast_by_dma(self, before: int, tiles: int) -> int:
        """How many of `tiles` K tiles after `before` others a DMA casts."""
        return cast_by_dma(before, tiles, self.dma_cast if self.casts and self.group == 0 else 0)

    def loaded(self, tile_hbm: NkiTensor, columns: Span, by_dma: int) -> list[NkiTensor]:
        """Some columns of K tiles [k, tiles, N], in SBUF and as TensorE takes them: [k, columns].

        A DMA casts the first `by_dma` of them, engines the others, where they are cast. Of int4
        those are two of each in HBM, and have yet to be `scaled`.
        """
        k, tiles, _ = tile_hbm.shape
        own = nl.ds(columns.start, columns.size)
        tiles_sb: list[NkiTensor] = []
        if by_dma > 0:
            cast_sb = nl.ndarray((k, by_dma, columns.size), dtype=self.dtype)
            nisa.dma_copy(cast_sb, tile_hbm[:, 0:by_dma, own], dge_mode=nisa.dge_mode.none)
            for j in range(by_dma):
                tiles_sb.append(cast_sb[:, j, :])
        if by_dma < tiles:
            tile_sb = nl.ndarray((k, tiles - by_dma, columns.size), dtype=self.hbm.dtype)
            nisa.dma_copy(tile_sb, tile_hbm[:, by_dma:tiles, own], dge_mode=nisa.dge_mode.none)
            for j in range(tiles - by_dma):
                j_sb = tile_sb[:, j, :]
                if self.group > 0:
                    for shift in (0, 4):
                        tiles_sb.append(self.halves.numbers(j_sb, shift))
                else:
                    tiles_sb.append(cast(j_sb, self.dtype) if self.casts else j_sb)
        return tiles_sb


def check_one_dtype(weights: list[DecodeWeight]) -> None:
    """Check that factors have one dtype: what one product makes the next one contracts."""
    for w in weights:
        assert w.hbm.dtype == weights[0].hbm.dtype, (
            f"all factors must have one dtype; got {weights[0].hbm.dtype} and {w.hbm.dtype}"
        )


def lanes_for(weights: list[DecodeWeight], M: int) -> int:
    """Columns of the transposes of what is multiplied by weights; as `KChunk`."""
    return lanes_of(M, facts().pe_tile) if not is_none(weights[0].scale) else 0


def cast(tile_sb: NkiTensor, dtype: nl.DType) -> NkiTensor:
    """A weight tile [k, columns] in another dtype: the engines that read SBUF share the columns."""
    cast_sb = nl.ndarray(tile_sb.shape, dtype=dtype)
    shares = cast_shares(tile_sb.shape[1], facts().casting_mhz)
    for i in range(len(shares)):
        columns = nl.ds(shares[i].start, shares[i].size)
        if i == 0:
            nisa.activation(cast_sb[:, columns], nl.copy, tile_sb[:, columns])
        elif i == 1:
            nisa.tensor_copy(cast_sb[:, columns], tile_sb[:, columns], engine=nisa.gpsimd_engine)
        else:
            nisa.tensor_copy(cast_sb[:, columns], tile_sb[:, columns], engine=nisa.vector_engine)
    return cast_sb
