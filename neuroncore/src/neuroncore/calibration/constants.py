"""What is fitted: constants of a clock, in the order in which each needs no later one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from neuroncore.calibration.solve import Move, Values
from neuroncore.core import KernelRun
from neuroncore.hardware import (
    DMA_DONE_NS,
    DMA_START_NS,
    HWDGE_NS,
    MIN_CYCLES,
    TABLE_LOAD_NS,
    Engine,
    Machine,
)
from neuroncore.timing.trace import InstructionTemplate, on_grid

PSUM_RESULT = "psum_result_ns"


@dataclass(frozen=True)
class Clock:
    """What times follow from: a machine, and by name the latencies that are no field of it."""

    machine: Machine
    waits: Mapping[str, float] = field(default_factory=dict[str, float])

    def wait_ns(self, name: str) -> float:
        """One of the latencies: that of the schedule, unless it was fitted."""
        return self.waits[name] if name in self.waits else _WAITS[name](self)

    def beyond_ns(self, waits: Mapping[str, int]) -> float:
        """What so many of each cost beyond what the schedule has for them."""
        scheduled = Clock(self.machine)
        return sum([n * (self.wait_ns(w) - scheduled.wait_ns(w)) for w, n in waits.items()])

    def retimed(self, launch: KernelRun) -> KernelRun:
        """A traced launch with the result latencies of this clock."""

        def of(template: InstructionTemplate) -> InstructionTemplate:
            if template.engine > Engine.GPSIMD:
                return template
            return replace(template, result_ns=on_grid(self._result_ns(template)))

        return launch.with_templates(of)

    def _result_ns(self, template: InstructionTemplate) -> float:
        engine, own = template.engine, self.machine.result_ns[template.engine]
        if not template.on_psum or engine not in (Engine.VECTOR, Engine.SCALAR):
            return own
        clocks = self.machine.clocks_ghz
        cycles = self.wait_ns(PSUM_RESULT) * clocks[Engine.VECTOR]
        return max(own, cycles / clocks[engine])


def _exchange_ns(clock: Clock) -> float:  # cores meet while the bytes arrive
    late = max(clock.wait_ns("dma_done_ns"), clock.machine.meeting_ns)
    return clock.wait_ns("dma_start_ns") + late


def _barrier_ns(clock: Clock) -> float:
    return clock.machine.ns(Engine.GPSIMD, MIN_CYCLES) + clock.machine.meeting_ns


_WAITS: Mapping[str, Callable[[Clock], float]] = {
    "dma_start_ns": lambda clock: DMA_START_NS,
    "dma_done_ns": lambda clock: DMA_DONE_NS,
    "descriptors_ns": lambda clock: HWDGE_NS,
    PSUM_RESULT: lambda clock: clock.machine.result_of(Engine.VECTOR, True),
    "table_load_ns": lambda clock: TABLE_LOAD_NS,
    "exchange_ns": _exchange_ns,
    "barrier_ns": _barrier_ns,
}


@dataclass(frozen=True)
class Constant:
    """A number of a clock that is fitted.

    Attributes:
        name: with its unit.
        meaning: for people.
        get: its value in a clock.
        put: the clock with another.
        least, most: bounds, in `scale`s.
        scale: None for the value it is fitted from.
        of: whether a machine has it.
    """

    name: str
    meaning: str
    get: Callable[[Clock], float]
    put: Callable[[Clock, float], Clock]
    least: float = 0.2
    most: float = 5.0
    scale: float | None = None
    of: Callable[[Machine], bool] = lambda machine: True


@dataclass(frozen=True)
class Step:
    """What the cases of one `Case.decides` settle.

    Attributes:
        decides: it.
        constants: fitted together.
        by_value: the two ends of the uncertainty are values of its constant, which is not fitted
            to compare them.
        also: more `Case.decides` whose cases are about the constants.
        moves: as of `solve.LeastSquares`.
    """

    decides: str
    constants: tuple[Constant, ...]
    by_value: bool = False
    also: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()


def _wait(name: str, meaning: str, **options: Any) -> Constant:
    def put(clock: Clock, value: float) -> Clock:
        return replace(clock, waits={**clock.waits, name: value})

    return Constant(name, meaning, lambda clock: clock.wait_ns(name), put, **options)


def _of_machine(name: str, meaning: str, **options: Any) -> Constant:
    def put(clock: Clock, value: float) -> Clock:
        return replace(clock, machine=replace(clock.machine, **{name: value}))

    return Constant(name, meaning, lambda clock: getattr(clock.machine, name), put, **options)


def _of_dma(name: str, meaning: str, **options: Any) -> Constant:
    def put(clock: Clock, value: float) -> Clock:
        costs = replace(clock.machine.dma, **{name: value})
        models = [costs if m.model == costs.model else m for m in clock.machine.dma_models]
        return replace(clock, machine=replace(clock.machine, dma=costs, dma_models=tuple(models)))

    return Constant(name, meaning, lambda clock: getattr(clock.machine.dma, name), put, **options)


def _of_engine(name: str, meaning: str, engine: Engine) -> Constant:
    def put(clock: Clock, value: float) -> Clock:
        results = list(clock.machine.result_ns)
        results[engine] = value
        return replace(clock, machine=replace(clock.machine, result_ns=tuple(results)))

    return Constant(name, meaning, lambda clock: clock.machine.result_ns[engine], put)


def _of_throttle(
    name: str, meaning: str, least: float, most: float, scale: float | None = None
) -> Constant:
    def put(clock: Clock, value: float) -> Clock:
        assert clock.machine.throttle is not None
        throttle = replace(clock.machine.throttle, **{name: value})
        return replace(clock, machine=replace(clock.machine, throttle=throttle))

    return Constant(
        *(f"throttle_{name}", meaning, lambda clock: getattr(clock.machine.throttle, name), put),
        *(least, most, scale),
        of=lambda machine: machine.throttle is not None,
    )


_RATE = _of_throttle("rate", "of TensorE's full rate where it was used little", 0.2, 0.8, scale=1.0)

_TENSOR = _of_engine("tensor_result_ns", "the same of TensorE", Engine.TENSOR)
_WINDOW = _of_throttle("window_ns", "that time", 0.4, 2.5)


_LONG_ROWS = _of_machine("dma_engine_gbps", "of a DMA engine in long rows")


def _another_window(values: Values, ratio: float) -> Values:
    return values * (1.0, ratio, 1.0, 1.0)


def _use_after_rest(values: Values, ratio: float) -> Values:
    """Another use, of a window with which as much work from rest is slow."""
    use, _, rate, _ = values
    return values * (ratio, (rate / 2 + use) / (rate / 2 + ratio * use), 1.0, 1.0)


def _use_after_pause(values: Values, ratio: float) -> Values:
    """Another use, at which the same pause between uses is the shortest that slows the next."""
    use = values[0]
    return values * (ratio, (1 - use) / (1 - ratio * use), 1.0, 1.0)


def _paired(machine: Machine) -> bool:
    return machine.has("paired_cores")


STEPS = (
    Step(
        "matmul-issue",
        (
            _of_machine(
                *("matmul_overhead_cycles", "of a matmul, beyond its columns"),
                least=0.0,
                most=10.0,
                scale=100.0,
            ),
        ),
        by_value=True,
    ),
    Step("dma-rate", (_LONG_ROWS,), by_value=True),
    Step(
        "dma",
        (
            _of_dma(
                *("interval_ns", "from the start of a DMA to the next of its queue"),
                least=0.4,
                most=3.0,
                of=lambda machine: machine.dma.interval_ns > 0,
            ),
            _of_dma("short_gbps", "of a DMA engine in short rows"),
            _LONG_ROWS,
        ),
        also=("dma-rate",),
    ),
    Step("dma-queues", ()),
    Step("transposes", (_of_dma("transpose_share", "of the DMA rate, in a transpose"),)),
    Step("engine-issue", ()),
    Step(
        "vector",
        (
            _of_engine(
                *("vector_result_ns", "from VectorE's end until its result is used", Engine.VECTOR)
            ),
            _wait(PSUM_RESULT, "the same where it reads or writes PSUM"),
        ),
    ),
    Step(
        "round-trips",
        (
            _wait("dma_start_ns", "from what lets a DMA go to its first byte"),
            _wait("dma_done_ns", "from its last byte until an engine uses what it wrote"),
        ),
    ),
    Step(
        "descriptors",
        (
            _wait(
                *("descriptors_ns", "of a DMA's descriptors, made by the hardware"),
                of=lambda machine: machine.has("hardware_dge"),
            ),
        ),
    ),
    Step("scalar", (_of_engine("scalar_result_ns", "the same of ScalarE", Engine.SCALAR),)),
    Step("gpsimd", (_of_engine("gpsimd_result_ns", "the same of GpSimdE", Engine.GPSIMD),)),
    Step("tables", (_wait("table_load_ns", "of a table of ScalarE's"),)),
    Step("throttling", (_TENSOR, _RATE)),
    Step("rest", (_WINDOW,), moves=(lambda values, ratio: values * ratio,)),
    Step(
        "throttle",
        (
            _of_throttle("use", "of the time, below which it is little", 0.2, 0.9, scale=1.0),
            _WINDOW,
            _RATE,
            _TENSOR,
        ),
        also=("throttling", "rest", "pause"),
        moves=(_use_after_rest, _use_after_pause, _another_window),
    ),
    Step("column-groups", ()),
    Step(
        "core-exchange",
        (_wait("exchange_ns", "of an exchange of two cores, beyond its bytes", of=_paired),),
        by_value=True,
    ),
    Step("instruction-order", ()),
    Step("sbuf-reserve", ()),
    Step("barriers", (_wait("barrier_ns", "of a barrier of two cores", most=50.0, of=_paired),)),
)
"""In the order in which they are taken."""
