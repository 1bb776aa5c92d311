"""The output head: the greatest logit of each token and its id. Logits never leave the chip."""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, jit, nisa, nl
from neuronmm_ops.kernels.stages.chunks import chunks_of
from neuronmm_ops.kernels.stages.decode import contract, own_columns
from neuronmm_ops.kernels.stages.decode_tiling import (
    SEARCHED,
    GroupSpan,
    Loads,
    SumTiling,
    column_groups,
    lanes_of,
    output_blocks,
)
from neuronmm_ops.kernels.stages.facts import facts
from neuronmm_ops.kernels.stages.sums import Sums
from neuronmm_ops.kernels.stages.tiling import OUTPUT_UNIT, PARTITIONS, Span, check_pair
from neuronmm_ops.kernels.stages.weights import DecodeWeight, rows_of

LOWEST = -3.4028234663852886e38
"""Of fp32: below every finite logit."""
NO_ID = 2.0**23
"""Above every id; sums of the two are exact in fp32."""
VALUE = 0
ID = 1
CHECK = 2


class Greatest(nl.NKIObject):
    """The greatest logits of the sums seen so far.

    A part of the sums leaves a column: its greatest value, the id of that, and the sum of its
    logits times zero, which is not a number if one of them is not finite.

    Args:
        M: tokens.
        parts: how many there will be.
    """

    def __init__(self, M: int, parts: int) -> None:
        self.tokens = M
        self.groups = column_groups(M, facts().pe_tile)
        self.parts = max(1, parts)
        self.seen = 0
        self.best_sb = nl.ndarray((PARTITIONS, self.parts, SEARCHED), dtype=nl.float32)
        self.ids_sb = nl.ndarray((PARTITIONS, self.parts), dtype=nl.float32)
        self.checks_sb = nl.ndarray((PARTITIONS, self.parts), dtype=nl.float32)
        # not all column groups have a part of each block
        nisa.memset(self.best_sb, LOWEST, engine=nisa.gpsimd_engine)
        nisa.memset(self.ids_sb, NO_ID, engine=nisa.gpsimd_engine)
        nisa.memset(self.checks_sb, 0.0, engine=nisa.gpsimd_engine)
        # the first id of each column group of a block, for each width of a group
        self.widths: list[int] = []
        self.starts_sb: list[NkiTensor] = []

    def starts(self, width: int) -> NkiTensor:
        """Columns before each column group of `width` columns, [128, 1]."""
        for i in range(len(self.widths)):
            if self.widths[i] == width:
                return self.starts_sb[i]
        tile_sb = nl.ndarray((PARTITIONS, 1), dtype=nl.float32)
        rows = PARTITIONS // self.groups
        for g in range(self.groups):
            nisa.memset(tile_sb[g * rows : (g + 1) * rows, :], float(g * width))
        self.widths.append(width)
        self.starts_sb.append(tile_sb)
        return tile_sb

    def see(self, sums: Sums, part: GroupSpan, number: int) -> None:
        """Find the greatest of a part of the sums."""
        first, lanes, n = part.group * sums.tiling.group_partitions, sums.lanes_in(part), self.seen
        self.seen += 1
        own_lanes = nl.ds(first, lanes)
        logits = sums.psum(part, lanes)
        if not is_none(sums.weight.scale) or part.size < SEARCHED:
            shape = (first + lanes, max(part.size, SEARCHED))
            logits = nl.ndarray(shape, dtype=nl.float32)[own_lanes, :]
            if part.size < SEARCHED:
                nisa.memset(logits, LOWEST)
            sums.evict(logits[:, 0 : part.size], part, number)
        best_sb = self.best_sb[own_lanes, n, :]
        nisa.max8(best_sb, logits)
        # ScalarE has the time
        zeros_sb = nl.ndarray((first + lanes, logits.shape[1]), dtype=nl.bfloat16)
        nisa.activation(
            zeros_sb[own_lanes, :],
            nl.copy,
            logits,
            scale=0.0,
            reduce_op=nl.add,
            reduce_res=self.checks_sb[own_lanes, nl.ds(n, 1)],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        places_sb = nl.ndarray((first + lanes, SEARCHED), dtype=nl.uint32)[own_lanes, :]
        nisa.nc_find_index8(places_sb, logits, best_sb)
        nisa.scalar_tensor_tensor(
            self.ids_sb[own_lanes, nl.ds(n, 1)],
            places_sb[:, 0:1],
            nl.add,
            float(sums.columns.start + part.start),
            nl.add,
            self.starts(sums.tiling.width)[own_lanes, :],
        )

    def result(self) -> NkiTensor:
        """Of each token the greatest value, its id and its check, [M, 3], of both cores."""
        M, G, rows = self.tokens, self.groups, PARTITIONS // self.groups
        found_sb = nl.ndarray((M, 3, G, self.parts), dtype=nl.float32)
        for g in range(G):  # to the same partitions, by three engines
            lanes = nl.ds(g * rows, M)
            nisa.tensor_copy(found_sb[:, VALUE, g, :], self.best_sb[lanes, :, 0])
            nisa.activation(found_sb[:, ID, g, :], nl.copy, self.ids_sb[lanes, :])
            nisa.tensor_copy(
                found_sb[:, CHECK, g, :], self.checks_sb[lanes, :], engine=nisa.gpsimd_engine
            )
        result_sb = merged(found_sb.reshape((M, 3, G * self.parts)))
        if nl.num_programs(0) == 1:
            return result_sb
        other = 1 - nl.program_id(0)
        received_sb = nl.ndarray((M, 3), dtype=nl.float32)
        nisa.sendrecv(result_sb, received_sb, other, other, 0)
        both_sb = nl.ndarray((M, 3, 2), dtype=nl.float32)
        nisa.activation(both_sb[:, :, 0], nl.copy, result_sb)
        nisa.tensor_copy(both_sb[:, :, 1], received_sb)
        return merged(both_sb)


def merged(found_sb: NkiTensor) -> NkiTensor:
    """Of values, ids and checks [M, 3, n] the greatest, its lowest id and the sum, [M, 3]."""
    M, _, n = found_sb.shape
    result_sb = nl.ndarray((M, 3), dtype=nl.float32)
    top_sb = result_sb[:, nl.ds(VALUE, 1)]
    nisa.tensor_reduce(top_sb, nl.maximum, found_sb[:, VALUE, :], 1)
    ids_sb = nl.ndarray((M, n), dtype=nl.float32)
    nisa.tensor_scalar(ids_sb, found_sb[:, VALUE, :], nl.not_equal, top_sb)
    nisa.scalar_tensor_tensor(ids_sb, ids_sb, nl.multiply, NO_ID, nl.add, found_sb[:, ID, :])
    nisa.tensor_reduce(result_sb[:, nl.ds(ID, 1)], nl.minimum, ids_sb, 1)
    nisa.tensor_reduce(result_sb[:, nl.ds(CHECK, 1)], nl.add, found_sb[:, CHECK, :], 1)
    return result_sb


@jit
def lm_head_decode(
    x: NkiTensor,
    w: NkiTensor,
    w_scale: NkiTensor | None = None,
    k_chunk: int = 1024,
    block: int = 2048,
    last_block: int = 2048,
    tile_bytes: int = 16384,
    dma_cast: int = 0,
) -> tuple[NkiTensor, NkiTensor]:
    """ids = argmax(x @ w), greatest = max(x @ w) for up to 128 tokens; w is loaded once.

    Dimensions:
        M: tokens, 1 to 128. H: features. V: ids, below 2^23. Any of at least 1.

    Args:
        x: [M, H].
        w: [H, V], dtype of x, or float8_e4m3fn of values up to 240, or int8.
        w_scale: [V], float32, a factor of each column of a w in one byte, else None.
        k_chunk: columns of x that are transposed together.
        block: columns of w whose sums are in PSUM together.
        last_block: columns of the last block.
        tile_bytes: bytes a partition of a weight tile, more where one row is longer.
        dma_cast: of weights that are cast, the DMA casts every n-th K tile, from the first on, and
            engines the others; 0: engines cast all.

    Returns:
        ids [M], int32, and greatest [M], float32, in shared HBM. Logits are compared in fp32, as
        they are summed; of equal ones the lowest id is taken. Where a logit of a token is not
        finite its greatest is not a number, and its id -1.

    Notes:
        VectorE searches the sums in PSUM while TensorE works on the next block. Two cores share V
        and exchange what they found.

    Pseudocode:
        for each block of columns:
            psum[M, block] = x . w[:, block]
            for each bank of it:
                value, id = max(psum), argmax(psum)
                check = sum(psum * 0)
        greatest, ids = the greatest value + sum of checks, the lowest id with that value
    """
    M, H = x.shape
    V = w.shape[1]
    assert M <= PARTITIONS, f"at most {PARTITIONS} tokens, got {M}; a prompt needs its last alone"
    check_pair(H, rows_of(w), V, 0)
    assert V < NO_ID, f"ids must be below 2^23, got {V} columns; split w"
    ids_hbm = nl.ndarray((M,), dtype=nl.int32, buffer=nl.shared_hbm)
    greatest_hbm = nl.ndarray((M,), dtype=nl.float32, buffer=nl.shared_hbm)
    weight = DecodeWeight(w, x.dtype, w_scale, dma_cast)
    lanes = lanes_of(M, facts().pe_tile)
    chunks = chunks_of(x, Span(0, H), 0, k_chunk, x.dtype, None, lanes, weight.group)
    blocks = output_blocks(own_columns(V), block, last_block)
    parts = 0
    for columns in blocks:
        tiling = SumTiling(columns.size, M, facts().pe_tile, OUTPUT_UNIT, 1)
        parts += len(tiling.stacked_evictions())
    greatest = Greatest(M, parts)
    for i in range(len(blocks)):
        first, last = i == 0, i + 1 == len(blocks)
        sums = Sums(weight, blocks[i], M, OUTPUT_UNIT, last, stacked=True)
        if not is_none(weight.scale):
            sums.load_rows(None)
        contract(chunks, [sums], Loads(tile_bytes), first, last)
        for n in range(len(sums.parts)):
            greatest.see(sums, sums.parts[n], n)
    result_sb = greatest.result()
    if nl.program_id(0) == 0:
        write(ids_hbm, greatest_hbm, result_sb)
    return ids_hbm, greatest_hbm


def write(ids_hbm: NkiTensor, greatest_hbm: NkiTensor, result_sb: NkiTensor) -> None:
    """Store ids [M] and greatest [M] of values, ids and checks [M, 3]."""
    M = result_sb.shape[0]
    top_sb = nl.ndarray((M, 1), dtype=nl.float32)
    value_sb, check_sb = result_sb[:, nl.ds(VALUE, 1)], result_sb[:, nl.ds(CHECK, 1)]
    nisa.tensor_tensor(top_sb, value_sb, check_sb, nl.add)
    nisa.dma_copy(greatest_hbm.reshape((M, 1)), top_sb, dge_mode=nisa.dge_mode.none)
    number_sb = nl.ndarray((M, 1), dtype=nl.float32)
    nisa.tensor_tensor(number_sb, top_sb, top_sb, nl.equal)
    ids_sb = nl.ndarray((M, 1), dtype=nl.float32)
    nisa.scalar_tensor_tensor(
        ids_sb, result_sb[:, nl.ds(ID, 1)], nl.add, 1.0, nl.multiply, number_sb
    )
    whole_sb = nl.ndarray((M, 1), dtype=nl.int32)
    nisa.tensor_scalar(whole_sb, ids_sb, nl.add, -1.0)
    nisa.dma_copy(ids_hbm.reshape((M, 1)), whole_sb, dge_mode=nisa.dge_mode.none)
