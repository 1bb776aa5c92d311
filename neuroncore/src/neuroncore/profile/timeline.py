"""The timeline of a profile as one HTML page, which a browser opens without a network.

The files of `page/` are put into one, with the trace as arrays: deflated, in base64. Times are
modelled.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from neuroncore.files import replacing
from neuroncore.memory import liveness
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.profile import report
from neuroncore.profile.lanes import LaneRows, lane_of
from neuroncore.profile.metrics import (
    ENGINE_NAMES,
    WAIT_NAMES,
    critical_steps,
    occupancy,
    statement,
)
from neuroncore.profile.places import TensorPlace, name_of, places
from neuroncore.timing.times import CoreSchedule
from neuroncore.timing.trace import Record

if TYPE_CHECKING:
    from neuroncore.profile.profile import Profile

_PAGE = resources.files("neuroncore.profile") / "page"
_SCRIPTS = ("trace.js", "canvas.js", "page.js")
_TICKS = 2**31 - 1
"""Times are whole ticks: a 2^31th of the launch, so that 32 bits hold them."""


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write the page; it appears under its name when it is complete."""
    page = _page(profile)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")


def _page(profile: Profile) -> str:
    style = _file("page.css")
    script = "\n".join([_file(name) for name in _SCRIPTS])
    arrays = _Arrays()
    about = json.dumps(_document(profile, arrays), allow_nan=False)
    parts = {
        "title": _escaped(f"{profile.kernel_name} on {profile.target}"),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "style": style,
        "script": script,
        "text": _escaped(str(profile)),
        "about": about.replace("<", "\\u003c"),  # no text may end the script
        "arrays": arrays.packed(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return _PAGE.joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What the page's content security policy allows to run, and nothing else."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class _Arrays:
    """Numbers by the thousand, in one block of bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: Any, dtype: str) -> dict[str, Any]:
        """Keep an array; returns where it is, for the page."""
        array = np.ascontiguousarray(np.asarray(values), np.dtype(dtype).newbyteorder("<"))
        where = {"type": dtype, "offset": self._size, "count": array.size}
        padded = array.tobytes()
        padded += bytes(-len(padded) % 8)
        self._parts.append(padded)
        self._size += len(padded)
        return where

    def packed(self) -> str:
        """All of them, deflated, in base64."""
        return base64.b64encode(zlib.compress(b"".join(self._parts))).decode()


def _document(p: Profile, arrays: _Arrays) -> dict[str, Any]:
    ticks_per_ns = _TICKS / p.schedule.time_ns if p.schedule.time_ns else 1.0
    kinds, lines = _Kinds(), _SourceLines()
    tensors = _Tensors(lines)
    steps = critical_steps(p.schedule)
    cores = [
        _core(
            core,
            {i for at, i, _, _ in steps if at == number},
            *(kinds, lines, tensors, arrays, ticks_per_ns, p),
        )
        for number, core in enumerate(p.schedule.cores)
    ]
    return {
        "kernel": p.kernel_name,
        "facts": _facts(p),
        "time_ns": p.schedule.time_ns,
        "ticks_per_ns": ticks_per_ns,
        "cores": cores,
        "kinds": kinds.documents,
        "places": lines.documents,
        "tensors": tensors.documents(),
        "waits": WAIT_NAMES,
        "path": _path(steps, arrays, p.schedule.time_ns, ticks_per_ns),
        "what_would_help": p.what_would_help,
        "what_if": [
            [entry.resource, f"if {entry.freed}", entry.time_ms, entry.speedup, entry.advice]
            for entry in p.what_if
        ],
        "critical_lines": [
            {
                "core": entry.core,
                "place": f"{entry.file}:{entry.line}",
                "text": entry.text,
                "opcode": entry.opcode,
                "wait": entry.wait,
                "steps": entry.steps,
                "time_ms": entry.time_ms,
                "latency_ms": entry.latency_ms,
            }
            for entry in p.critical_path
        ],
    }


def _facts(p: Profile) -> list[tuple[str, str]]:
    """What the head of the page says, a line each."""
    cores = "1 core" if p.lnc == 1 else f"{p.lnc} cores"
    return [
        ("kernel", f"{p.kernel_name} on {p.target}, {cores}, {p.model} model"),
        ("time", f"{p.time_ms * 1e3:,.2f} us (modelled{_range(p)})"),
        (
            "roofline",
            f"{p.roofline_ms * 1e3:,.2f} us (modelled), {p.roofline_share:.1%} of the time",
        ),
        ("instructions", f"{p.instructions:,}"),
        ("HBM", report.quantity(p.hbm_bytes, "B")),
        ("FLOPs", f"{report.quantity(p.flops, 'FLOP')}, MFU {p.mfu:.1%}"),
    ]


def _range(p: Profile) -> str:
    """The times under both DMA models, where they differ in print."""
    low, high = f"{p.time_low_ms * 1e3:,.2f}", f"{p.time_high_ms * 1e3:,.2f}"
    return "" if low == high else f"; {low} to {high} under the DMA models"


class _Kinds:
    """What instructions of one template have in common, in words."""

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []
        self._numbers: dict[Any, int] = {}

    def number(self, record: Record) -> int:
        """The number of a record's kind; it is described when it first appears."""
        template, storages, _, _ = record
        number = self._numbers.get(template)
        if number is not None:
            return number
        shapes = [
            f"{s.layout.dtype}[{','.join(map(str, s.layout.shape))}] in {s.memory.value}"
            for s in storages
        ]
        document: dict[str, Any] = {
            "opcode": template.opcode,
            "engine": int(template.engine),
            "writes": shapes[: template.writes],
            "reads": shapes[template.writes :],
        }
        if template.dma is not None:
            dma = template.dma
            document["work"] = f"{dma.bytes:,} bytes in {dma.rows:,} rows of {dma.run_bytes:,}"
        elif template.flops:
            document["work"] = report.quantity(template.flops, "FLOP")
        self.documents.append(document)
        self._numbers[template] = len(self.documents) - 1
        return len(self.documents) - 1


class _SourceLines:
    """Source lines."""

    def __init__(self) -> None:
        self.documents: list[dict[str, str]] = []
        self._numbers: dict[tuple[str, int], int] = {}

    def number(self, file: str, line: int) -> int:
        """The number of a line; its text is read when it first appears."""
        number = self._numbers.get((file, line))
        if number is not None:
            return number
        text = statement(file, line)
        self.documents.append({"place": f"{os.path.basename(file)}:{line}", "text": text})
        self._numbers[file, line] = len(self.documents) - 1
        return len(self.documents) - 1


class _Tensors:
    """Tensors that one line makes in one shape: a name, and the lines that write and read them."""

    def __init__(self, lines: _SourceLines) -> None:
        self._lines = lines
        self._numbers: dict[Any, int] = {}
        self._found: list[tuple[set[Storage], set[int], set[int]]] = []

    def number(self, s: Storage) -> int:
        """The number of a tensor's kind."""
        number = self._numbers.setdefault((s.layout, s.code, s.line or s.name), len(self._found))
        if number == len(self._found):
            self._found.append((set(), set(), set()))
        self._found[number][0].add(s)
        return number

    def use(self, core: CoreSchedule) -> None:
        """Note which lines write and read the tensors of a core."""
        for template, storages, code, line in core.issued:
            at = self._lines.number(code.co_filename, line)
            for operand, s in enumerate(storages):
                _, writes, reads = self._found[self.number(s)]
                (writes if operand < template.writes else reads).add(at)

    def documents(self) -> list[dict[str, Any]]:
        """What the page says of each."""
        return [
            {
                "name": name_of(s),
                "memory": s.memory.value.upper().replace("_", " "),
                "type": f"{s.layout.dtype}[{','.join(map(str, s.layout.shape))}]",
                "bytes": s.bytes,
                "count": len(alike),
                "place": f"{os.path.basename(s.code.co_filename)}:{s.line}" if s.code else "",
                "writes": sorted(writes),
                "reads": sorted(reads),
            }
            for alike, writes, reads in self._found
            for s in [min(alike, key=lambda s: s.first)]
        ]


def _core(
    core: CoreSchedule,
    critical: set[int],
    kinds: _Kinds,
    lines: _SourceLines,
    tensors: _Tensors,
    arrays: _Arrays,
    ticks_per_ns: float,
    profile: Profile,
) -> dict[str, Any]:
    start, end = _ticks(core.start, ticks_per_ns), _ticks(core.end, ticks_per_ns)
    lanes, order = _lanes(core, start, end)
    records = core.issued
    rows = [records[i] for i in order]
    flags = np.array([i in critical for i in order], bool)
    columns = {
        "number": arrays.add(order, "uint32"),
        "start": arrays.add(start[order], "uint32"),
        "end": arrays.add(end[order], "uint32"),
        "kind": arrays.add([kinds.number(record) for record in rows], "uint32"),
        "place": arrays.add(
            [lines.number(code.co_filename, line) for _, _, code, line in rows], "uint32"
        ),
        "wait": arrays.add(np.array(core.wait, np.uint8)[order], "uint8"),
        "cause": arrays.add(np.array(core.cause, np.int32)[order], "int32"),
        "critical": arrays.add(flags, "uint8"),
    }
    tensors.use(core)
    memories = [
        {
            **_memory(core, memory, name, unit, arrays, ticks_per_ns, profile),
            "lives": _lives(core, memory, tensors, arrays, ticks_per_ns),
        }
        for memory, name, unit in (
            (MemoryRegion.sbuf, "SBUF", "bytes per partition"),
            (MemoryRegion.psum, "PSUM", "banks"),
        )
    ]
    return {"lanes": lanes, "columns": columns, "memories": memories}


def _ticks(ns: list[float], ticks_per_ns: float) -> np.ndarray:
    return np.rint(np.array(ns, float) * ticks_per_ns).astype(np.int64)


def _lanes(
    core: CoreSchedule, start: np.ndarray, end: np.ndarray
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The rows of the lanes, and the instructions in their order: each row's by start."""
    rows, events = LaneRows(), dict[tuple[str, int], list[int]]()
    for i in np.argsort(start, kind="stable").tolist():
        lane = lane_of(core, i)
        row = rows.take(lane, int(start[i]), int(end[i]))
        events.setdefault((lane, row), []).append(i)
    first = {name: i for i, name in enumerate(ENGINE_NAMES)}
    first |= {name: 10 + i for i, name in enumerate(dict.fromkeys(core.queue.values()))}
    tensors = _tensors_of_queues(core)
    lanes: list[dict[str, Any]] = []
    order: list[int] = []
    for lane, row in sorted(events, key=lambda key: (first[key[0]], key[1])):
        of_row = events[lane, row]
        lanes.append(
            {
                "name": lane if row == 0 else "",
                "tensors": tensors.get(lane, []),
                "engine": int(core.issued[of_row[0]][0].engine),
                "first": len(order),
                "end": len(order) + len(of_row),
            }
        )
        order += of_row
    return lanes, np.array(order, np.int64)


def _tensors_of_queues(core: CoreSchedule) -> dict[str, list[str]]:
    """Names of the HBM tensors that each queue serves."""
    tensors: dict[str, dict[str, None]] = {}
    for i, queue in core.queue.items():
        template, storages, _, _ = core.issued[i]
        if template.hbm_operand >= 0:
            tensors.setdefault(queue, {})[name_of(storages[template.hbm_operand])] = None
    return {queue: list(names) for queue, names in tensors.items()}


def _memory(
    core: CoreSchedule,
    memory: MemoryRegion,
    name: str,
    unit: str,
    arrays: _Arrays,
    ticks_per_ns: float,
    profile: Profile,
) -> dict[str, Any]:
    held = occupancy(core, memory)
    return {
        "name": name,
        "unit": unit,
        "limit": liveness.limit_of(memory, profile.machine),
        "time": arrays.add(_ticks([ns for ns, _ in held], ticks_per_ns), "uint32"),
        "size": arrays.add([size for _, size in held], "uint32"),
    }


def _lives(
    core: CoreSchedule,
    memory: MemoryRegion,
    tensors: _Tensors,
    arrays: _Arrays,
    ticks_per_ns: float,
) -> dict[str, Any]:
    """Which tensor lies where, by start: bytes of each partition, and partitions."""
    lives = places(core, memory)
    columns: dict[str, Any] = {
        name: [getattr(p, name) for p in lives] for name in TensorPlace._fields
    }
    columns["tensor"] = [tensors.number(s) for s in columns.pop("storage")]
    for name in ("start", "end"):
        columns[name] = _ticks(columns[name], ticks_per_ns)
    return {name: arrays.add(values, "uint32") for name, values in columns.items()}


def _path(
    steps: list[tuple[int, int, float, float]],
    arrays: _Arrays,
    time_ns: float,
    ticks_per_ns: float,
) -> dict[str, Any]:
    """The critical path from the start: core, instruction, and when it waited, began and ended."""
    waited: list[float] = []
    began: list[float] = []
    ended: list[float] = []
    now = time_ns
    for _, _, own, latency in steps:
        ended.append(now)
        began.append(now - own)
        now -= own + latency
        waited.append(max(now, 0.0))
    columns = {
        "core": arrays.add([core for core, *_ in reversed(steps)], "uint8"),
        "number": arrays.add([i for _, i, _, _ in reversed(steps)], "uint32"),
    }
    for key, ns in (("waited", waited), ("began", began), ("ended", ended)):
        columns[key] = arrays.add(_ticks(ns[::-1], ticks_per_ns), "uint32")
    return columns
