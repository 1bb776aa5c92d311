"""What was found, kept in a directory as it comes: a second run goes on where the first ended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from neuroncore.calibration import measurements
from neuroncore.documents import read_json
from neuroncore.files import replacing
from neuronmm_ops.device.predictions import Prediction

FILE, MEASUREMENTS, PAGE = "device-check.json", "measurements.json", "device-check.md"
FORMAT, VERSION = "neuronmm-device-check", 1
Step = Literal["profiled", "microkernels", "kernels", "layers", "model"]
Status = Literal["measured", "wrong", "refused", "late", "lost"]
"""Late: no answer in time. Lost: the process that held the device ended."""


@dataclass(frozen=True)
class Finding:
    """One thing that was run.

    Attributes:
        step: of the programme.
        name: of the row, one of its kind in the step.
        status: "wrong" where it was measured and its values are off.
        reason: why there is no time, what is wrong, or which token differs; empty otherwise.
        time_us: from one launch to the next.
        error_ratio: `values.error_ratio`; None where values are not compared.
        prediction: the frozen one; None for a model.
    """

    step: Step
    name: str
    status: Status
    prediction: Prediction | None
    reason: str = ""
    time_us: float | None = None
    error_ratio: float | None = None


@dataclass(frozen=True)
class Record:
    """All that was found on one device.

    Attributes:
        target: trn1, trn2 or trn3.
        device: how it was reached, `Runner.name`.
        versions: of the packages, by name.
        predicted: commit and source of the frozen predictions.
        environment: what `doctor` says of the machine, its `instance` type, and `variables`.
        rows: as they came.
    """

    target: str
    device: str
    versions: dict[str, str]
    predicted: dict[str, str]
    environment: dict[str, Any] = field(default_factory=dict[str, Any])
    rows: tuple[Finding, ...] = ()

    def with_row(self, row: Finding) -> Record:
        """This record with one row more."""
        return replace(self, rows=(*self.rows, row))

    def has(self, step: str, name: str) -> bool:
        """Whether there is a row of that name."""
        return any(row.step == step and row.name == name for row in self.rows)


def save(record: Record, directory: Path) -> None:
    """Write the record, and the measurements that `neuroncore calibrate` reads. Raises OSError."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(record)}, indent=1)
    with replacing(directory / FILE) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    rows = [_measurement(row) for row in record.rows if row.step == "microkernels"]
    measurements.write(
        directory / MEASUREMENTS,
        measurements.Measurements(record.target, record.versions, tuple(rows)),
    )


def _measurement(row: Finding) -> measurements.Row:
    if row.status == "measured":
        return measurements.Row(row.name, "measured", row.time_us)
    status = "refused" if row.status == "refused" else "skipped"
    return measurements.Row(row.name, status, reason=row.reason)


def resume(new: Record, directory: Path) -> Record:
    """The record of a directory, to go on with; `new` where there is none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none, or one of another device, other versions or other predictions.
    """
    path = directory / FILE
    if not path.exists():
        return new
    earlier = _read(path)
    for what in ("target", "device", "versions", "predicted"):
        there, here = getattr(earlier, what), getattr(new, what)
        if there != here:
            raise ValueError(
                f"{path} is of {what} {_shown(there, here)}, this run has {_shown(here, there)}; "
                "choose another -o"
            )
    return replace(earlier, environment=new.environment)


def _shown(value: Any, other: Any) -> str:
    """A value; of mappings what differs from another alone."""
    if not isinstance(value, dict):
        return str(value)
    differing = [f"{k} {value.get(k)}" for k in value | other if value.get(k) != other.get(k)]
    return ", ".join(differing)


def _read(path: Path) -> Record:
    document = read_json(path)
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise ValueError(f'{path} is no record of device-check: "format" must be {FORMAT!r}')
    if (version := document.pop("version", None)) != VERSION:
        raise ValueError(f"{path} has version {version!r:.40}; this reads {VERSION}")
    try:
        rows = tuple([_row(each) for each in document.pop("rows")])
        return Record(**document, rows=rows)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has rows or fields that device-check never writes") from error


def _row(row: dict[str, Any]) -> Finding:
    fields = row.pop("prediction")
    prediction = None if fields is None else Prediction(**fields)
    numbers = [row[key] for key in ("time_us", "error_ratio") if row[key] is not None]
    if prediction is not None:
        numbers += [prediction.time_us, *prediction.range_us]
    if (
        (prediction is None) != (row["step"] == "model")
        or row["status"] not in get_args(Status)
        or row["step"] not in get_args(Step)
        or not all(isinstance(row[key], str) for key in ("name", "reason"))
        or not all(isinstance(each, int | float) for each in numbers)
    ):
        raise ValueError("a value of another kind")
    return Finding(prediction=prediction, **row)
