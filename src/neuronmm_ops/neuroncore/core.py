"""The running core: allocates tensors and issues instructions; the cores of a launch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal

from neuronmm_ops.hardware import RESULT_CYCLES, Engine, Machine
from neuronmm_ops.neuroncore.checks import tensors as check
from neuronmm_ops.neuroncore.checks.base import PACKAGE, kernel_frame, refuse
from neuronmm_ops.neuroncore.dtypes import DType, dtype_of
from neuronmm_ops.neuroncore.memory.storage import Layout, MemoryRegion, Storage
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor, tensor_of
from neuronmm_ops.neuroncore.timing.trace import InstructionTemplate, NkiInstruction, Trace
from neuronmm_ops.neuroncore.turns import Turns

Build = Callable[..., InstructionTemplate]
Follow = Literal["documentation", "kernels"]

_geometry = attrgetter("geometry")
_storage = attrgetter("storage")


class KernelRun:
    """One call of a kernel: `lnc` cores for each of `ranks` ranks, which take turns.

    Args:
        machine: the target.
        execute: compute values.
        lnc: physical cores of a rank, which share its HBM tensors.
        seed: of the random number generators.
        ranks: how many ranks run the kernel, each with its own memories.
        follow: what instructions do where documentation and public kernels contradict each other.
    """

    def __init__(
        self,
        machine: Machine,
        execute: bool,
        lnc: int,
        seed: int = 0,
        ranks: int = 1,
        follow: Follow = "documentation",
    ) -> None:
        self.machine = machine
        self.execute = execute
        self.precise = os.environ.get("NKI_PRECISE_FP", "1") != "0"
        self.lnc, self.ranks, self.seed, self.follow = lnc, ranks, seed, follow
        self.shared: list[list[Storage]] = [[] for _ in range(ranks)]
        self.layouts: dict[tuple[Any, ...], Layout] = {}
        self.cores = [SimulatedCore(self, i) for i in range(ranks * lnc)]
        self.turns = Turns(len(self.cores), self._take)

    def run(self, body: Callable[[SimulatedCore], Any]) -> list[Any]:
        """Run `body` once per core and return its results."""
        if len(self.cores) == 1:
            return [_run_on(self.cores[0], body)]
        outer = _state.core
        try:
            return self.turns.run(lambda i: _run_on(self.cores[i], body))
        finally:
            _state.core = outer

    def _take(self, number: int) -> None:
        _state.core = self.cores[number]

    def layout(self, shape: tuple[int, ...], dtype: DType, memory: MemoryRegion) -> Layout:
        """The layout that all tensors of this shape, dtype and memory share."""
        key = (shape, dtype, memory)
        found = self.layouts.get(key)
        if found is None:
            found = self.layouts[key] = Layout(shape, dtype, memory)
        return found


class SimulatedCore:
    """One physical NeuronCore of a launch."""

    def __init__(self, launch: KernelRun, number: int) -> None:
        self.launch = launch
        self.machine = launch.machine
        self.execute = launch.execute
        self.number = number
        self.rank, self.program_id = divmod(number, launch.lnc)
        first = self.rank * launch.lnc
        self.of_rank = tuple(range(first, first + launch.lnc))
        """Numbers of the cores of its rank."""
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
            order, shared = self.shared_outputs, launch.shared[self.rank]
            self.shared_outputs += 1
            if order < len(shared):
                storage = shared[order]
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
            launch.shared[self.rank].append(storage)
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
        if not t.storage.covered(t.geometry):
            verb = "adds to" if at < template.writes else "reads"
            refuse(
                f"{template.opcode}: {verb} {t}, at line {t.storage.line}, of which some elements "
                "were never written; write the tile, or slice to what was written"
            )

    def prepare(self, template: InstructionTemplate, operands: Sequence[NkiTensor]) -> None:
        """Fill in what follows from the operands and the machine."""
        geometries = [t.geometry for t in operands]
        for t in operands:
            if t.geometry.indirect is not None and t.geometry.indirect[0] == "columns":
                refuse(
                    f"{template.opcode}: {t} is a tensor indirection, which it does not take; "
                    "gather with tensor_copy first, or use .ap(vector_offset=) for DMA"
                )
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


def _run_on(core: SimulatedCore, body: Callable[[SimulatedCore], Any]) -> Any:
    outer = _state.core
    _state.core = core
    try:
        return body(core)
    finally:
        _state.core = outer
