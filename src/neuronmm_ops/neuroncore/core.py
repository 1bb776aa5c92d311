"""The running core: allocates tensors, issues instructions, keeps both cores of an LNC in step."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from neuronmm_ops.hardware import RESULT_CYCLES, Engine, Machine
from neuronmm_ops.neuroncore.checks import tensors as check
from neuronmm_ops.neuroncore.checks import views
from neuronmm_ops.neuroncore.checks.base import PACKAGE, kernel_frame, note, refuse
from neuronmm_ops.neuroncore.dtypes import DType, dtype_of
from neuronmm_ops.neuroncore.memory.liveness import CapacityPolicy
from neuronmm_ops.neuroncore.memory.storage import Layout, MemoryRegion, Storage
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor, tensor_of
from neuronmm_ops.neuroncore.timing.trace import InstructionTemplate, NkiInstruction, Trace

Build = Callable[..., InstructionTemplate]
_STOP_SECONDS = 5.0
Uninitialised = Literal["partial", "raise", "warn"]

_geometry = attrgetter("geometry")
_storage = attrgetter("storage")


class KernelRun:
    """One call of a kernel on one or two cores, which take turns: one runs until it must wait."""

    def __init__(
        self,
        machine: Machine,
        execute: bool,
        cores: int,
        seed: int = 0,
        uninitialised: Uninitialised = "partial",
    ) -> None:
        self.machine = machine
        self.execute = execute
        self.precise = os.environ.get("NKI_PRECISE_FP", "1") != "0"
        self.seed = seed
        self.uninitialised: Uninitialised = uninitialised
        self.capacity: CapacityPolicy = "raise"
        self.shared: list[Storage] = []
        self.layouts: dict[tuple[Any, ...], Layout] = {}
        self.cores = [SimulatedCore(self, i) for i in range(cores)]
        self.failure: BaseException | None = None
        self._turn = threading.Condition()
        self._running = 0
        self._ended: set[int] = set()
        self._barriers = [0] * cores

    def run(self, body: Callable[[SimulatedCore], Any]) -> list[Any]:
        """Run `body` once per core and return its results."""
        if len(self.cores) == 1:
            return [_run_on(self.cores[0], body)]
        results: list[Any] = [None] * len(self.cores)
        outer = _state.core

        def thread(core: SimulatedCore) -> None:
            try:
                self._wait_for_turn(core.program_id)
                with np.errstate(all="ignore"):  # a thread has its own
                    results[core.program_id] = _run_on(core, body)
            except BaseException as error:  # handed to the caller's thread
                self.failure = self.failure or error
            finally:
                self._ended.add(core.program_id)
                self._pass_turn(core.program_id)

        threads = [threading.Thread(target=thread, args=(c,), daemon=True) for c in self.cores]
        try:
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        except BaseException as error:  # Ctrl-C comes to the caller's thread
            self._stop(threads, error)
            raise
        finally:
            _state.core = outer
        if self.failure is not None:
            raise self.failure
        return results

    def _stop(self, threads: list[threading.Thread], error: BaseException) -> None:
        """End the cores' threads: one runs and is interrupted, the other waits and is woken."""
        with self._turn:
            self.failure = self.failure or error
            self._turn.notify_all()
        kind = ctypes.py_object(type(error))
        for t in threads:
            if t.is_alive() and t.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(t.ident), kind)
        for t in filter(threading.Thread.is_alive, threads):
            t.join(_STOP_SECONDS)

    def undefined(self, problem: str, nothing: bool = False) -> None:
        """Refuse, or note, a use of elements that were never written: some, or all of them."""
        policy = self.uninitialised
        if policy == "raise" or (policy == "partial" and nothing):
            refuse(f"{problem}; write the tile, or slice to what was written")
        note(f"{problem}; they hold NaN or 4 here and anything on the device")

    def barrier(self, core: SimulatedCore) -> int:
        """Wait until the other core comes to its barrier of the same number; returns the number."""
        number, other = self._barriers[core.program_id], 1 - core.program_id
        self._barriers[core.program_id] += 1
        while self._barriers[other] <= number:
            self._pass_turn(core.program_id)
            if other in self._ended and self._barriers[other] <= number:
                refuse(
                    f"core_barrier/sendrecv {number}: core {core.program_id} waits but the other "
                    "core has ended; both cores must take the same branches"
                )
            self._wait_for_turn(core.program_id)
        return number

    def _pass_turn(self, program_id: int) -> None:
        with self._turn:
            if 1 - program_id not in self._ended:
                self._running = 1 - program_id
            self._turn.notify_all()

    def _wait_for_turn(self, program_id: int) -> None:
        with self._turn:
            while self._running != program_id and self.failure is None:
                self._turn.wait()
        if self.failure is not None:
            raise self.failure
        _state.core = self.cores[program_id]

    def layout(self, shape: tuple[int, ...], dtype: DType, memory: MemoryRegion) -> Layout:
        """The layout that all tensors of this shape, dtype and memory share."""
        key = (shape, dtype, memory)
        found = self.layouts.get(key)
        if found is None:
            found = self.layouts[key] = Layout(shape, dtype, memory)
        return found


class SimulatedCore:
    """One physical NeuronCore of a launch."""

    def __init__(self, launch: KernelRun, program_id: int) -> None:
        self.launch = launch
        self.machine = launch.machine
        self.execute = launch.execute
        self.program_id = program_id
        self.trace = Trace()
        self.templates: dict[tuple[Any, ...], Any] = {}
        self.shared_outputs = 0
        self.constants: dict[Any, NkiTensor] = {}
        self.state: dict[str, Any] = {}
        """What instructions keep between calls: random number generators, Vector accumulators."""

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
        if memory is MemoryRegion.shared_hbm:
            order = self.shared_outputs
            self.shared_outputs += 1
            if order < len(launch.shared):
                storage = launch.shared[order]
                if (storage.layout.shape, storage.layout.dtype) != (shape, dtype):
                    refuse(
                        f"nl.ndarray: core 1 allocates {list(shape)} {dtype} in shared_hbm where "
                        f"core 0 has {storage.describe()}; both cores must allocate the same"
                    )
                self.trace.storages.append(storage)
                return tensor_of(storage)
        trace = self.trace
        storage = Storage(layout, name or f"{memory.value}{len(trace.storages)}")
        if memory is MemoryRegion.shared_hbm:
            launch.shared.append(storage)
        frame = kernel_frame()
        storage.code, storage.line = frame.f_code, frame.f_lineno
        if address is not None:
            storage.address = check.address_of(self.machine, storage, address)
        if self.execute:
            storage.fill_fresh(launch.precise)
        trace.storages.append(storage)
        return tensor_of(storage)

    def adopt(self, storage: Storage) -> NkiTensor:
        """Take an input or constant, which is initialised, among the core's tensors."""
        storage.initialised = True
        self.trace.storages.append(storage)
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
            found = self.templates.get(key)
        except TypeError:  # a list among the options
            options = hashable(options)
            key = (build, options, *map(_geometry, operands))
            found = self.templates.get(key)
        if found is None:
            found = self.templates[key] = build(*operands, *options)
            self.prepare(found, operands)
        return found

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
        storages = tuple(map(_storage, operands))
        trace = self.trace
        number = len(trace.records)
        writes = template.writes
        for at, s in enumerate(storages):
            region = template.regions[at]
            reads = at >= writes or template.reads_dst
            if reads and not s.initialised and region not in s.written:
                self._check_written(template, operands, at)
            if s.first < 0:
                s.first = number
            s.last = number
        if self.execute:
            template.run(*(operands if arguments is None else arguments))
        for at in range(writes):
            s = storages[at]
            if not s.initialised:
                s.written.add(template.regions[at])
            if s.summed and template.engine is not Engine.TENSOR:
                s.summed.difference_update(template.overlaps[at])
        frame = sys._getframe(2)
        if frame.f_code.co_filename.startswith(PACKAGE):
            frame = kernel_frame()
        trace.records.append((template, storages, frame.f_code, frame.f_lineno))
        return NkiInstruction(trace, number)

    def _check_written(
        self, template: InstructionTemplate, operands: Sequence[NkiTensor], at: int
    ) -> None:
        t = operands[at]
        if not t.storage.covered(template.regions[at]):
            verb = "adds to" if at < template.writes else "reads"
            storage, region = t.storage, template.regions[at]
            nothing = storage.written.isdisjoint(storage.layout.overlaps[region])
            which = "no element was ever" if nothing else "some elements were never"
            self.launch.undefined(
                f"{template.opcode}: {verb} {t}, at line {storage.line}, of which {which} written",
                nothing,
            )
            storage.written.add(region)  # noted once

    def prepare(self, template: InstructionTemplate, operands: Sequence[NkiTensor]) -> None:
        """Fill in what follows from the operands and the machine."""
        for t in operands:
            views.inside_storage(template.opcode, t)
            if template.engine <= Engine.GPSIMD:
                views.engine_pattern(template.opcode, t)
        geometries = [t.geometry for t in operands]
        for at in range(template.writes, len(operands)):
            geometries[at] = geometries[at].each_row(template.row_step)
        template.dynamic = any(g.indirect is not None for g in geometries)
        template.regions = tuple([g.region for g in geometries])
        template.overlaps = tuple([g.layout.overlaps[g.region] for g in geometries])
        memories = [g.memory for g in geometries]
        in_hbm = [i for i, m in enumerate(memories) if not m.on_chip]
        template.hbm_operand = in_hbm[0] if in_hbm else -1
        template.on_sbuf = MemoryRegion.sbuf in memories
        template.on_psum = MemoryRegion.psum in memories
        if template.engine <= Engine.GPSIMD:
            template.ns = self.machine.ns(template.engine, template.cycles)
            latency = RESULT_CYCLES.get(template.engine, RESULT_CYCLES[Engine.VECTOR])
            template.result_ns = self.machine.ns(template.engine, latency)


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
        return body(core)
    finally:
        _state.core = outer
