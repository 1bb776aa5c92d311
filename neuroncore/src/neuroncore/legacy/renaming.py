"""What the compiler of the Beta dialect does with tiles: what is overwritten whole is a new one.

Its tensors are values: a loop that loads into one tile runs ahead as if each iteration had its own.
A convolution that its author timed on trn2 at 3.83 ms in fp32 and 0.82 in fp16 is modelled at 11.2
and 6.3 without this (docs/benchmarks.md, "Students' kernels on the simulated core").
"""

from __future__ import annotations

from neuroncore.memory.storage import Storage
from neuroncore.timing.trace import Trace


def rename_overwritten(trace: Trace) -> None:
    """Give what an instruction overwrites whole, on chip, memory of its own from there on."""
    now: dict[Storage, Storage] = {}
    last: dict[Storage, int] = {}
    for number, (template, storages, code, line) in enumerate(trace.records):
        renamed = [now.get(s, s) for s in storages]
        for at in range(template.writes):
            old = storages[at]
            kept = template.reads_dst or template.dynamic or old.address or not old.memory.on_chip
            if template.regions[at] == 0 and not kept and renamed[at] in last:
                renamed[at] = now[old] = fresh = Storage(old.layout, old.name)
                fresh.code, fresh.line, fresh.store = old.code, old.line, old.store
                fresh.initialised, fresh.first = True, number
                trace.storages.append(fresh)
        last.update(dict.fromkeys(renamed, number))
        trace.records[number] = template, tuple(renamed), code, line
    for storage, number in last.items():
        storage.last = number
