"""Keys and values of a head in prefill, in SBUF, and the mask of tiles on the diagonal."""

from __future__ import annotations

from neuronmm_ops.kernels.attention.units import QUADRANT
from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, Span, tiles_in

CHUNK = 2048
"""Tokens of a load."""
ONES = 256.0
"""What a maximum over it is multiplied by again: so fp16 holds the greatest sum of products."""
MASK = 32768.0
"""Its square is what a score of a later key loses."""


def mode_of(hbm: NkiTensor) -> nisa.dge_mode:
    """Static descriptors, unless the place is known on the device only."""
    return nisa.dge_mode.unknown if hbm.is_indirect() else nisa.dge_mode.none


class Masks(nl.NKIObject):
    """What is added to scores of a tile on the diagonal, as a product of two tiles [128, 128].

    `mask` is [query, key], -32768 where the key is the later; `identity` has 32768 on its diagonal.
    """

    def __init__(self, dtype: nl.DType) -> None:
        shape = (PARTITIONS, PARTITIONS)
        zeros_sb, ones_sb = nl.ndarray(shape, dtype=dtype), nl.ndarray(shape, dtype=dtype)
        self.mask_sb = nl.ndarray(shape, dtype=dtype)
        self.identity_sb = nl.ndarray(shape, dtype=dtype)
        nisa.memset(zeros_sb, 0.0)
        nisa.memset(ones_sb, MASK)
        pattern = [[-1, PARTITIONS]]
        nisa.affine_select(self.mask_sb, pattern, 1, zeros_sb, -MASK, nl.greater_equal)
        nisa.affine_select(self.identity_sb, pattern, 1, ones_sb, 0.0, nl.equal)


class Keys(nl.NKIObject):
    """Keys and values of one head, loaded as they are asked for.

    Keys have a row of ones more where an engine can write it: a product with a query, whose row is
    its maximum, is less by that. Elsewhere the row is a product of its own. Values have a column
    of ones more: the product with probabilities is their sum.

    Args:
        key_hbm: [head_dim, T].
        value_hbm: [T, head_dim].
    """

    def __init__(self, key_hbm: NkiTensor, value_hbm: NkiTensor) -> None:
        self.key_hbm = key_hbm
        self.value_hbm = value_hbm
        self.head_dim = key_hbm.shape[0]
        self.tokens = key_hbm.shape[1]
        self.ones = ONES
        self.joined = self.head_dim % QUADRANT == 0 and self.head_dim < PARTITIONS
        self.rows = self.head_dim + 1 if self.joined else self.head_dim
        self.keys_sb: list[NkiTensor] = []
        self.values_sb: list[NkiTensor] = []
        if not self.joined:
            self.ones_sb = nl.ndarray((1, PARTITIONS), dtype=key_hbm.dtype)
            nisa.memset(self.ones_sb, ONES)

    def load(self, chunk: int) -> None:
        """Load chunks up to this one."""
        d, T = self.key_hbm.shape
        dtype = self.key_hbm.dtype
        for c in range(len(self.keys_sb), chunk + 1):
            start = c * CHUNK
            size = min(CHUNK, T - start)
            mode = mode_of(self.key_hbm)
            keys_sb = nl.ndarray((self.rows, size), dtype=dtype)
            if self.joined:
                nisa.memset(keys_sb[d : d + 1, :], ONES, engine=nisa.gpsimd_engine)
            nisa.dma_copy(keys_sb[0:d, :], self.key_hbm[:, nl.ds(start, size)], dge_mode=mode)
            values_sb = nl.ndarray((PARTITIONS, tiles_in(size, PARTITIONS), d + 1), dtype=dtype)
            nisa.memset(values_sb[:, :, d : d + 1], 1.0, engine=nisa.gpsimd_engine)
            whole = size // PARTITIONS
            if whole > 0:
                own_hbm = self.value_hbm[nl.ds(start, whole * PARTITIONS), :]
                own_hbm = own_hbm.reshape_dim(0, (whole, PARTITIONS)).permute((1, 0, 2))
                nisa.dma_copy(values_sb[:, 0:whole, 0:d], own_hbm, dge_mode=mode)
            rest = size - whole * PARTITIONS
            if rest > 0:
                own_hbm = self.value_hbm[nl.ds(start + whole * PARTITIONS, rest), :]
                nisa.dma_copy(values_sb[0:rest, whole, 0:d], own_hbm, dge_mode=mode)
            self.keys_sb.append(keys_sb)
            self.values_sb.append(values_sb)

    def columns(self, tokens: Span) -> NkiTensor:
        """[head_dim, tokens] of keys, all of one chunk."""
        chunk = tokens.start // CHUNK
        self.load(chunk)
        own = nl.ds(tokens.start - chunk * CHUNK, tokens.size)
        return self.keys_sb[chunk][0 : self.head_dim, own]

    def key(self, tile: int) -> NkiTensor:
        """[rows, up to 128] of a tile of keys."""
        chunk, start = tile * PARTITIONS // CHUNK, tile * PARTITIONS % CHUNK
        self.load(chunk)
        size = min(PARTITIONS, self.keys_sb[chunk].shape[1] - start)
        return self.keys_sb[chunk][:, nl.ds(start, size)]

    def value(self, tile: int) -> NkiTensor:
        """[up to 128, head_dim + 1] of a tile of values."""
        chunk, start = tile * PARTITIONS // CHUNK, tile * PARTITIONS % CHUNK
        size = min(PARTITIONS, self.keys_sb[chunk].shape[1] - start)
        return self.values_sb[chunk][0:size, start // PARTITIONS, :]
