"""What is fitted: constants of a clock, in the order in which each needs no later one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from neuroncore.hardware import (
    DMA_DONE_NS,
    DMA_START_NS,
    MIN_CYCLES,
    TABLE_LOAD_NS,
    Engine,
    Machine,
)


@dataclass(frozen=True)
class Clock:
    """What times follow from: a machine, and by name the latencies that a trace has as numbers."""

    machine: Machine
    waits: Mapping[str, float] = field(default_factory=dict[str, float])

    def wait_ns(self, name: str) -> float:
        """One of the latencies: that of the schedule, unless it was fitted."""
        return self.waits[name] if name in self.waits else _WAITS[name](self)

    def beyond_ns(self, waits: Mapping[str, int]) -> float:
        """What so many of each cost beyond what the schedule has for them."""
        scheduled = Clock(self.machine)
        return sum([n * (self.wait_ns(w) - scheduled.wait_ns(w)) for w, n in waits.items()])


def _exchange_ns(clock: Clock) -> float:
    late = max(0.0, clock.machine.meeting_ns - DMA_DONE_NS)  # cores meet while the bytes arrive
    return clock.wait_ns("round_trip_ns") + late


def _barrier_ns(clock: Clock) -> float:
    return clock.machine.ns(Engine.GPSIMD, MIN_CYCLES) + clock.machine.meeting_ns


_WAITS: Mapping[str, Callable[[Clock], float]] = {
    "round_trip_ns": lambda clock: DMA_START_NS + DMA_DONE_NS,
    "vector_result_ns": lambda clock: clock.machine.result_ns[Engine.VECTOR],
    "scalar_result_ns": lambda clock: clock.machine.result_ns[Engine.SCALAR],
    "tensor_result_ns": lambda clock: clock.machine.result_ns[Engine.TENSOR],
    "psum_result_ns": lambda clock: clock.machine.result_of(Engine.VECTOR, True),
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
    """

    decides: str
    constants: tuple[Constant, ...]
    by_value: bool = False


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


def _throttle_rate() -> Constant:
    def put(clock: Clock, value: float) -> Clock:
        assert clock.machine.throttle is not None
        throttle = replace(clock.machine.throttle, rate=value)
        return replace(clock, machine=replace(clock.machine, throttle=throttle))

    def get(clock: Clock) -> float:
        return clock.machine.throttle.rate if clock.machine.throttle else 1.0

    return Constant(
        *("throttle_rate", "of TensorE's full rate where it was used little", get, put, 0.2, 0.8),
        scale=1.0,
        of=lambda machine: machine.throttle is not None,
    )


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
            _of_machine("dma_engine_gbps", "of a DMA engine in long rows"),
        ),
    ),
    Step("dma-queues", ()),
    Step("transposes", (_of_dma("transpose_share", "of the DMA rate, in a transpose"),)),
    Step("round-trips", (_wait("round_trip_ns", "of a DMA beyond its bytes"),)),
    Step("vector", (_wait("vector_result_ns", "from VectorE's end until its result is used"),)),
    Step("psum", (_wait("psum_result_ns", "the same where it reads or writes PSUM"),)),
    Step("scalar", (_wait("scalar_result_ns", "the same of ScalarE"),)),
    Step("tables", (_wait("table_load_ns", "of a table of ScalarE's"),)),
    Step("throttling", (_wait("tensor_result_ns", "the same of TensorE"), _throttle_rate())),
    Step("column-groups", ()),
    Step(
        "core-exchange",
        (_wait("exchange_ns", "of an exchange of two cores, beyond its bytes", of=_paired),),
        by_value=True,
    ),
    Step("barriers", (_wait("barrier_ns", "of a barrier of two cores", of=_paired),)),
)
"""In the order in which they are taken."""
