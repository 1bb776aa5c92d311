"""The running core: allocates tensors and issues instructions; the cores of a launch."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cache
from math import prod
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, Literal

import numpy as np

from neuroncore.alike import Shared, shared_by
from neuroncore.checks import operands as operand_rules
from neuroncore.checks import tensors as check
from neuroncore.checks import views
from neuroncore.checks.base import PACKAGE, kernel_frame, note, refuse
from neuroncore.checks.races import indexed_regions
from neuroncore.dtypes import DType, dtype_of
from neuroncore.hardware import Engine, Machine
from neuroncore.memory.geometry import whole
from neuroncore.memory.indexing import VirtualRegister
from neuroncore.memory.liveness import CapacityPolicy
from neuroncore.memory.storage import Held, Layout, MemoryRegion, Storage
from neuroncore.memory.tensor import NkiTensor, tensor_of, view_of
from neuroncore.timing.replay import Replay
from neuroncore.timing.trace import (
    InstructionTemplate,
    Move,
    NkiInstruction,
    Trace,
    on_grid,
)
from neuroncore.turns import Turns

Build = Callable[..., InstructionTemplate]
Follow = Literal["documentation", "kernels"]
Uninitialised = Literal["partial", "raise", "warn"]

_SHARED_HBM = MemoryRegion.shared_hbm
_geometry = attrgetter("geometry")
_fields = attrgetter(*[field.name for field in fields(InstructionTemplate)])


class KernelRun:
    """One call of a kernel: `lnc` cores for each of `ranks` ranks, which take turns.

    Args:
        machine: the target.
        execute: compute values.
        lnc: physical cores of a rank, which share its HBM tensors.
        seed: of the random number generators.
        ranks: how many ranks run the kernel, each with its own memories; and of how many of them,
            where the others come to meetings as the first does.
        follow: what instructions do where documentation and public kernels contradict each other.
        uninitialised: what a read of elements that were never written does; see `simulate`.
        memory_bytes: how much memory values may take on this machine.
        order: seed of the order in which cores run, as far as they do not wait for each other; None
            for one after the other.
    """

    def __init__(
        self,
        machine: Machine,
        execute: bool,
        lnc: int,
        seed: int = 0,
        ranks: tuple[int, int] = (1, 1),
        follow: Follow = "documentation",
        uninitialised: Uninitialised = "partial",
        memory_bytes: int = sys.maxsize,
        order: int | None = None,
    ) -> None:
        self.machine = machine
        self.memory_bytes, self.used_bytes = memory_bytes, 0
        self.freed: list[Held] = []
        self.execute = execute
        self.precise = os.environ.get("NKI_PRECISE_FP", "1") != "0"
        run, self.ranks = ranks
        self.lnc, self.seed, self.follow = lnc, seed, follow
        self.uninitialised: Uninitialised = uninitialised
        self.capacity: CapacityPolicy | None = None
        self.shared: list[list[NkiTensor]] = [[] for _ in range(run)]
        shared = Shared() if execute else shared_by((machine, lnc, ranks, follow))
        self.layouts = shared.layouts
        cores = [SimulatedCore(self, i, *shared.templates[i]) for i in range(run * lnc)]
        self.cores = cores
        draw = None if order is None else random.Random(order)  # noqa: S311 - no secret

        def take(number: int) -> None:
            _state.core = cores[number]

        self.turns = Turns(len(cores), take, draw)

    def run(self, body: Callable[[SimulatedCore], Any]) -> list[Any]:
        """Run `body` once per core and return its results."""
        if len(self.cores) == 1:
            return [_run_on(self.cores[0], body)]
        outer = _state.core
        try:
            return self.turns.run(lambda i: _run_on(self.cores[i], body))
        finally:
            _state.core = outer

    def with_traces(self, traces: Iterable[Trace]) -> KernelRun:
        """The launch with other traces, one for each of its cores."""
        changed = copy.copy(self)
        changed.cores = [copy.copy(core) for core in self.cores]
        for core, trace in zip(changed.cores, traces, strict=True):
            core.trace = trace
        return changed

    def with_templates(
        self, change: Callable[[InstructionTemplate], InstructionTemplate]
    ) -> KernelRun:
        """The launch with other templates of its instructions, each changed once."""
        of = cache(change)

        def changed(trace: Trace) -> Trace:
            return replace(trace, records=[(of(t), *rest) for t, *rest in trace.records])

        return self.with_traces([changed(core.trace) for core in self.cores])

    def end(self) -> None:
        """Free the launch from its cores: with them it would wait for the garbage collector."""
        self.shared.clear()
        for core in self.cores:
            del core.launch

    def fresh(self, storage: Storage) -> np.ndarray:
        """Values for a tensor, while it lives. Refuses what exceeds the budget."""
        size = prod(storage.layout.shape) * storage.layout.dtype.itemsize
        # a list, for what stops a kernel is lost where it comes in a function that a free calls
        while self.freed:
            self.used_bytes -= self.freed.pop().size
        self.used_bytes += size
        if self.used_bytes > self.memory_bytes:
            refuse(
                f"the kernel's tensors need more than {self.memory_bytes:,} bytes of this "
                f'machine\'s memory, with {storage.describe()}; use mode="trace" (--trace-only), '
                "smaller inputs, or a larger budget (--max-bytes)"
            )
        return storage.hold(storage.fresh(self.precise), size, self.freed)

    def undefined(self, problem: str, nothing: bool = False) -> None:
        """Refuse, or note, a use of elements that were never written: some, or all of them."""
        policy = self.uninitialised
        if policy == "raise" or (policy == "partial" and nothing):
            refuse(f"{problem}; write the tile, or slice to what was written")
        note(f"{problem}; they hold NaN or 4 here and anything on the device")

    def layout(self, shape: tuple[int, ...], dtype: DType, memory: MemoryRegion) -> Layout:
        """The layout that all tensors of this shape, dtype and memory share."""
        key = (shape, dtype, memory)
        layout = self.layouts.get(key)
        if layout is None:
            layout = self.layouts[key] = Layout(shape, dtype, memory)
        return layout


class SimulatedCore:
    """One physical NeuronCore of a launch, which has its place here while it runs.

    `models` are the first templates of those that differ by places in HBM only.
    """

    def __init__(
        self,
        launch: KernelRun,
        number: int,
        templates: dict[tuple[Any, ...], Any],
        models: dict[tuple[Any, ...], InstructionTemplate],
    ) -> None:
        self.launch = launch
        self.machine = launch.machine
        self.execute = launch.execute
        self.number = number
        self.rank, self.program_id = divmod(number, launch.lnc)
        first = self.rank * launch.lnc
        self.of_rank = tuple(range(first, first + launch.lnc))
        """Numbers of the cores of its rank."""
        self.trace = Trace()
        self.templates, self.models = templates, models
        self.shared_outputs = 0
        self.constants: dict[Any, NkiTensor] = {}
        self.state: dict[str, Any] = {}
        """What instructions keep between calls: random number generators, Vector accumulators."""
        self.lines: dict[tuple[int, int], int] = {}
        """Lines of the kernel by code, which the trace keeps, and by place in it."""
        self.replay: Replay | None = None
        """Set while the body of a loop of the device runs again."""
        self.open_loops = 0

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        memory: MemoryRegion,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """A fresh tensor. Shared HBM is one tensor for both cores, matched by order."""
        launch = self.launch
        layout = launch.layouts.get((shape, dtype, memory)) if shape.__class__ is tuple else None
        if layout is None:
            shape, dtype = check.shape_of(shape), dtype_of(dtype)
            check.tensor_fits(self.machine, shape, dtype, memory, name)
            layout = launch.layout(shape, dtype, memory)
        if memory is _SHARED_HBM:
            if self.open_loops:
                refuse("nl.ndarray: a loop's body cannot allocate in shared_hbm; do so before it")
            order, shared = self.shared_outputs, launch.shared[self.rank]
            self.shared_outputs += 1
            if order < len(shared):
                storage = shared[order].storage
                if (storage.layout.shape, storage.layout.dtype) != (shape, dtype):
                    refuse(
                        f"nl.ndarray: core 1 allocates {list(shape)} {dtype} in shared_hbm where "
                        f"core 0 has {storage.describe()}; both cores must allocate the same"
                    )
                return self._enter(storage)
        storage = Storage(layout, name or f"{memory.label}{len(self.trace.storages)}")
        frame = sys._getframe(2)
        storage.code = code = frame.f_code
        line = self.lines.get((id(code), frame.f_lasti))
        if line is None:
            storage.code, line = self._place_of(frame)
        storage.line = line
        if address is not None:
            storage.address = check.address_of(self.machine, storage, address)
        data = launch.fresh(storage) if self.execute else None
        if self.replay is not None:
            return self._enter(storage)
        self.trace.storages.append(storage)
        tensor = view_of(storage, layout.whole or whole(layout), None, data)
        if memory is _SHARED_HBM:
            launch.shared[self.rank].append(tensor)
        return tensor

    def adopt(self, storage: Storage) -> NkiTensor:
        """Take an input or constant, which is initialised, among the core's tensors."""
        storage.initialised = True
        return self._enter(storage)

    def _enter(self, storage: Storage) -> NkiTensor:
        if self.replay is None:
            self.trace.storages.append(storage)
        else:
            self.replay.allocate(self.trace, storage)
        return tensor_of(storage)

    def template(
        self, build: Build, operands: tuple[NkiTensor, ...], options: tuple[Any, ...] = ()
    ) -> InstructionTemplate:
        """What `build(*operands, *options)` returns, which checks the rules.

        Built once per combination of geometries and options. `operands` are the written tensors,
        then the read ones.
        """
        key = (build, options, *map(_geometry, operands))
        try:
            template = self.templates.get(key)
        except TypeError:  # a list among the options
            options = hashable(options)
            key = (build, options, *map(_geometry, operands))
            template = self.templates.get(key)
        if template is None:
            template = self.templates[key] = self._new_template(build, operands, options)
        return template

    def _new_template(
        self, build: Build, operands: tuple[NkiTensor, ...], options: tuple[Any, ...]
    ) -> InstructionTemplate:
        """What `build` returns, or a copy for other places in HBM, on which no rule depends."""
        form = (build, options, *[t.geometry.form for t in operands])
        model = self.models.get(form)
        if model is None:
            template = self.models[form] = build(*operands, *options)
            self.prepare(template, operands)
            return template
        template = InstructionTemplate(*_fields(model))
        _place(template, operands)
        return template

    def record(
        self,
        template: InstructionTemplate,
        operands: Sequence[NkiTensor],
        arguments: Sequence[Any] | None = None,
    ) -> NkiInstruction:
        """Append an instruction to the trace and, in execute mode, compute its result.

        Called by a function of `nki.isa`, whose caller's line is recorded. `arguments` are those of
        the template's `run` where they are not the operands.
        """
        storages = tuple([t.storage for t in operands])
        launch, trace, replay = self.launch, self.trace, self.replay
        if launch.turns.draw:
            launch.turns.step(self.number)
        number = len(trace.records) if replay is None else replay.record
        regions, overlaps, writes = template.regions, template.overlaps, template.writes
        placed = operands
        if template.dynamic:
            placed = self._find_places(number, template, operands)
            if launch.lnc == 2 and template.hbm_operand >= 0:
                for at, t in enumerate(placed):
                    if t.geometry.indirect is not None and not t.geometry.on_chip:
                        touched = indexed_regions(t) if self.execute else ()
                        trace.indexed[number, at].update(touched)
            regions = tuple([t.geometry.region for t in placed])
            overlaps = tuple([t.geometry.layout.overlaps[t.geometry.region] for t in placed])
            if template.engine is not Engine.DMA:  # DMAs look at indices themselves
                arguments = _settled(template, arguments or operands, operands, placed)
        first_read = 0 if template.reads_dst else writes
        for at, s in enumerate(storages):
            if not s.initialised and at >= first_read and regions[at] not in s.written:
                self._check_written(template, placed, at, regions[at])
            if s.first < 0:
                s.first = number
            s.last = number
        if self.execute:
            template.run(*(operands if arguments is None else arguments))
        for at in range(writes):
            s, region = storages[at], regions[at]
            if not s.initialised:
                if region == 0:  # that of the whole tensor
                    s.initialised = True
                else:
                    s.written.add(region)
            if s.summed and template.engine is not Engine.TENSOR:
                s.summed.difference_update(overlaps[at])
        if replay is not None:
            replay.issue(trace, template, storages)
            return NkiInstruction(trace, number)
        frame = sys._getframe(2)
        code = frame.f_code
        line = self.lines.get((id(code), frame.f_lasti))
        if line is None:
            code, line = self._place_of(frame)
        trace.records.append((template, storages, code, line))
        return NkiInstruction(trace, number)

    def _place_of(self, frame: FrameType) -> tuple[CodeType, int]:
        """The kernel's code and line on the way to a frame, which is kept if it is the kernel's."""
        if frame.f_code.co_filename.startswith(PACKAGE):
            frame = kernel_frame()
        else:  # Python finds a line by a walk from the function's first
            self.lines[id(frame.f_code), frame.f_lasti] = frame.f_lineno
        return frame.f_code, frame.f_lineno

    def _find_places(
        self, number: int, template: InstructionTemplate, operands: Sequence[NkiTensor]
    ) -> list[NkiTensor]:
        """The operands, those that loop variables move where they are in this iteration."""
        placed = list(operands)
        moves: list[Move] = []
        for at, t in enumerate(operands):
            loop = t.index.loop if isinstance(t.index, VirtualRegister) else None
            if loop is None or t.geometry.indirect is None:
                continue
            place, step = t.index.value * t.geometry.indirect[2], loop.step * t.geometry.indirect[2]
            last = place + (loop.trips - 1) * step if self.replay is None else place
            if t.geometry.holds(place) and t.geometry.holds(last):
                geometry = t.geometry.moved(place)
                placed[at] = t.with_geometry(geometry, None)
                moves.append(Move(at, loop, geometry, step))
            elif not template.skips:
                refuse(
                    f"{template.opcode}: a dynamic index runs out of {t} in {loop.trips} "
                    "iterations; end the loop before, or use oob_mode.skip"
                )
        if moves and self.replay is None:
            self.trace.moves[number] = moves
        return placed

    def _check_written(
        self, template: InstructionTemplate, operands: Sequence[NkiTensor], at: int, region: int
    ) -> None:
        t = operands[at]
        if not t.storage.covered(region):
            verb = "adds to" if at < template.writes else "reads"
            storage = t.storage
            nothing = storage.written.isdisjoint(storage.layout.overlaps[region])
            which = "no element was ever" if nothing else "some elements were never"
            self.launch.undefined(
                f"{template.opcode}: {verb} {t}, at line {storage.line}, of which {which} written",
                nothing,
            )
            storage.written.add(region)  # noted once

    def prepare(self, template: InstructionTemplate, operands: Sequence[NkiTensor]) -> None:
        """Fill in what follows from the operands and the machine."""
        computes = template.engine <= Engine.GPSIMD
        for at, t in enumerate(operands):
            if computes and t.geometry.on_chip and at not in template.scales:
                views.engine_pattern(template.opcode, t)
                operand_rules.engine_operand(template.opcode, self.machine, t)
        for t in operands:
            if t.geometry.indirect is not None and t.geometry.indirect[0] == "columns":
                refuse(
                    f"{template.opcode}: {t} is a tensor indirection, which it does not take; "
                    "gather with tensor_copy first, or use .ap(vector_offset=) for DMA"
                )
        _place(template, operands)
        geometries = [t.geometry for t in operands]
        template.dynamic = any(g.indirect is not None for g in geometries)
        memories = [g.memory for g in geometries]
        in_hbm = [i for i, m in enumerate(memories) if not m.on_chip]
        template.hbm_operand = in_hbm[0] if in_hbm else -1
        template.on_sbuf = MemoryRegion.sbuf in memories
        template.on_psum = MemoryRegion.psum in memories
        if computes:
            template.ns = on_grid(self.machine.ns(template.engine, template.cycles))
            template.result_ns = on_grid(self.machine.result_of(template.engine, template.on_psum))


def _place(template: InstructionTemplate, operands: Sequence[NkiTensor]) -> None:
    """Check that the operands lie in their tensors, and fill in their regions."""
    for at, t in enumerate(operands):
        if at in template.scales:
            views.inside_storage(template.opcode, t, 2)
        elif not t.geometry.inside:
            views.inside_storage(template.opcode, t)
            t.geometry.inside = True
    geometries = [t.geometry for t in operands]
    for at in range(template.writes, len(operands)):
        geometries[at] = geometries[at].each_row(template.row_step)
    template.regions = tuple([g.region for g in geometries])
    template.overlaps = tuple([g.layout.overlaps[g.region] for g in geometries])


def _settled(
    template: InstructionTemplate,
    arguments: Sequence[Any],
    operands: Sequence[NkiTensor],
    moved: Sequence[NkiTensor],
) -> list[Any]:
    """The arguments of an engine's instruction, with operands in the places that were found."""
    for t in moved:
        if t.geometry.indirect is not None:
            refuse(
                f"{template.opcode}: {t} has an index that is not a loop's variable, or runs out "
                "of the tensor; only DMAs take others: copy it with dma_copy first"
            )
    places = {id(t): settled for t, settled in zip(operands, moved, strict=True)}
    return [places.get(id(a), a) for a in arguments]


class _State:
    core: SimulatedCore | None = None


_state = _State()


def active(name: str = "nki") -> SimulatedCore:
    """The core whose kernel is running. Raises RuntimeError outside a kernel."""
    core = _state.core
    if core is None:
        raise RuntimeError(
            f"{name} was called outside a kernel; call the kernel through neuroncore.simulate"
        )
    return core


def running() -> SimulatedCore | None:
    """The core whose kernel is running, or None."""
    return _state.core


def hashable(value: Any) -> Any:
    """A value with tuples in the places of lists, for keys."""
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


def _run_on(core: SimulatedCore, body: Callable[[SimulatedCore], Any]) -> Any:
    outer = _state.core
    _state.core = core
    try:
        result = body(core)
        if core.open_loops:
            refuse("a loop of the device cannot be left by break or return; let it run to its end")
        return result
    finally:
        _state.core = outer
