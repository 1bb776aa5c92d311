"""A kernel as the instructions that it issues: recorded by one process, run by another.

A kernel is compiled for shapes, not for values. So it is called once where it sees neither a value
nor a clock that counts, and what it calls of `nki` is noted as JSON. `replayed` calls the same
again where the values are, and every rule is checked anew: whatever a document holds, it is no more
than a kernel.
"""

from __future__ import annotations

import base64
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np

from neuroncore import collectives, dtypes, isa, loops
from neuroncore import language as nl
from neuroncore.checks.base import NkiValidationError, kernel_frame, refuse
from neuroncore.checks.views import row_elements
from neuroncore.collectives import ReplicaGroup
from neuroncore.core import SimulatedCore, active
from neuroncore.dtypes import dtype_of
from neuroncore.isa.enums import OPTIONS
from neuroncore.kernel import Kernel
from neuroncore.memory.geometry import whole
from neuroncore.memory.indexing import VirtualRegister
from neuroncore.memory.indirection import IndirectTile
from neuroncore.memory.storage import Storage
from neuroncore.memory.tensor import NkiTensor

Document = dict[str, Any]
_REGISTERS = {f"register_{verb}" for verb in ("alloc", "move", "load")}
_CALLS: dict[str, Callable[..., Any]] = {
    name: call
    for module in (isa, collectives)
    for name in module.__all__
    if inspect.isfunction(call := getattr(module, name))
    and not name.startswith("get_")
    and name not in _REGISTERS
    and "rank_id" not in name
}
"""What a program is made of. Registers have their values where the kernel is traced."""


class _Tape:
    """What one core has called; `steps` are [name, arguments, keywords, line] and the like."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.steps: list[Any] = []
        self.storages: dict[Storage, int] = {}
        self.loops: list[Any] = []
        self.inside = False

    def add(self, *step: Any) -> None:
        """Note a step, at the same one of each run no more: a budget looks at its times."""
        self.steps.append(step)
        if len(self.steps) > self.most:
            refuse(
                f"the kernel has more than {self.most:,} instructions and tensors; use a loop of "
                "the device, larger tiles, or a larger limit (--max-instructions)"
            )

    def number(self, storage: Storage) -> int:
        return self.storages.setdefault(storage, len(self.storages))

    def encode(self, value: Any) -> Any:
        """A value of the API as JSON; whatever is not plain is {kind: what}."""
        if isinstance(value, dtypes.DType | type) and not isinstance(value, bool):
            return {"dtype": str(dtype_of(value))}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, list):
            return [self.encode(v) for v in value]
        if isinstance(value, tuple):
            return {"tuple": [self.encode(v) for v in value]}
        if type(value).__name__ in OPTIONS:
            return {"option": [type(value).__name__, value.name]}
        if isinstance(value, ReplicaGroup):
            return {"group": [[int(rank) for rank in ranks] for ranks in value.groups]}
        if isinstance(value, VirtualRegister):
            loop = value.loop is not None
            return {"loop": self.loops.index(value.loop)} if loop else {"register": value.value}
        if isinstance(value, IndirectTile):
            return {"indirect": [*map(self.encode, (value.base, value.index)), value.shape[1]]}
        if isinstance(value, NkiTensor):
            return {"t": self._view(value)}
        if not hasattr(nl, name := getattr(value, "__name__", "")):
            refuse(f"an argument of an instruction must be a tile or a constant; got {value!r:.80}")
        return {"op": name}

    def _view(self, tensor: NkiTensor) -> list[Any]:
        geometry, number = tensor.geometry, self.number(tensor.storage)
        if geometry is whole(geometry.layout):
            return [number]
        place = [geometry.dtype, geometry.shape, geometry.strides, geometry.offset]
        return [number, *place, geometry.indirect, self.encode(tensor.index)]


class Recorder:
    """Notes what kernels call, up to so many steps, from now until the process ends."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tapes: dict[int, _Tape] = {}
        replaced: dict[int, Any] = {id(call): self._noted(n, call) for n, call in _CALLS.items()}
        replaced[id(nl.shared_constant)] = self._constant(nl.shared_constant)
        for name, module in list(sys.modules.items()):
            if name.startswith("neuroncore.") and not name.startswith(__name__):
                for key, value in list(vars(module).items()):
                    if id(value) in replaced:
                        setattr(module, key, replaced[id(value)])
                    elif inspect.isfunction(value):  # nl.reciprocal keeps isa's in a cell
                        for cell in value.__closure__ or ():
                            held = cell.cell_contents
                            cell.cell_contents = replaced.get(id(held), held)
        loops._counted = self._loop(loops._counted)  # pyright: ignore
        cast("Any", SimulatedCore).allocate = self._allocated(SimulatedCore.allocate)

    def recorded(self, kernel: Kernel, lnc: int) -> Kernel:
        """The kernel, on a number of cores; `document` is of its last launch."""
        self._tapes.clear()

        @functools.wraps(kernel.func)
        def run(*args: Any, **kwargs: Any) -> Any:
            core = active()
            tape = self._tapes[core.number] = _Tape(self._most)
            for storage in core.trace.storages:
                tape.number(storage)
            result = kernel.func(*args, **kwargs)
            many = isinstance(result, tuple | list)
            tape.steps.append(["end", *map(tape.encode, result if many else [result])])
            return result

        return Kernel(run, lnc, kernel.schedule)

    def document(self, cores: list[SimulatedCore]) -> Document:
        """The program of all cores of the launch that has ended."""
        programs = [
            {
                "steps": self._tapes[number].steps,
                "edges": [[later, *earlier] for later, earlier in core.trace.edges.items()],
                "records": len(core.trace.records),
            }
            for number, core in enumerate(cores)
        ]
        return {"cores": programs}

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            tape = self._tapes[active(name).number]
            if tape.inside:
                return call(*args, **kwargs)
            tape.inside = True
            try:
                done = call(*args, **kwargs)
            finally:
                tape.inside = False
            kept = {k: tape.encode(v) for k, v in kwargs.items() if k != "name"}
            line = kernel_frame().f_lineno
            tape.add(name, [tape.encode(v) for v in args], kept, line)
            return done

        return noted

    def _constant(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def constant(value: Any) -> Any:
            array = value if isinstance(value, np.ndarray) else np.load(value, allow_pickle=False)
            tensor, tape = call(array), self._tapes[active().number]
            text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            number = tape.number(tensor.storage)
            tape.steps.append(["constant", number, tensor.dtype, array.shape, text])
            return tensor

        return constant

    def _allocated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def allocate(core: SimulatedCore, *args: Any, **kwargs: Any) -> NkiTensor:
            tensor = call(core, *args, **kwargs)
            tape, storage = self._tapes[core.number], tensor.storage
            if not tape.inside:
                number, layout = tape.number(storage), storage.layout
                what = [layout.shape, layout.dtype, layout.memory.label, storage.address]
                tape.add("new", number, *what, storage.line)
            return tensor

        return allocate

    def _loop(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(name: str, lower: Any, upper: Any, step: int) -> Any:
            tape = self._tapes[active(name).number]
            for register in call(name, lower, upper, step):
                bounds = [getattr(bound, "value", bound) for bound in (lower, upper)]
                tape.steps.append(["loop", len(tape.loops), *bounds, step])
                tape.loops.append(register.loop)
                yield register
                tape.steps.append(["next"])

        return counted


class _Player:
    """One core's part of a program, run on it."""

    def __init__(self, inputs: list[Any]) -> None:
        self.tensors: dict[int, NkiTensor] = dict(enumerate(inputs))
        self.registers: dict[int, VirtualRegister] = {}
        self.outputs: list[NkiTensor] = []
        self.line = 0

    def run(self, steps: Iterator[Any]) -> None:
        """Run steps up to the end of a loop's body, or of the program."""
        for kind, *rest in steps:
            if kind == "next":
                return
            if kind == "new":
                number, shape, dtype, memory, address, self.line = rest
                place = address and tuple(address)
                made = nl.ndarray(tuple(shape), dtype, nl.MemoryRegion(memory), address=place)
                self.tensors[number] = made
            elif kind == "constant":
                number, dtype, shape, text = rest
                values = np.frombuffer(base64.b64decode(text), dtype_of(dtype).numpy)
                self.tensors[number] = nl.shared_constant(values.reshape(shape).copy())
            elif kind == "loop":
                self._loop(rest, steps)
            elif kind == "end":
                self.outputs = [self.decode(value) for value in rest]
            else:
                args, kwargs, self.line = rest
                keywords = {name: self.decode(value) for name, value in kwargs.items()}
                _CALLS[kind](*map(self.decode, args), **keywords)

    def _loop(self, loop: list[int], steps: Iterator[Any]) -> None:
        number, lower, upper, step = loop
        body: list[Any] = []
        depth = 1
        while depth:
            body.append(next(steps))
            depth += (body[-1][0] == "loop") - (body[-1][0] == "next")

        def once(register: VirtualRegister) -> None:
            self.registers[number] = register
            self.run(iter(body))

        nl.fori_loop(lower, upper, once, step)

    def decode(self, value: Any) -> Any:
        """What `_Tape.encode` made JSON of."""
        if isinstance(value, list):
            return [self.decode(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((kind, what),) = value.items()
        if kind == "t":
            return self._view(*what)
        if kind == "tuple":
            return tuple([self.decode(v) for v in what])
        if kind == "indirect":
            return self.decode(what[0]).indirect(self.decode(what[1]), what[2])
        if kind == "loop":
            return self.registers[what]
        if kind == "option":
            return OPTIONS[what[0]][what[1]]
        made = {"dtype": dtype_of, "group": ReplicaGroup, "register": VirtualRegister}
        return getattr(nl, nl.__all__[nl.__all__.index(what)]) if kind == "op" else made[kind](what)

    def _view(self, number: int, *place: Any) -> NkiTensor:
        tensor = self.tensors[number]
        if not place:
            return tensor
        dtype, shape, strides, offset, how, index = place
        numbers, row = [*shape, *strides, offset], row_elements(tensor.geometry, dtype_of(dtype))
        walks = not tensor.geometry.on_chip or shape[0] == 1 or strides[0] % row == 0 < strides[0]
        known = how is None or (how[0] in ("scalar", "vector") and how[2] >= 0)
        whole_numbers = all(type(n) is int and n >= 0 for n in numbers)
        if not (whole_numbers and walks and known and len(shape) == len(strides) > 0):
            raise ValueError(f"it has a view that no kernel can make: {place!r:.80}")
        key = tuple(shape), tuple(strides), offset, dtype_of(dtype), how and tuple(how)
        return tensor.with_geometry(tensor.geometry.derive(*key), self.decode(index))


def replayed(document: Any, inputs: Iterable[str], lnc: int) -> Kernel:
    """A recorder's document as a kernel of the inputs, which are arrays.

    It raises NkiValidationError for a broken rule, with the line of the recorded kernel, and any
    Exception for what no recorder writes.
    """

    def play(*args: Any) -> tuple[NkiTensor, ...]:
        player, core = _Player(list(args)), active()
        try:
            program = document["cores"][core.number]
            player.run(iter(program["steps"]))
        except NkiValidationError as error:
            text = re.sub(r" \[[^\[\]]*:\d+\]$", "", str(error))
            raise NkiValidationError(f"{text} [line {player.line}]") from error
        records = program["records"]
        if len(core.trace.records) != records:
            raise ValueError("run again, it issues other instructions")
        for later, *earlier in program["edges"]:
            if not all(0 <= e < later < records for e in earlier):
                raise ValueError("an instruction waits for one that is not before it")
            core.trace.edges[later] = earlier
        return tuple(player.outputs)

    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = inspect.Signature([inspect.Parameter(name, plain) for name in inputs])
    play.__signature__ = named  # pyright: ignore[reportFunctionMemberAccess]
    return Kernel(play, lnc)
