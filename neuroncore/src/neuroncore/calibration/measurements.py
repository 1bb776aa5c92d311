"""The file of measured times, which `neuronmm device-check` writes and `calibrate` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

from neuroncore.documents import read_json
from neuroncore.files import replacing
from neuroncore.hardware import MACHINES

FORMAT = "neuroncore-measurements"
VERSION = 1
LEAST_US, MOST_US = 0.001, 1e9
Status = Literal["measured", "refused", "skipped"]


@dataclass(frozen=True)
class Row:
    """One case on the device.

    Attributes:
        case: its name, as `cases.cases` has it.
        status: "measured", "refused" (by the compiler or the device), or "skipped".
        time_us: of one launch, where it was measured.
        reason: why it was not.
    """

    case: str
    status: Status
    time_us: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Measurements:
    """Times of a device.

    Attributes:
        target: trn1, trn2 or trn3.
        versions: of what it ran with, by name.
        rows: one of each case.
    """

    target: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]


def write(path: Path, measurements: Measurements) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    document = {"format": FORMAT, "version": VERSION, **asdict(measurements)}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(document, indent=2, allow_nan=False), encoding="utf-8")


def read(path: Path) -> Measurements:
    """Read the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or breaks its rules; the message names the file.
    """
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        _refuse(path, f'is no file of measurements: "format" must be {FORMAT!r}')
    if document.get("version") != VERSION:
        _refuse(path, f"has version {document.get('version')!r:.40}; this reads {VERSION}")
    target, versions, rows = [document.get(name) for name in ("target", "versions", "rows")]
    if target not in [*MACHINES]:
        _refuse(path, f"has target {target!r:.40}; it must be one of {', '.join(MACHINES)}")
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        _refuse(path, f"has versions {versions!r:.80}; they must be texts by name")
    if not isinstance(rows, list):
        _refuse(path, f"has rows {rows!r:.40}; they must be a list")
    measured = tuple([_row(path, number, row) for number, row in enumerate(rows, 1)])
    names = [row.case for row in measured]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        _refuse(path, f"has more than one row of {', '.join(twice)}; leave one of each")
    return Measurements(target, versions, measured)


def _row(path: Path, number: int, row: Any) -> Row:
    """A row of the file, checked."""
    values = row if isinstance(row, dict) else {}
    case, status, time, reason = [values.get(n) for n in ("case", "status", "time_us", "reason")]
    if not isinstance(case, str):
        _refuse(path, f"has row {number}, {row!r:.60}; it must be an object with a case")
    where = f"row {number} ({case:.60})"
    if not isinstance(status, str) or status not in get_args(Status):
        known = ", ".join(get_args(Status))
        _refuse(path, f"has {where} with status {status!r:.40}; it must be one of {known}")
    if not isinstance(reason, str):
        _refuse(path, f"has {where} with reason {reason!r:.40}; it must be a text")
    if status != "measured":
        if time is not None:
            _refuse(path, f"has {where}, {status}, with time_us {time!r:.40}; it must be null")
    elif isinstance(time, bool) or not isinstance(time, int | float):
        _refuse(path, f"has {where} with time_us {time!r:.40}; it must be a number")
    elif not LEAST_US <= time <= MOST_US:
        _refuse(path, f"has {where} with time_us {time}; it must be {LEAST_US} to {MOST_US:g}")
    return Row(case, cast(Status, status), time, reason)


def _refuse(path: Path, problem: str) -> NoReturn:
    raise ValueError(f"{path} {problem}")
