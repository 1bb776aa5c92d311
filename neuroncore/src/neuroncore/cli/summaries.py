"""Summaries of profiles in neuron-explorer's schema: ours are written, all are read.

Names, units and meanings are those of the tables Summary and Metadata in AWS's profile schema
reference, versions 7.4.0 (SDK 2.31) and 12.0.1 (SDK 2.33). What `--output-format summary-json`
prints is one object per session, of both tables' fields; a `_percent` in it is a fraction of 1.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from neuroncore import __version__
from neuroncore.documents import read_json
from neuroncore.files import replacing

ENGINES = {
    "tensor": "TensorE", "vector": "VectorE", "scalar": "ScalarE", "gpsimd": "GpSimdE",
    "sync": "SyncE",
}  # fmt: skip
"""Our names of the engines by the schema's."""
FIELDS = (
    "total_time",
    *(f"{engine}_engine_active_time" for engine in ENGINES),
    "dma_active_time",
    *("hbm_read_bytes", "hbm_write_bytes", "dma_transfer_total_bytes", "dma_transfer_count"),
    *(f"{engine}_engine_instruction_count" for engine in ENGINES),
    *("matmul_instruction_count", "model_flops", "mfu_estimated_percent"),
)
"""What is compared, seconds and bytes; of these fields a summary need have `total_time` alone."""


@dataclass(frozen=True)
class Summary:
    """What a file says of one run of a kernel.

    Attributes:
        path: the file or directory.
        kernel: its name; None of a profile that neuroncore did not write: people name those.
        target: trn1, trn2 or trn3; None where no instance type of these is named.
        is_simulation: whether times are modelled.
        numbers: by the names in `FIELDS`, those that the file has.
        lines: as `lines.gathered`; None where the file names no lines.
    """

    path: Path
    kernel: str | None
    target: str | None
    is_simulation: bool
    numbers: dict[str, float]
    lines: list[dict[str, Any]] | None


def of_profile(document: Mapping[str, Any]) -> dict[str, Any]:
    """One session of summary-json, of the document of `simulate --json`; all times are modelled.

    Active times are means of the cores, that of DMA is of the core where any of the 16 engines is
    active longest. Without `lines` there are no counts of instructions; `tables`, of events, are
    added as they are.
    """
    lines, cores = document.get("lines"), document["cores"]
    busy: Counter[str] = Counter()
    for use in [use for core in cores for use in core["engines"]]:
        busy[use["engine"]] += use["busy_ms"] / 1e3 / len(cores)
    counts: Counter[str] = Counter()
    for entry in lines or []:
        counts[entry["engine"]] += entry["instructions"]
    session: dict[str, Any] = {
        "is_simulation": True,
        "explorer_version": f"neuroncore {__version__}",
        "profile_name": document["kernel"],
        "instance_type": document["target"],
        "num_physical_cores": document["lnc"],
        "total_time": document["time_ms"] / 1e3,
        "dma_active_time": document["dma"]["active_ms"] / 1e3,
        "hbm_read_bytes": document["hbm_read_bytes"],
        "hbm_write_bytes": document["hbm_write_bytes"],
        "dma_transfer_total_bytes": document["dma"]["bytes"],
        "dma_transfer_count": document["dma"]["count"],
        "model_flops": document["flops"],
        "mfu_estimated_percent": document["mfu"],
        **document.get("tables", {}),
    }
    for engine, name in ENGINES.items():
        if name in busy:
            session[f"{engine}_engine_active_time"] = busy[name]
        if lines is not None:
            session[f"{engine}_engine_instruction_count"] = counts[name]
    return session if lines is None else {**session, "matmul_instruction_count": counts["TensorE"]}


def save(document: Mapping[str, Any], path: Path) -> None:
    """Write a profile's document as summary-json of one session, which is its kernel's name."""
    text = json.dumps({document["kernel"]: of_profile(document)}, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> Summary:
    """A profile of `simulate --json`, summary-json, neuron-profile's json, a directory of parquet.

    Raises:
        OSError: the file cannot be opened.
        ValueError: what it holds is none of these, or a field is missing or impossible.
        ImportError: a directory, and pyarrow is not installed.
    """
    if path.is_dir():
        from neuroncore.cli import parquet

        return _summary(path, parquet.session(path), parquet.lines(path))
    document = _json(path)
    if document.get("modelled") is True:
        return _summary(path, *_simulated(path, document))
    whole = document.get("summary")  # of neuron-profile's json, which has each instruction, too
    sessions = whole if isinstance(whole, list) else list(document.values())
    if len(sessions) != 1 or not isinstance(sessions[0], dict):
        _refuse(path, "is neither `simulate --json` of one kernel nor summary-json of one run")
    return _summary(path, sessions[0], None)


def _simulated(path: Path, document: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    try:
        for entry in document.get("lines") or []:
            if not isinstance(entry["file"], str) or not isinstance(entry["line"], int):
                raise TypeError
            for name in ("busy_ms", "instructions"):
                _number(path, name, entry[name])
        return of_profile(document), document.get("lines")
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        lacks = f"it lacks {error}" if isinstance(error, KeyError) else "a field has another type"
        _refuse(path, f"is no profile of one kernel by this version: {lacks}; simulate it again")


def _summary(path: Path, session: Mapping[str, Any], lines: list[Any] | None) -> Summary:
    if session.get("total_time") is None:
        _refuse(path, "has no total_time; write it by neuron-explorer of SDK 2.31 or later")
    names = (*FIELDS, "hardware_flops", "transpose_flops")
    present = [name for name in names if session.get(name) is not None]
    numbers = {name: _number(path, name, session[name]) for name in present}
    if not numbers["total_time"]:
        _refuse(path, "has total_time 0; it must be above 0")
    if "hardware_flops" in numbers:  # those of the model, from HLO, are 0 for an NKI kernel
        numbers["model_flops"] = numbers["hardware_flops"] - numbers.get("transpose_flops", 0)
    is_ours = str(session.get("explorer_version")).startswith("neuroncore ")
    return Summary(
        path,
        str(session.get("profile_name")) if is_ours else None,
        _target(str(session.get("instance_type"))),
        session.get("is_simulation") is True,
        {name: numbers[name] for name in FIELDS if name in numbers},
        lines,
    )


def _target(instance_type: str) -> str | None:
    from neuroncore.hardware import MACHINES

    for machine in MACHINES.values():
        families = "|".join((machine.target, *machine.aliases))
        if re.match(rf"({families})(?!\d)", instance_type):
            return machine.target
    return None


def _json(path: Path) -> dict[str, Any]:
    document = read_json(path)
    if not isinstance(document, dict):
        _refuse(path, f"holds a {type(document).__name__} where a profile is an object")
    return document


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(path, f"has {name} {value!r:.40}; it must be a number")
    if not 0 <= value <= sys.float_info.max:
        _refuse(path, f"has {name} {value}; it must be finite and not negative")
    return value


def _refuse(path: Path, what: str) -> NoReturn:
    raise ValueError(f"{path} {what}")
