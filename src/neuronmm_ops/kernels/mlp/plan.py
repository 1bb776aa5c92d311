"""Plans of `mlp` in both phases. All times modelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from neuronmm_ops.hardware import DEFAULT_TARGET, DMA_DONE_NS, Engine
from neuronmm_ops.kernels.planned import PlannedKernel, TensorShape
from neuronmm_ops.kernels.planner import decode_search, prefill_search
from neuronmm_ops.kernels.planner.decode import Blocks, Stages
from neuronmm_ops.kernels.planner.decode_costs import Chunk, Source
from neuronmm_ops.kernels.planner.decode_search import rounded_up
from neuronmm_ops.kernels.planner.hidden import TOKENS, HiddenBlock, gated_steps
from neuronmm_ops.kernels.planner.instructions import evict_ns, result_ns
from neuronmm_ops.kernels.planner.launches import planned_kernels
from neuronmm_ops.kernels.planner.prefill import Moving, write_steps
from neuronmm_ops.kernels.planner.prefill_search import AHEAD_BYTES, Arguments
from neuronmm_ops.kernels.planner.problem import Matrices, Plan, Problem
from neuronmm_ops.kernels.planner.search import quickest
from neuronmm_ops.kernels.planner.timeline import Program, sbuf_peak
from neuronmm_ops.kernels.stages.tiling import (
    BANK_COLUMNS,
    OUTPUT_UNIT,
    PARTITIONS,
    SUM_BANKS,
    tiles_in,
)
from neuronmm_ops.kernels.svd_mlp.plan import TABLE_INSTRUCTIONS, decode_hidden

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
INNER_BLOCKS = (256, 512, 1024, 2048)
OUT_BLOCKS = (512, 1024, 2048)
TOKEN_TILES = (2, 4)
IN_HBM: Source = "hbm"
TRANSPOSED: Source = "transposed"


def mlp_weights(K: int, inner: int, N: int, up: int = 0) -> Matrices:
    """Shapes of the weights of gate, up and down, in mlp's order; `up` of an x_up [M, up]."""
    return ((K, inner), (up or K, inner), (inner, N))


# --- decode


def decode(problem: Problem) -> list[Plan]:
    """The best plans of the decode kernel that fit, the fastest first."""
    costs = decode_search.DecodeCosts(problem)
    width = rounded_up(costs.own(problem.inner), PARTITIONS)
    bank = BANK_COLUMNS * costs.groups
    inners = sorted({min(count * bank, width) for count in range(1, SUM_BANKS + 1)})
    spills = (True, False) if problem.lnc == 1 else (True,)
    hidden: list[Blocks] = [
        {"inner_block": inner, "spill": spill} for inner in inners for spill in spills
    ]
    return decode_search.best_plans(costs, decode_stages, hidden[0], [hidden])


def decode_stages(s: Stages) -> None:
    """The stages of the decode kernel."""
    spill = bool(s.blocks["spill"])
    s.instructions += TABLE_INSTRUCTIONS + (s.problem.lnc == 2)  # and a barrier
    chunks = s.chunks(s.problem.K)
    up_chunks, up_source = chunks, TRANSPOSED
    held = s.transposed(chunks) + 2 * max(chunks).size * s.problem.itemsize
    if s.problem.inputs == 2:
        up_chunks, up_source = s.chunks(s.problem.K_up), IN_HBM
        held += s.transposed(up_chunks) + 2 * max(up_chunks).size * s.problem.itemsize
    s.hold(held)
    h_chunks, h_bytes = decode_hidden(s, [chunks, up_chunks], (IN_HBM, up_source), spill)
    s.hold(-held)
    source: Source = "sums"
    if s.problem.lnc == 2:
        h_chunks = [*h_chunks, *_of_other_core(s, h_chunks)]
    elif spill:
        h_chunks, source = s.chunks(s.problem.inner), "stored"
        s.timeline.reload(s.costs.load_x(h_chunks[:1], source))
    s.hold(s.transposed(h_chunks) + s.buffers(h_chunks, source))
    s.write(h_chunks, source, resident=True)
    s.hold(-h_bytes)


def _of_other_core(s: Stages, mine: list[Chunk]) -> list[Chunk]:
    """The K chunks that the other core has made; they come while `mine` are multiplied."""
    costs, machine = s.costs, s.costs.machine
    other = s.problem.inner - s.own(s.problem.inner)
    chunks = s.chunks(other)
    if chunks:
        met = DMA_DONE_NS + evict_ns(machine, Engine.GPSIMD, 1) + result_ns(machine, Engine.GPSIMD)
        tiles = sum([tiles_in(chunk.size, PARTITIONS) for chunk in mine])
        first = min(s.own(s.problem.N), int(s.blocks["block"]))
        meanwhile = tiles * costs.sums(first, s.problem.N, OUTPUT_UNIT).ns if first else 0.0
        s.timeline.reload(met + costs.load_x(chunks, "stored"), meanwhile)
    s.hbm_bytes += s.problem.M * other * s.costs.sums_itemsize
    s.instructions += len(chunks)
    s.hold(other * s.costs.sums_itemsize)
    return chunks


# --- prefill


class Mlp(NamedTuple):
    """Arguments of the prefill kernel."""

    token_block: int
    tokens: int
    resident: int
    spill: int
    resident_spilled: int
    inner_block: int
    block: int
    token_tiles: int
    banks: int


class Prefill(prefill_search.Prefill):
    """The prefill kernel: two stages for each block of tokens."""

    names = Mlp._fields
    setup_instructions = TABLE_INSTRUCTIONS
    widths = (512, 1024)

    def __init__(self, problem: Problem, layout: str) -> None:
        super().__init__(problem, layout)
        self.hidden = HiddenBlock(self.costs)
        self.x_tiles = tiles_in(max(problem.K, problem.K_up), PARTITIONS)
        self.gated, self.out = cache(self._gated), cache(self._out)

    def stages(self, width: int, arguments: Arguments) -> list[Program]:
        """The kernel for a block of `width` tokens."""
        a = Mlp(*arguments)
        return [
            self.gated(width, a.inner_block, a.resident, a.spill),
            self.out(width, a.block, a.token_tiles, a.spill, a.resident_spilled),
        ]

    def _gated(self, width: int, block: int, resident: int, spill: int) -> Program:
        """The hidden block."""
        p, queues = self.problem, ("x", "x_up")[: self.problem.inputs]
        xs = [Moving(self.costs.tokens(resident, queue)) for queue in queues]
        return gated_steps(self.hidden, width, (p.K, p.K_up), xs, block, spill)

    def _out(self, width: int, block: int, token_tiles: int, spill: int, again: int) -> Program:
        """The product with w_down."""
        p, x = self.problem, self.hidden.moving(width, spill, again)
        return write_steps(
            self.costs, width, p.inner, p.N, x, "v2", block, token_tiles, self.costs.banks
        )

    def choices(self, token_block: int, width: int) -> Iterator[Mlp]:
        """All of x in SBUF, as little as possible of the hidden block in HBM."""
        p, banks = self.problem, self.costs.banks
        outs = [
            (block, token_tiles)
            for block in sorted({min(block, p.N) for block in OUT_BLOCKS})
            for token_tiles in TOKEN_TILES
            if token_tiles == TOKEN_TILES[0] or TOKEN_TILES[0] * PARTITIONS < width
        ]
        for inner_block in sorted({min(block, p.inner) for block in INNER_BLOCKS}):
            for block, token_tiles in outs:
                for spill, again in self._spilled(width, inner_block, block, token_tiles):
                    yield Mlp(
                        *(token_block, TOKENS, self.x_tiles, spill, again),
                        *(inner_block, block, token_tiles, banks),
                    )

    def _spilled(
        self, width: int, inner_block: int, block: int, token_tiles: int
    ) -> Iterator[tuple[int, int]]:
        """Groups of the hidden block that spill, as few as fit, and those that stay after."""

        def peaks(spill: int) -> tuple[int, int]:
            made = self.hidden.made(width, spill)
            gated = sbuf_peak([self.gated(width, inner_block, self.x_tiles, spill)])
            return gated, sbuf_peak([self.out(width, block, token_tiles, spill, 0)], made)

        if max(peaks(0)) <= self.room:
            yield 0, 0
        else:
            yield from self.hidden.spilled(width, self.room - AHEAD_BYTES, peaks)


def plan_mlp(
    M: int,
    H: int,
    I: int,  # noqa: E741 - the shape letter
    *,
    up: int = 0,
    N: int = 0,
    dtype: str = "bfloat16",
    weight_dtype: str = "",
    activation: str = "silu",
    target: str = DEFAULT_TARGET,
    lnc: int = 1,
) -> list[PlannedKernel]:
    """The launches of the quickest gated MLP of x [M, H]: (act(x Wg [H, I]) * (x_up Wu)) Wd.

    Args:
        M: tokens.
        H: features of x.
        I: features between.
        up: features of an x_up [M, up] that up contracts; 0: it contracts x, too.
        N: features of the output; 0: those of x.
        dtype: bfloat16, float16 or float32.
        weight_dtype: float8_e4m3fn or int8, with an fp32 scale a column; empty for `dtype`.
        activation: silu, gelu, gelu_tanh or relu.
        target: trn1, trn2, trn3 or an alias of theirs.
        lnc: NeuronCores that share the launch: 1, or 2 on trn2 and trn3.

    Raises:
        ValueError: sizes or names that are none, or weights that no plan fits.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    problem = Problem(
        *("mlp", M, mlp_weights(H, I, N or H, up), dtype, target, lnc),
        weight_dtype=weight_dtype,
        inputs=2 if up else 1,
    )
    weights = [TensorShape(shape, weight_dtype or dtype) for shape in problem.matrices]
    scales = [TensorShape((columns,), "float32") for _, columns in problem.matrices]

    def operands(tokens: int) -> list[TensorShape | None]:
        x_up = TensorShape((tokens, up), dtype) if up else None
        given = [TensorShape((tokens, H), dtype), *weights]
        if weight_dtype:
            return [*given, x_up, *scales]
        return [*given, x_up] if up else [*given]

    found = planned_kernels(quickest(problem), operands)
    return [
        replace(launch, arguments={**launch.arguments, "activation": activation})
        for launch in found
    ]
