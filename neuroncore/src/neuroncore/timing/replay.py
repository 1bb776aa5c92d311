"""A loop's body that runs again: the device has one copy of it, so it must issue the same."""

from __future__ import annotations

from neuroncore.checks.base import refuse
from neuroncore.memory.storage import Storage
from neuroncore.timing.trace import InstructionTemplate, Loop, Trace

_REMEDY = "give each iteration the same instructions on the same tensors, or use range"


class Replay:
    """Where in a recorded body a further iteration has come.

    Attributes:
        record, storage, loop: numbers of the next instruction, tensor and inner loop.
    """

    def __init__(self) -> None:
        self.record = self.storage = self.loop = 0
        # tensors of this iteration, and those of the recorded one
        self._recorded: dict[Storage, Storage] = {}

    def begin(self, trace: Trace, loop: Loop) -> None:
        """Go to the start of a loop's body."""
        self.record, self.storage = loop.start, loop.first_storage
        self.loop = trace.loops.index(loop) + 1

    def allocate(self, trace: Trace, storage: Storage) -> None:
        """A tensor of the body: it takes the place of the recorded one."""
        recorded = trace.storages[self.storage] if self.storage < len(trace.storages) else None
        if recorded is None or recorded.layout is not storage.layout:
            refuse(f"an iteration allocates {storage.describe()}, which others do not; {_REMEDY}")
        self._recorded[storage] = recorded
        self.storage += 1

    def issue(
        self, trace: Trace, template: InstructionTemplate, storages: tuple[Storage, ...]
    ) -> None:
        """An instruction of the body."""
        records, at = trace.records, self.record
        renamed = tuple([self._recorded.get(s, s) for s in storages])
        if at == len(records) or records[at][0] is not template or records[at][1] != renamed:
            refuse(
                f"{template.opcode}: an iteration of a loop issues what its first did not, such as "
                f"other operands or options, and the device has one copy of the body; {_REMEDY}"
            )
        self.record += 1

    def enter(self, trace: Trace) -> Loop:
        """The inner loop that begins."""
        if self.loop == len(trace.loops) or trace.loops[self.loop].start != self.record:
            refuse(f"an iteration has a loop that others have not; {_REMEDY}")
        self.loop += 1
        return trace.loops[self.loop - 1]

    def end(self, loop: Loop) -> None:
        """The iteration is complete."""
        if self.record != loop.end or self.storage != loop.end_storage:
            refuse(f"an iteration of a loop issues less than its first; {_REMEDY}")
