"""Weights of the decode kernels, of the dtype of the activations or in one byte with a scale."""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.chunks import itemsize
from neuronmm_ops.kernels.stages.facts import facts
from neuronmm_ops.kernels.stages.tiling import cast_shares, lanes_of


class DecodeWeight(nl.NKIObject):
    """A weight in HBM.

    Args:
        hbm: [K, N], of the dtype of the activations, or of one byte: float8_e4m3fn (read as
            float8_e4m3, whose bits are the same up to 240, where TensorE knows no other) or int8.
        dtype: of the activations.
        scale: fp32 [N], a factor of each column of a weight in one byte, else None.
        dma_cast: of weights that are cast, the DMA casts each so-manieth K tile; 0: none.
    """

    def __init__(
        self, hbm: NkiTensor, dtype: nl.DType, scale: NkiTensor | None, dma_cast: int = 0
    ) -> None:
        columns = hbm.shape[1]
        if is_none(scale):
            assert hbm.dtype == dtype, (
                f"a weight without a scale must have the dtype of x, {dtype}; got {hbm.dtype}"
            )
        else:
            assert itemsize(hbm.dtype) == 1, f"a scale is for one-byte weights, got {hbm.dtype}"
            assert scale.shape[0] == columns, f"scale must be [{columns}], got [{scale.shape[0]}]"
        if hbm.dtype == nl.float8_e4m3fn and not facts().reads_e4m3fn:
            hbm = hbm.view(nl.float8_e4m3)
        self.hbm = hbm
        self.dtype = dtype
        self.scale = scale
        # TensorE takes fp8 beside 16-bit activations; what else differs is cast on the way there
        self.dma_cast = dma_cast
        self.casts = hbm.dtype != dtype and (dtype == nl.float32 or hbm.dtype == nl.int8)


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
