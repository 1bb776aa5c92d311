"""The hidden block of a gated MLP, between the products that make it and the one that takes it."""

from __future__ import annotations

from neuronmm_ops.kernels.shim import NkiTensor, nisa, nl
from neuronmm_ops.kernels.stages.operands import Tiles, Weight
from neuronmm_ops.kernels.stages.tiling import HIDDEN_TILES, PARTITIONS, Span, tiles_in


class Hidden(nl.NKIObject):
    """The hidden block [I, width]: its last groups of tiles in SBUF, the first through HBM.

    Args:
        dtype: of its elements.
        scratch_hbm: private [128, columns] of the groups that leave SBUF, or nothing.
        size: I.
        width: tokens.
        spill: how many groups go through HBM.
        resident: how many of those stay in SBUF once they are back.
        first: column of `scratch_hbm` from which they are there.
    """

    def __init__(
        self,
        dtype: nl.DType,
        scratch_hbm: Tiles,
        size: int,
        width: int,
        spill: int,
        resident: int,
        first: int = 0,
    ) -> None:
        self.first = first
        self.dtype = dtype
        self.scratch_hbm = scratch_hbm
        self.size = size
        self.width = width
        self.spill = spill
        self.resident = resident
        self.split = False
        self.count = tiles_in(size, PARTITIONS)
        self.made_sb: Tiles = []
        self.back_sb: Tiles = []
        self.last_sb: Tiles = []

    def part(self, rows: Span, columns: Span) -> Hidden:
        """Itself: products choose among its columns."""
        return self

    def slot(self, k: int) -> NkiTensor:
        """Where tile k is to be written, [<=128, width]; tiles are first asked for in order."""
        if k // HIDDEN_TILES == len(self.made_sb):
            tiles = min(HIDDEN_TILES, self.count - k)
            rows = min(PARTITIONS, self.size - k * PARTITIONS)
            self.made_sb.append(nl.ndarray((rows, tiles * self.width), dtype=self.dtype))
        return self.view(self.made_sb[k // HIDDEN_TILES], k)

    def view(self, group_sb: NkiTensor, k: int) -> NkiTensor:
        """Tile k in its group."""
        rows = min(PARTITIONS, self.size - k * PARTITIONS)
        return group_sb[:rows, nl.ds(k % HIDDEN_TILES * self.width, self.width)]

    def place(self, group: int) -> NkiTensor:
        """A group's place in HBM."""
        columns = HIDDEN_TILES * self.width
        return self.scratch_hbm[0][:, nl.ds(self.first + group * columns, columns)]

    def store(self, k: int) -> None:
        """Tile k is complete: with the last one of a group that spills, store the group."""
        group = k // HIDDEN_TILES
        if group < self.spill and k % HIDDEN_TILES == HIDDEN_TILES - 1:
            nisa.dma_copy(self.place(group), self.made_sb[group], dge_mode=nisa.dge_mode.none)

    def tile(self, k: int) -> NkiTensor:
        """Tile k in SBUF, in order."""
        group = k // HIDDEN_TILES
        if group >= self.spill:
            return self.view(self.made_sb[group], k)
        if group < len(self.back_sb):
            return self.view(self.back_sb[group], k)
        if k % HIDDEN_TILES == 0:
            group_sb = nl.ndarray((PARTITIONS, HIDDEN_TILES * self.width), dtype=self.dtype)
            nisa.dma_copy(group_sb, self.place(group), dge_mode=nisa.dge_mode.none)
            self.last_sb = [group_sb]
        if k % HIDDEN_TILES == HIDDEN_TILES - 1 and group < self.resident:
            self.back_sb.append(self.last_sb[0])
        return self.view(self.last_sb[0], k)


def function_of(activation: str) -> object:
    """The activation function of this name."""
    if activation == "gelu":
        return nl.gelu
    if activation == "gelu_tanh":
        return nl.gelu_apprx_tanh
    if activation == "relu":
        return nl.relu
    assert activation == "silu", "activation must be silu, gelu, gelu_tanh or relu"
    return nl.silu


def activated(
    sums_psum: list[Tiles], activation: str, factors: list[Weight], first: int
) -> list[Tiles]:
    """act(sums) in fp32, of the hidden block's tiles from `first` on; its parts times their scales.

    The scales of v_up are multiplied here, where ScalarE has the time, and not with its sums.
    """
    acts_sb: list[Tiles] = []
    for i in range(len(sums_psum)):
        row_sb: Tiles = []
        for tile_psum in sums_psum[i]:
            act_sb = nl.ndarray(tile_psum.shape, dtype=nl.float32)
            if factors[0].scaled:
                scale_sb = factors[0].column_scale(first + i)
                nisa.activation(act_sb, function_of(activation), tile_psum, scale=scale_sb)
            else:
                nisa.activation(act_sb, function_of(activation), tile_psum)
            row_sb.append(act_sb)
        acts_sb.append(row_sb)
    if factors[1].scaled:  # when all are done: ScalarE would wait for a result of its own
        for i in range(len(acts_sb)):
            for act_sb in acts_sb[i]:
                nisa.activation(act_sb, nl.copy, act_sb, scale=factors[1].column_scale(first + i))
    return acts_sb
