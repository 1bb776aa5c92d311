"""The microkernels with their sizes: what is measured, and what each time is for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from neuroncore.boundary import TensorSpec
from neuroncore.calibration import microkernels, shim
from neuroncore.dtypes import DType, bfloat16, float32
from neuroncore.hardware import Machine, resolve_target
from neuroncore.kernel import Kernel, jit


@dataclass(frozen=True)
class Case:
    """One launch that is timed. Those of a series differ in `count` alone: slopes are used.

    Attributes:
        series: what is repeated.
        count: how often, or of `bursts` how long; a launch's constant cost is in all of a series.
        function: its name in `microkernels`.
        operands: shapes and dtypes of its tensors; any values will do, such as zeros.
        arguments: its compile-time arguments.
        decides: the name in `uncertainty.UNCERTAINTIES`, or else of a step of `constants.STEPS`.
        lnc: cores of the launch.
        waits: of each latency in `constants.Clock`, how many follow each other per count.
    """

    series: str
    count: int
    function: str
    operands: tuple[TensorSpec, ...]
    arguments: Mapping[str, Any]
    decides: str
    lnc: int = 1
    waits: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def name(self) -> str:
        """What the measurements name it: `loads-256/128`."""
        return f"{self.series}/{self.count}"

    @property
    def kernel(self) -> Callable[..., Any]:
        """The kernel of the installed NKI, else the simulator's; without its cores."""
        return getattr(microkernels, self.function)

    @property
    def simulated(self) -> Kernel:
        """The kernel for `neuroncore.simulate`, also where NKI is installed, on its cores."""
        return getattr(of_simulator(microkernels.__name__), self.function)[self.lnc]


def cases(target: str) -> list[Case]:
    """All that a target can run.

    Raises:
        ValueError: there is no such target.
    """
    machine = resolve_target(target)
    shared = [*_loads(), *_matmuls(machine), *_chains(machine), *_bursts()]
    pairs = _two_cores() if machine.has("paired_cores") else []
    return [*shared, *pairs, *_compiled(machine)]


def _tensor(*shape: int, dtype: DType = bfloat16) -> TensorSpec:
    return TensorSpec(shape, dtype)


def _loads() -> list[Case]:
    loads: list[Case] = []
    for row, counts in (
        *((256, (32, 256)), (512, (32, 256)), (1024, (32, 128)), (2048, (16, 64)), (4096, (8, 32))),
        (16384, (2, 6, 8)),
    ):
        for count in counts:
            x = _tensor(count, 128, 1, row // 2)
            decides = "dma-rate" if row == 16384 else "dma"
            loads.append(_load(f"loads-{row}", count, x, row // 2, decides))
    # many rows a load, so that rows bind and not loads; apart, so that none are one
    for row in (256, 1024):
        for count in (8, 32):
            x = _tensor(count, 128, 4096 // row, row)
            loads.append(_load(f"rows-{row}", count, x, row // 2, "dma"))
    for row, pitch in ((2048, 4096), (2048, 8192)):
        for count in (16, 64):
            x = _tensor(count, 128, 1, pitch // 2)
            loads.append(_load(f"pitch-{pitch}", count, x, row // 2, "dma"))
    for count in (16, 64):
        each = (_tensor(count, 128, 128),) * 4
        loads.append(Case("loads-in-turn", count, "loads_in_turn", each, {}, "dma-queues"))
    for count in (4, 12, 14, 16):
        x = _tensor(count, 4096, 128)
        loads.append(Case("transposes", count, "transposed_loads", (x,), {}, "transposes"))
    return loads


def _load(series: str, count: int, x: TensorSpec, width: int, decides: str) -> Case:
    return Case(series, count, "loads", (x,), {"width": width}, decides)


def _matmuls(machine: Machine) -> list[Case]:
    def made(
        series: str, function: str, columns: int, count: int, decides: str, **others: int
    ) -> Case:
        operands = (_tensor(128, 128), _tensor(128, columns))
        return Case(series, count, function, operands, {"count": count, **others}, decides)

    dense = [
        made(f"matmuls-{columns}", "matmuls", columns, count, "matmul-issue")
        for columns, counts in ((64, (128, *range(2048, 4097, 128))), (512, (64, 1024)))
        for count in counts
    ]
    chains = [
        made(f"chain-{columns}", "matmuls_in_a_chain", columns, count, "throttling")
        for columns, counts in (
            (64, (32, 48, *range(272, 353, 16))),
            (256, (16, 32, *range(136, 217, 16))),
        )
        for count in counts
    ]
    groups = [
        made(*("columns", "matmuls_on_columns", 512, count, "column-groups"), size=machine.pe_tile)
        for count in (16, 128)
    ]
    return [*dense, *chains, *groups]


def _chains(machine: Machine) -> list[Case]:
    small, copied = _tensor(128, 64), _tensor(128, 64, dtype=float32)
    trip = {"dma_start_ns": 2, "dma_done_ns": 2}
    kinds: list[_Kind] = [
        ("round-trips", "round-trips", "round_trips", small, {"by_hardware": False}, _TRIPS, trip),
        ("overwrites", "round-trips", "overwrites", small, {}, _TRIPS, {"dma_start_ns": 1}),
        ("vector", "vector", "vector_chain", copied, {"through_psum": False}, _MANY, {}),
        ("psum", "vector", "vector_chain", copied, {"through_psum": True}, _MANY, {}),
        ("products", "engine-issue", "products", copied, {}, (16, 256), {}),
        ("gpsimd", "gpsimd", "gpsimd_chain", copied, {}, _MANY, {}),
        ("scalar", "scalar", "scalar_chain", copied, {"with_tables": False}, _MANY, {}),
        (
            *("tables", "tables", "scalar_chain", copied, {"with_tables": True}),
            *((16, 96, 112, 128), {"table_load_ns": 2}),
        ),
    ]
    if machine.has("hardware_dge"):
        given, waits = {"by_hardware": True}, {**trip, "descriptors_ns": 2}
        kind = "descriptors", "descriptors", "round_trips", small, given, _TRIPS[:8], waits
        kinds.append(kind)
    return [
        Case(series, count, function, (x,), {"count": count, **given}, decides, 1, waits)
        for series, decides, function, x, given, counts, waits in kinds
        for count in counts
    ]


def _bursts() -> list[Case]:
    operands = _tensor(128, 128), _tensor(128, _REST, dtype=float32)

    def made(series: str, decides: str, length: int, **given: int) -> Case:
        return Case(series, length, "bursts", operands, given, decides)

    return [
        *[made("use", "throttle", n, count=32, matmuls=n, columns=64) for n in _BURSTS],
        *[made("idle", "throttle", n, count=32, matmuls=17, columns=n) for n in _IDLE],
        *[made("rest", "rest", n, count=8, matmuls=n, columns=_REST) for n in _RESTED],
        *[made("pause", "pause", n, count=5, matmuls=52, columns=n) for n in _PAUSES],
    ]


def _two_cores() -> list[Case]:
    return [
        Case(series, count, series, (_tensor(128, 64),), {"count": count}, decides, 2, waits)
        for series, decides, waits, counts in (
            ("exchanges", "core-exchange", {"exchange_ns": 1}, (8, 64, 72, 80)),
            ("barriers", "barriers", {"barrier_ns": 1}, _MANY),
        )
        for count in counts
    ]


def _compiled(machine: Machine) -> list[Case]:
    """What a compiler decides: the order of instructions, and how much of SBUF loads fill."""
    x = _tensor(128, 64, dtype=float32)
    compiled = [
        Case("in-order", n, "scalar_chains", (x,), {"count": n, "steps": 16}, "instruction-order")
        for n in (4, 64)
    ]
    for count in (4, 16):
        # two fit into SBUF with what is left of it, and not into what is otherwise used
        x, given = _tensor(count, 128, machine.sbuf_bytes // 4 - 1024), {"columns": 32_767}
        compiled.append(Case("halves", count, "loads_of_half_sbuf", (x,), given, "sbuf-reserve"))
    return compiled


_Kind = tuple[str, str, str, TensorSpec, Mapping[str, Any], Sequence[int], Mapping[str, int]]
_MANY = (32, 512, 576, 640)
_TRIPS = (8, *range(104, 193, 8))
_PAUSES = tuple([round(64 * 1.09**n) for n in range(14, 43, 2)])
_BURSTS = (4, 5, 6, 8, 10, 13, 17)
_IDLE = (64, 150, 250, 350, 475, 600, 750, 950, 1200, 1500)
_RESTED, _REST = (16, 24, 32, 40, 48, 56, 64, 80, 96), 8192


@cache
def of_simulator(name: str) -> ModuleType:
    """A module of kernels, bound to the simulator where it is bound to the installed NKI."""
    module = import_module(name)
    if module.jit is jit:
        return module
    spec = spec_from_file_location(f"{name}_simulated", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    bound = module_from_spec(spec)
    with _without_nki():
        spec.loader.exec_module(bound)
    return bound


@contextmanager
def _without_nki() -> Generator[None]:
    """Imports of `nki` fail while the block runs, as if it were not installed."""
    bound = [n for n in sys.modules if n.split(".")[0] == "nki" or n == shim.__name__]
    taken = {name: sys.modules.pop(name) for name in bound}
    sys.modules["nki"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["nki"]
        sys.modules.update(taken)
