"""The plan of `rms_norm`: over how many partitions a token is spread. All times modelled."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from neuronmm_ops.hardware import (
    DEFAULT_TARGET,
    DMA_DONE_NS,
    DMA_MODELS,
    DMA_START_NS,
    MIN_CYCLES,
    Engine,
    Machine,
)
from neuronmm_ops.kernels.planned import PlannedKernel, TensorShape
from neuronmm_ops.kernels.planner.instructions import evict_ns, load_ns, matmul_ns, result_ns
from neuronmm_ops.kernels.planner.problem import Problem
from neuronmm_ops.kernels.planner.regret import of_least_regret
from neuronmm_ops.kernels.rms_norm.kernel import rms_norm
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, core_span, sizes

TILES = 2
"""Tiles that fit in SBUF at once, at least: one is loaded while another is worked on."""
MASK_BYTES = 4 * PARTITIONS
PORT = (Engine.VECTOR, Engine.GPSIMD)
"""They exclude each other on SBUF where ports are shared."""
MOST_PARTS = 16
"""Over how many times as many partitions as it must a token is spread where not all fit at once."""
GAPS = 16
"""Pauses of the DMA engines that are remembered."""


class _Core:
    """Time of one core's resources while tiles of tokens pass."""

    def __init__(self, machine: Machine, item: int, width: int, partitions: int) -> None:
        self.machine = machine
        self.move_ns = load_ns(machine, partitions, width * item)
        self.free = dict.fromkeys(Engine, 0.0)
        self.queues: dict[str, float] = {}
        # when the DMA engines have time: between transfers, then from `free` on
        self.gaps: list[tuple[float, float]] = []

    def run(self, engine: Engine, ready: float, ns: float) -> float:
        """An instruction; returns when others see its result."""
        if self.machine.shared_ports and engine in PORT:
            ready = max([ready, *[self.free[other] for other in PORT]])
        self.free[engine] = max(self.free[engine], ready) + ns
        return self.free[engine] + result_ns(self.machine, engine)

    def move(self, queue: str, ready: float) -> float:
        """A tile from or to HBM, on the tensor's queue; returns when it is there."""
        begin = max(ready, self.queues.get(queue, 0.0))
        self.queues[queue] = begin + self.machine.dma.interval_ns
        begin += DMA_START_NS
        left, gaps = self.move_ns, list[tuple[float, float]]()
        for low, high in self.gaps:
            used = max(0.0, min(left, high - max(low, begin)))
            if not used:
                gaps.append((low, high))
                continue
            left, start = left - used, max(low, begin)
            gaps += [gap for gap in ((low, start), (start + used, high)) if gap[0] < gap[1]]
            begin = start + used
        if left:
            free = self.free[Engine.DMA]
            if begin > free:
                gaps.append((free, begin))
            begin = max(free, begin) + left
            self.free[Engine.DMA] = begin
        self.gaps = gaps[-GAPS:]
        return begin


def _core_ns(problem: Problem, parts: int, residual: bool, tokens: int) -> float:
    """Time of a core's tokens: the kernel's instructions, tile by tile."""
    machine, item, width = problem.machine, problem.itemsize, problem.K // parts
    step = min(tokens, PARTITIONS // parts)
    core = _Core(machine, item, width, step * parts)
    add, multiply = [_two_inputs_ns(machine, e, problem.dtype, width) for e in (
        Engine.GPSIMD, Engine.VECTOR,
    )]  # fmt: skip
    narrow = item == 2 and machine.generation > 2
    square = machine.ns(Engine.SCALAR, max(MIN_CYCLES, width) + MIN_CYCLES)
    scale_on = Engine.VECTOR if narrow else Engine.SCALAR
    scale = evict_ns(machine, scale_on, width / 4 if narrow else width)
    small = evict_ns(machine, Engine.VECTOR, 1)
    depth = max(1, _room(problem, parts) // _tile_bytes(problem, parts, residual))
    done: list[float] = []
    weight = 0.0
    for n in range(len(sizes(tokens, step))):
        ready = done[n - depth] if n >= depth else 0.0
        there = core.move("x", ready) + DMA_DONE_NS
        if residual:
            there = max(there, core.move("residual", ready) + DMA_DONE_NS)
            there = core.run(Engine.GPSIMD, there, add)
            core.move("sum", there)
        weight = weight or core.move("weight", 0.0) + DMA_DONE_NS
        there = core.run(Engine.SCALAR, there, square)
        if parts > 1:
            there = core.run(Engine.TENSOR, there, matmul_ns(machine, PARTITIONS, 1, 4))
        there = core.run(Engine.VECTOR, there, small)
        there = core.run(scale_on, there, scale)
        there = core.run(Engine.VECTOR, max(there, weight), multiply)
        done.append(core.move("out", there))
    return max(done)


def _two_inputs_ns(machine: Machine, engine: Engine, dtype: str, width: int) -> float:
    """`tensor_tensor` in SBUF: a cycle an element of bfloat16, from trn2 on of float16, else two.

    Source: as the simulator's (SDK 2.26, `nki.isa`).
    """
    once = dtype == "bfloat16" or (dtype == "float16" and machine.fast_modes)
    return machine.ns(engine, max(MIN_CYCLES, width * (1 if once else 2)))


def _tile_bytes(problem: Problem, parts: int, residual: bool) -> int:
    """SBUF per partition of a tile of tokens."""
    return (2 + residual) * problem.itemsize * problem.K // parts


def _room(problem: Problem, parts: int) -> int:
    """SBUF per partition beside the weight."""
    held = problem.itemsize * problem.K // parts + MASK_BYTES
    return problem.machine.usable_sbuf_bytes - held


@lru_cache(maxsize=1024)
def _chosen(problem: Problem, residual: bool) -> tuple[int, tuple[float, ...]]:
    """The partitions of a token that cost least regret, and the times under each DMA model."""
    H = problem.K
    fitting = [
        parts
        for parts in range(1, min(H, PARTITIONS) + 1)
        if H % parts == 0 and _room(problem, parts) >= TILES * _tile_bytes(problem, parts, residual)
    ]
    if not fitting:
        raise ValueError(
            f"rms_norm spreads a token over a divisor of H, and none of at most {PARTITIONS} "
            f"makes {H} {problem.dtype} features fit SBUF on {problem.target}; pad H"
        )
    tokens = problem.core_tokens[0]
    if tokens * fitting[0] > PARTITIONS:  # each tile has a pause of its own
        fitting = [p for p in fitting if p <= MOST_PARTS * fitting[0]]
    models = [replace(problem, dma_model=model) for model in DMA_MODELS]
    times = {
        parts: tuple([_core_ns(each, parts, residual, tokens) / 1e6 for each in models])
        for parts in fitting
    }
    parts = of_least_regret(times)
    return parts, times[parts]


def plan_rms_norm(
    M: int,
    H: int,
    *,
    residual: bool,
    dtype: str = "bfloat16",
    target: str = DEFAULT_TARGET,
    lnc: int = 1,
) -> PlannedKernel:
    """The quickest `rms_norm` of x [M, H], with or without a residual that is added before.

    Args:
        M: tokens.
        H: features.
        residual: whether there is one.
        dtype: bfloat16, float16 or float32.
        target: trn1, trn2, trn3 or an alias of theirs.
        lnc: NeuronCores that share the launch: 1, or 2 on trn2 and trn3.

    Raises:
        ValueError: sizes or names that are none, or tokens that do not fit SBUF.
    """
    problem = Problem("rms_norm", M, ((H, 1),), dtype, target, lnc)
    parts, times_ms = _chosen(problem, residual)
    weights = sum([
        min(core_span(M, core, lnc).size, PARTITIONS // parts) for core in range(lnc)
    ])  # fmt: skip
    x, weight = TensorShape((M, H), dtype), TensorShape((H,), dtype)
    return PlannedKernel(
        "rms_norm",
        rms_norm if lnc == 1 else rms_norm[lnc],
        (x, x if residual else None, weight),
        {"parts": parts},
        times_ms,
        problem.itemsize * H * ((4 if residual else 2) * M + weights),
    )
