"""What would help: the launch scheduled again with one resource free.

The times are modelled, and each is of the whole launch: when one resource is free, the next one
binds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from neuroncore.collector import no_collection
from neuroncore.hardware import DMA_ENGINES, DMA_SATURATED_BYTES, Engine, Machine
from neuroncore.memory.liveness import room_of
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.profile.metrics import critical_steps, occupancy
from neuroncore.timing.schedule import schedule
from neuroncore.timing.times import Schedule
from neuroncore.timing.trace import InstructionTemplate, Trace

if TYPE_CHECKING:
    from neuroncore.core import KernelRun

BINDS = 0.02
"""A resource binds if the launch takes less by more than this share when it is free."""

MUCH_LATENCY = 0.2
"""Share of the critical path from which latency is worth a sentence."""


@dataclass(frozen=True)
class WhatIf:
    """The launch with one resource free."""

    resource: str
    freed: str
    """What was changed, as the end of "if ..."."""
    time_ms: float
    speedup: float | None
    """Time of the launch as it is over `time_ms`; None where that is 0."""
    advice: str
    """What a kernel could do about it."""

    def document(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)


_OnPath = dict[InstructionTemplate, float]
"""ns of the critical path, with what was waited for, by kind of instruction."""
_MayBind = Callable[[Schedule, _OnPath], bool]


class _Resource(NamedTuple):
    name: str
    freed: str
    advice: str
    free: Callable[[KernelRun], KernelRun]
    may_bind: _MayBind


def what_if(launch: KernelRun, before: Schedule) -> tuple[WhatIf, ...]:
    """Free in turn each resource that may bind; what helps most comes first.

    The launch is scheduled once more for each: as long as its first schedule took.
    """
    records = [core.issued for core in before.cores]
    on_path: _OnPath = {}
    for core, i, own, latency in critical_steps(before):
        template = records[core][i][0]
        on_path[template] = on_path.get(template, 0.0) + own + latency
    entries: list[WhatIf] = []
    for resource in _RESOURCES:
        if not resource.may_bind(before, on_path):
            continue
        with no_collection():
            ns = schedule(resource.free(launch), before.model).time_ns
        speedup = before.time_ns / ns if ns else None
        entries.append(WhatIf(resource.name, resource.freed, ns / 1e6, speedup, resource.advice))
    return tuple(sorted(entries, key=lambda entry: entry.time_ms))


def summary(entries: tuple[WhatIf, ...], time_ms: float, latency_ms: float) -> str:
    """What binds, what helps next, and how much of the critical path is latency, in words."""
    if not time_ms:
        return "Nothing ran."
    helping = [entry for entry in entries if entry.time_ms <= (1 - BINDS) * time_ms]
    said: list[str] = []
    if helping:
        said.append(f"{helping[0].resource} binds: {_gain(helping[0])}.")
    else:
        said.append(
            f"No single resource binds: with any one of them free the kernel takes less time by "
            f"less than {BINDS:.0%}. Its steps wait for one another: let more of them overlap."
        )
    if len(helping) > 1:
        said.append(f"Next is {helping[1].resource}: {_gain(helping[1])}.")
    if latency_ms > MUCH_LATENCY * time_ms:
        said.append(
            f"Nothing runs in {latency_ms / time_ms:.0%} of the critical path: DMAs start and "
            "results are on their way; let independent work overlap, in fewer and larger steps."
        )
    return " ".join(said)


def _gain(entry: WhatIf) -> str:
    faster = f"{entry.speedup:.2f}x as fast" if entry.speedup else "done at once"
    return f"{faster} (modelled) if {entry.freed}; {entry.advice}"


# --- launches with one resource free


def _on(machine: Machine, launch: KernelRun) -> KernelRun:
    """The launch on another machine."""
    changed = copy.copy(launch)
    changed.machine = machine
    return changed


def _instant(template: InstructionTemplate) -> InstructionTemplate:
    return replace(template, ns=0.0, result_ns=0.0)


def _free_engine(engine: Engine) -> Callable[[KernelRun], KernelRun]:
    def free(launch: KernelRun) -> KernelRun:
        clocks = list(launch.machine.clocks_ghz)
        clocks[engine] = math.inf  # also issue overheads and descriptors
        machine = replace(launch.machine, clocks_ghz=tuple(clocks))
        free = launch.with_templates(lambda t: _instant(t) if t.engine is engine else t)
        return _on(machine, free)

    return free


def _evicts(template: InstructionTemplate) -> bool:
    return template.on_psum and Engine.TENSOR < template.engine <= Engine.GPSIMD


def _free_eviction(launch: KernelRun) -> KernelRun:
    return launch.with_templates(lambda t: _instant(t) if _evicts(t) else t)


def _free_dma_rate(launch: KernelRun) -> KernelRun:
    return launch.with_templates(
        lambda t: t if t.dma is None else replace(t, dma=replace(t.dma, runs=(), transposes="")),
    )


def _free_tables(launch: KernelRun) -> KernelRun:
    return launch.with_templates(lambda t: replace(t, table="") if t.table else t)


def _free_queues(launch: KernelRun) -> KernelRun:
    machine = launch.machine
    free = replace(machine, dma=replace(machine.dma, interval_ns=0.0))
    return _on(free, launch)


def _free_throttle(launch: KernelRun) -> KernelRun:
    return _on(replace(launch.machine, throttle=None), launch)


def _free_dma_rows(launch: KernelRun) -> KernelRun:
    def change(t: InstructionTemplate) -> InstructionTemplate:
        if t.dma is None:
            return t
        runs = ((DMA_SATURATED_BYTES, t.dma.bytes / DMA_ENGINES / DMA_SATURATED_BYTES),)
        all_engines = {"first_engine": 0, "engines": DMA_ENGINES, "transposes": ""}
        return replace(t, dma=replace(t.dma, runs=runs, **all_engines))

    return launch.with_templates(change)


def _free_descriptors(launch: KernelRun) -> KernelRun:
    return launch.with_templates(
        lambda t: t if t.dma is None else replace(t, dma=replace(t.dma, descriptors="none"))
    )


def _unlimited(memory: MemoryRegion) -> Callable[[KernelRun], KernelRun]:
    """Tensors of the memory take no room in it, wherever they were put."""

    def free(launch: KernelRun) -> KernelRun:
        copies: dict[Storage, Storage] = {}

        def of(storage: Storage) -> Storage:
            if storage.memory is not memory:
                return storage
            if storage not in copies:
                copied = copies[storage] = copy.copy(storage)
                copied.layout = copy.copy(storage.layout)
                copied.layout.size = 0
                copied.address = None
            return copies[storage]

        def trace(t: Trace) -> Trace:
            records = [
                (template, tuple([of(s) for s in used]), code, line)
                for template, used, code, line in t.records
            ]
            loops = {loop: copy.copy(loop) for loop in t.loops}
            for loop in loops.values():
                loop.outer = {of(s) for s in loop.outer}
            moves = {
                record: [move._replace(loop=loops[move.loop]) for move in recorded]
                for record, recorded in t.moves.items()
            }
            storages = [of(s) for s in t.storages]
            return replace(
                t, records=records, storages=storages, loops=list(loops.values()), moves=moves
            )

        return launch.with_traces([trace(core.trace) for core in launch.cores])

    return free


# --- what may bind


def _on_path(matches: Callable[[InstructionTemplate], bool]) -> _MayBind:
    """Whether the path has more of it than what does not count as binding."""

    def may_bind(before: Schedule, on_path: _OnPath) -> bool:
        ns = sum([ns for template, ns in on_path.items() if matches(template)])
        return ns > BINDS / 2 * before.time_ns

    return may_bind


def _runs_on(engine: Engine) -> _MayBind:
    return _on_path(lambda template: template.engine is engine)


def _describes(template: InstructionTemplate, *by: str) -> bool:
    return template.dma is not None and template.dma.descriptors in by


def _fills(memory: MemoryRegion) -> _MayBind:
    """Whether a tensor could ever have waited for room: the largest next to the fullest moment."""

    def may_bind(before: Schedule, _: _OnPath) -> bool:
        limit = room_of(memory, before.machine)
        for core in before.cores:
            held = max([size for _, size in occupancy(core, memory)], default=0)
            largest = max([s.layout.size for _, _, s in core.occupied.get(memory, [])], default=0)
            if largest and held + largest > limit:
                return True
        return False

    return may_bind


_RESOURCES = (
    _Resource(
        "TensorE",
        "matmuls took no time",
        "fill the PE array (128 rows, 128 stationary and 512 moving columns), compute less",
        _free_engine(Engine.TENSOR),
        _runs_on(Engine.TENSOR),
    ),
    _Resource(
        "throttling",
        "TensorE ran at its full rate",
        "keep TensorE busy: load ahead, so that it does not wait",
        _free_throttle,
        lambda before, on_path: (
            before.machine.throttle is not None and any(t.engine is Engine.TENSOR for t in on_path)
        ),
    ),
    _Resource(
        "VectorE",
        "VectorE took no time",
        "move work to other engines, use 16-bit operands, fuse instructions",
        _free_engine(Engine.VECTOR),
        _runs_on(Engine.VECTOR),
    ),
    _Resource(
        "ScalarE",
        "ScalarE took no time",
        "move work to other engines, fuse instructions",
        _free_engine(Engine.SCALAR),
        _runs_on(Engine.SCALAR),
    ),
    _Resource(
        "GpSimdE",
        "GpSimdE took no time",
        "move work to VectorE or ScalarE, avoid software descriptors (dge_mode)",
        _free_engine(Engine.GPSIMD),
        _on_path(lambda t: t.engine is Engine.GPSIMD or _describes(t, "swdge")),
    ),
    _Resource(
        "PSUM eviction",
        "instructions of VectorE, ScalarE and GpSimdE on PSUM took no time",
        "evict wide tiles, by more than one engine, and sum over K in PSUM",
        _free_eviction,
        _on_path(_evicts),
    ),
    _Resource(
        "DMA rate",
        "DMA engines carried bytes at once",
        "move fewer bytes: keep operands in SBUF, load nothing twice, fuse kernels",
        _free_dma_rate,
        _runs_on(Engine.DMA),
    ),
    _Resource(
        "DMA shape",
        "every DMA used all 16 engines at their peak rate",
        "make contiguous rows of 2 KiB or more, and enough of them for 16 engines",
        _free_dma_rows,
        _runs_on(Engine.DMA),
    ),
    _Resource(
        "DMA queues",
        "a queue started DMAs without an interval",
        "issue fewer and larger DMAs, several tiles at once",
        _free_queues,
        lambda before, on_path: (
            before.machine.dma.interval_ns > 0 and any(t.engine is Engine.DMA for t in on_path)
        ),
    ),
    _Resource(
        "activation tables",
        "ScalarE loaded tables of activation functions at once",
        "group activations of one function, instead of alternating",
        _free_tables,
        _on_path(lambda t: bool(t.table)),
    ),
    _Resource(
        "DMA descriptors",
        "descriptors were made before the run",
        "issue fewer and larger DMAs, or choose another dge_mode",
        _free_descriptors,
        _on_path(lambda t: _describes(t, "hwdge", "swdge")),
    ),
    _Resource(
        "SBUF",
        "SBUF were unlimited",
        "keep smaller tiles, or fewer at once, so that the next ones load earlier",
        _unlimited(MemoryRegion.sbuf),
        _fills(MemoryRegion.sbuf),
    ),
    _Resource(
        "PSUM",
        "PSUM were unlimited",
        "evict banks earlier, or hold fewer at once",
        _unlimited(MemoryRegion.psum),
        _fills(MemoryRegion.psum),
    ),
)
