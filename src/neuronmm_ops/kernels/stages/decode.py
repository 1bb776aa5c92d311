"""Stages of the decode kernels: tokens are stationary and every weight byte streams past them once.

A weight tile is the moving operand and x^T the stationary one, so that sums come out as tokens
[M, columns] and are transposed by TensorE where they are contracted next. Up to 64 tokens fill a
part of the PE columns only: two or four *column groups* then take different weight columns at the
same time, which keeps TensorE ahead of the DMA engines.
"""

from __future__ import annotations

from neuronmm_ops.kernels.front_end import is_none
from neuronmm_ops.kernels.shim import NkiTensor, nl
from neuronmm_ops.kernels.stages.chunks import Chunk
from neuronmm_ops.kernels.stages.decode_tiling import Loads
from neuronmm_ops.kernels.stages.sums import Product, Sums
from neuronmm_ops.kernels.stages.tiling import Span, core_columns, core_span, spans
from neuronmm_ops.kernels.stages.weights import DecodeWeight


def own(size: int, group: int = 0) -> Span:
    """This core's range of a dimension, as `core_span`."""
    return core_span(size, nl.program_id(0), nl.num_programs(0), group)


def own_columns(size: int, ahead: int = 0) -> Span:
    """This core's columns of an output, as `core_columns`."""
    return core_columns(size, nl.program_id(0), nl.num_programs(0), ahead)


def ahead(inner: int, group: int, each: int, rows: int) -> int:
    """Columns of `rows` that the first core is ahead by, with `each` weights an inner feature."""
    cores = nl.num_programs(0)
    first, second = core_span(inner, 0, cores, group), core_span(inner, 1, cores, group)
    return (first.size - second.size) * each // rows if cores > 1 else 0


def contract(
    chunks: list[Chunk],
    sums: list[Sums],
    loads: Loads,
    first: bool,
    last: bool,
    waited: bool = False,
) -> None:
    """Add all K chunks to all sums; each is transposed while the one before it is multiplied.

    `loads` cuts the weights: the `first` and the `last` of all, and those of the last chunk, if
    the next stage has `waited` for their weights of one byte only, into shorter ones.
    """
    if len(chunks) > 0:
        chunks[0].transpose()
    later: list[Product] = []
    for i in range(len(chunks)):
        if i + 1 < len(chunks):
            chunks[i + 1].transpose()
        ends = i + 1 == len(chunks)
        for s in sums:
            if ends:
                s.spread_rows()
            edges = first and i == 0, last and ends, waited and ends
            s.add_chunk(chunks[i], loads, edges[0], edges[1], edges[2], later)
    if len(later) > 0:
        later[len(later) - 1].run()


def project(
    chunks: list[Chunk],
    weights: list[DecodeWeight],
    rank_block: int,
    fuse: bool,
    loads: Loads,
    M: int,
) -> list[list[Chunk]]:
    """For each weight [K, r] the product of the K chunks and it, over both cores, as K chunks of r.

    `rank_block` columns of a weight are summed in a pass over the K chunks. `fuse`: there is one
    pass for all weights.
    """
    products: list[list[Chunk]] = []
    if fuse:
        sums: list[Sums] = []
        for w in weights:
            sums.append(Sums(w, Span(0, w.hbm.shape[1]), M))
        contract(chunks, sums, loads, True, False)
        tiles_sb = of_both_cores(sums)
        for i in range(len(sums)):
            products.append(sums[i].chunks(tiles_sb[i]))
        return products
    for w in weights:
        of_weight: list[Chunk] = []
        for columns in spans(0, w.hbm.shape[1], rank_block):
            s = Sums(w, columns, M)
            contract(again(chunks), [s], loads, True, False, True)
            of_weight.extend(s.chunks(of_both_cores([s])[0]))
        products.append(of_weight)
    return products


def again(chunks: list[Chunk]) -> list[Chunk]:
    """The same K chunks, not transposed."""
    fresh: list[Chunk] = []
    for chunk in chunks:
        fresh.append(chunk.again())
    return fresh


def of_both_cores(sums: list[Sums]) -> list[NkiTensor]:
    """The sums of both cores where two run, rounded unless they have yet to be scaled.

    All are sent before any is added: a queue starts one DMA after the other.
    """
    tiles_sb: list[NkiTensor] = []
    is_scaled = not is_none(sums[0].weight.scale)
    dtype = nl.float32 if is_scaled else sums[0].weight.dtype
    if nl.num_programs(0) == 1:
        for s in sums:
            tiles_sb.append(s.rounded(dtype))
        return tiles_sb
    for s in sums:
        s.send()
    for s in sums:
        tiles_sb.append(s.of_both_cores(dtype))
    return tiles_sb
