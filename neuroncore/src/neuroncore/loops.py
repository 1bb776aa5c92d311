"""Loops that run on the device: `nl.fori_loop`, `nl.while_loop`, `nl.dynamic_range` (NKI 0.6).

A body is recorded once, as the device has one copy of it ("NKI Dynamic Loops"; language guide,
"Dynamic Control Flow"; migration guide 0.5 to 0.6). In trace mode it also runs once. In execute
mode it runs for every iteration's values, and must issue the same instructions each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from neuroncore import core as running
from neuroncore.checks.base import refuse
from neuroncore.core import SimulatedCore
from neuroncore.memory.indexing import VirtualRegister
from neuroncore.timing.replay import Replay
from neuroncore.timing.trace import Loop

Bound = int | VirtualRegister


def fori_loop(
    lower: Bound, upper: Bound, body_fun: Callable[[VirtualRegister], None], step: int = 1
) -> None:
    """Call body_fun(i) for i from lower to upper on the device; i is a read-only register."""
    if not callable(body_fun):
        refuse(f"nl.fori_loop: body_fun must be a function of the variable; got {body_fun!r}")
    for i in _counted("nl.fori_loop", lower, upper, step):
        if body_fun(i) is not None:
            refuse("nl.fori_loop: the body returns a value; keep state in SBUF or HBM instead")


def dynamic_range(
    start: Bound, stop: Bound | None = None, step: int = 1
) -> Iterator[VirtualRegister]:
    """Deprecated: the loop variable, a read-only register, of a loop on the device; `fori_loop`."""
    lower, upper = (0, start) if stop is None else (start, stop)
    return _counted("nl.dynamic_range", lower, upper, step)


def while_loop(
    init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]
) -> None:
    """While the register is not 0: register = body_fun(register), on the device."""
    core = running.active("nl.while_loop")
    register, trips = init, 0
    if not isinstance(init, VirtualRegister):
        refuse(f"nl.while_loop: init must be a register; got {init!r}; use nisa.register_alloc")
    if register.value == 0:
        return
    recorder = _Recorder(core, "nl.while_loop")
    while register.value != 0:
        recorder.begin()
        before, value = register, register.value
        register = body_fun(register)
        recorder.end()
        trips += 1
        if register is before and register.value == value and not core.execute:
            refuse(
                'nl.while_loop: its condition is data, which mode="trace" does not compute; '
                'use "execute"'
            )
        if not isinstance(register, VirtualRegister):
            refuse(f"nl.while_loop: the body must return the condition register; got {register!r}")
    recorder.close(trips)


def _counted(name: str, lower: Bound, upper: Bound, step: int) -> Iterator[VirtualRegister]:
    """The loop variable of each iteration that the kernel's code runs."""
    core = running.active(name)
    if not isinstance(step, int) or step < 1:
        refuse(f"{name}: step must be a positive int; got {step!r}")
    values = range(_value(name, lower), _value(name, upper), step)
    if not values:
        return
    recorder = _Recorder(core, name, step, len(values))
    for value in values if core.execute else values[:1]:
        recorder.begin()
        yield VirtualRegister(value, frozen=True, loop=recorder.loop)
        recorder.end()
    recorder.close(len(values))


def _value(name: str, bound: Bound) -> int:
    if isinstance(bound, int):
        return bound
    if not isinstance(bound, VirtualRegister):
        refuse(f"{name}: a bound must be an int or a register; got {bound!r}")
    if bound.loop is not None:
        refuse(
            f"{name}: a bound is the variable of an outer loop, so trips would differ, which the "
            "simulated core does not schedule; use range for the outer loop"
        )
    return bound.value


class _Recorder:
    """Records the body of one loop, or follows it where it is recorded."""

    def __init__(self, core: SimulatedCore, name: str, step: int = 0, trips: int = 0) -> None:
        if core.state.get("no_reorder"):
            refuse(f"{name}: a loop of the device cannot be in nl.no_reorder(); put that into it")
        self.core, self.trace, self.name = core, core.trace, name
        self.outer = core.replay
        core.open_loops += 1
        if self.outer is not None:
            self.loop = self.outer.enter(self.trace)
        else:
            self.loop = Loop(len(self.trace.records), len(self.trace.storages), step, trips)
            self.trace.loops.append(self.loop)
        self.recorded = self.outer is not None

    def begin(self) -> None:
        """An iteration begins."""
        self.constants = dict(self.core.constants)
        if self.recorded:
            replay = self.outer or Replay()
            replay.begin(self.trace, self.loop)
            self.core.replay = replay

    def end(self) -> None:
        """An iteration is complete."""
        core, loop = self.core, self.loop
        core.constants = self.constants  # those that the body loaded are its own
        if core.replay is not None:
            core.replay.end(loop)
            return
        loop.end, loop.end_storage = len(self.trace.records), len(self.trace.storages)
        self.recorded = True

    def close(self, trips: int) -> None:
        """The loop is complete."""
        core, loop = self.core, self.loop
        core.open_loops -= 1
        core.replay = self.outer
        if self.outer is not None:
            if loop.trips != trips:
                refuse(
                    f"{self.name}: an inner loop runs {loop.trips} times, then {trips}, which the "
                    "simulated core does not schedule; use range for the outer loop"
                )
            return
        loop.trips = trips
        self._hold()
        if not core.execute:
            self._write()

    def _hold(self) -> None:
        """What the body uses from outside is in use in every iteration, up to the loop's end."""
        loop, trace = self.loop, self.trace
        own = set(trace.storages[loop.first_storage : loop.end_storage])
        for _, storages, _, _ in trace.records[loop.start : loop.end]:
            loop.outer.update(storages)
        loop.outer -= own
        for s in loop.outer:
            s.last = loop.end - 1

    def _write(self) -> None:
        """Note what the iterations that did not run write through the loop's variable."""
        loop, trace = self.loop, self.trace
        for record in range(loop.start, loop.end):
            template, storages, _, _ = trace.records[record]
            for move in trace.moves.get(record, ()):
                written = move.operand < template.writes and move.loop is loop
                if written and not storages[move.operand].initialised:
                    storages[move.operand].written.update(move.regions(loop.trips))
