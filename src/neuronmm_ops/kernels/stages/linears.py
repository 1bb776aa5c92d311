"""Decode phase of Linears that read the same activations: pairs of factors, or dense."""

from __future__ import annotations

from typing import Any

from neuronmm_ops.kernels.shim import NkiTensor, nl
from neuronmm_ops.kernels.stages.chunks import Chunk
from neuronmm_ops.kernels.stages.decode import again, project
from neuronmm_ops.kernels.stages.decode_tiling import Loads, output_blocks
from neuronmm_ops.kernels.stages.outputs import OutputBlock, write_blocks, write_turned
from neuronmm_ops.kernels.stages.stationary import Turned, project_turned, turned
from neuronmm_ops.kernels.stages.weights import DecodeWeight


class LinearKnobs(nl.NKIObject):
    """How Linears are multiplied, by knobs of the kernels of ops; `opens` and `ends` as `Loads`."""

    def __init__(
        self,
        rank_block: int,
        fuse: bool,
        block: int,
        last_block: int,
        tile_bytes: int,
        stationary: bool,
        opens: bool = True,
        ends: bool = True,
    ) -> None:
        self.rank_block = rank_block
        self.fuse = fuse
        self.block = block
        self.last_block = last_block
        self.loads = Loads(tile_bytes, opens, ends)
        self.stationary = stationary


class MlpKnobs(nl.NKIObject):
    """How a gated MLP is multiplied.

    Args:
        linear: of its products.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        inner_block: columns of gate and of up whose sums are in PSUM together.
        k_chunk: columns of act(gate) * up that are transposed together where it comes from HBM.
        spill: it goes there.
        balance: of two cores, each loads as many weights, not as many columns of the last one.
    """

    def __init__(
        self,
        linear: LinearKnobs,
        activation: str,
        inner_block: int,
        k_chunk: int,
        spill: bool,
        balance: bool,
    ) -> None:
        self.linear = linear
        self.activation = activation
        self.inner_block = inner_block
        self.k_chunk = k_chunk
        self.spill = spill
        self.balance = balance


def write_pairs(
    outs: list[Any],
    chunks: list[Chunk],
    us: list[DecodeWeight],
    vs: list[DecodeWeight],
    biases: list[NkiTensor | None],
    knobs: LinearKnobs,
) -> None:
    """outs[n] = (x . us[n]) . vs[n] + biases[n]; both cores have a part of x, then of the columns.

    Args:
        outs: [M, N] of each pair, with the methods of `outputs.ToHbm`.
        chunks: this core's part of x.
        us: [K, r] of each pair.
        vs: [r, N].
        biases: [N] or None.
        knobs: of all pairs.
    """
    M, count = outs[0].tokens, len(vs)
    loads = knobs.loads
    if knobs.stationary:
        turned_low = project_turned(turned(chunks), us, knobs.rank_block, loads, M)
        for n in range(count):
            ends = n + 1 == count
            blocks = output_blocks(outs[n].columns(), knobs.block, knobs.last_block if ends else 0)
            first, bias = n == 0, biases[n]
            write_turned(outs[n], turned_low[n], vs[n], bias, blocks, loads, first, ends)
        return
    low = project(chunks, us, knobs.rank_block, knobs.fuse, loads, M)
    of_all: list[OutputBlock] = []
    for n in range(count):
        ends = n + 1 == count
        blocks = output_blocks(outs[n].columns(), knobs.block, knobs.last_block if ends else 0)
        for j in range(len(blocks)):
            first, last = n + j == 0, ends and j + 1 == len(blocks)
            block = OutputBlock(outs[n], low[n], vs[n], biases[n], blocks[j], first, last)
            of_all.append(block)
    write_blocks(of_all, loads)


def write_dense(
    outs: list[Any],
    sides: list[list[Chunk]],
    weights: list[DecodeWeight],
    biases: list[NkiTensor | None],
    knobs: LinearKnobs,
    resident: bool = True,
) -> None:
    """outs[n] = sides[n] . weights[n] + biases[n]; both cores have all of x, and share columns.

    Args:
        outs: [M, N] of each weight, as `write_pairs`.
        sides: chunks of each weight's x, or of the one that all of them have.
        weights: [K, N].
        biases: [N] or None.
        knobs: of all weights.
        resident: x^T stays in SBUF; else x is loaded and transposed again for each block.
    """
    sides_turned: list[list[Turned]] = []
    if knobs.stationary:
        for chunks in sides:
            sides_turned.append(turned(chunks))
    of_all: list[OutputBlock] = []
    for n in range(len(weights)):
        w, out, bias = weights[n], outs[n], biases[n]
        ends, side = n + 1 == len(weights), min(n, len(sides) - 1)
        blocks = output_blocks(out.columns(), knobs.block, knobs.last_block if ends else 0)
        if knobs.stationary:
            write_turned(out, sides_turned[side], w, bias, blocks, knobs.loads, n == 0, ends)
            continue
        for j in range(len(blocks)):
            first, last = n + j == 0, ends and j + 1 == len(blocks)
            x_chunks = sides[side] if resident else again(sides[side])
            of_all.append(OutputBlock(out, x_chunks, w, bias, blocks[j], first, last))
    write_blocks(of_all, knobs.loads)
