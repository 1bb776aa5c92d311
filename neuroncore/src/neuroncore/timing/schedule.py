"""When each instruction runs: engines in order, DMA queues, dependencies, SBUF and PSUM capacity.

Cores are placed by themselves up to where they wait for each other.
"""

from __future__ import annotations

from collections import deque
from itertools import count

from neuroncore.core import KernelRun
from neuroncore.hardware import Machine, Model
from neuroncore.timing.list_scheduling import list_scheduled
from neuroncore.timing.placer import Placer
from neuroncore.timing.steady import check_bodies
from neuroncore.timing.times import Schedule
from neuroncore.turns import Meeting


def schedule(
    launch: KernelRun, model: Model = "calibrated", machine: Machine | None = None
) -> Schedule:
    """Place every instruction in time, by the costs of the launch's machine or of another.

    Where that machine's compiler reorders: in the quickest of the orders that there are.

    Raises:
        NkiValidationError: tensors do not fit.
    """
    machine = machine or launch.machine
    quickest = _placed(launch, model, machine)
    if machine.reorders:
        for other in list_scheduled(launch, machine):
            quickest = min(quickest, _placed(other, model, machine), key=lambda each: each.time_ns)
    return quickest


def _placed(launch: KernelRun, model: Model, machine: Machine) -> Schedule:
    """The schedule of a launch in its order."""
    for core in launch.cores:
        check_bodies(core.trace)
    placers = [Placer(core.trace, launch, machine, model) for core in launch.cores]
    waiting: dict[Meeting, list[Placer]] = {}
    numbers = count()
    left = deque(placers)
    while left:
        placer = left.popleft()
        meeting = placer.advance()
        if meeting is None:
            continue
        there = waiting.setdefault(meeting, [])
        there.append(placer)
        if len(there) == len(meeting.members):
            del waiting[meeting]  # a loop may come here again
            latest, number = max([p.barrier_end for p in there]), next(numbers)
            for placer in there:
                placer.pass_barrier(number, latest, meeting.ns)
            left.extend(there)
    for placer in placers:
        placer.add_up()
    return Schedule(machine, model, [p.times for p in placers])
