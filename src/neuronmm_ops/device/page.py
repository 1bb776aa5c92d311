"""The record for people: modelled and measured, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import linear_regression, median
from typing import Any

from neuroncore.calibration.published import PUBLISHED, TARGET
from neuronmm_ops.device.predictions import frozen
from neuronmm_ops.device.record import MEASUREMENTS, Finding, Record

SHORT_US = 15.0
"""Predicted time up to which a row tells what a launch costs: its kernel takes hardly any."""

NOISE = 0.02
"""Share by which a measured time may be beyond the modelled range and count as inside."""


PROFILED = {each.name: each for each in PUBLISHED}


def launch_us(rows: Iterable[Finding]) -> float:
    """What a launch takes beyond its kernel, us: the median of the short rows, at least 0."""
    beyond = [
        row.time_us - row.prediction.time_us
        for row in rows
        if row.time_us is not None and row.prediction and row.prediction.time_us <= SHORT_US
    ]
    return max(0.0, median(beyond)) if beyond else 0.0


def layers(rows: Iterable[Finding]) -> dict[str, float] | None:
    """Fit a line to the times of graphs of layers; None where fewer than two were measured.

    Returns:
        `modelled_us` of a layer, `layer_us`, the slope, and `graph_us`, the intercept.
    """
    timed = [row for row in rows if row.step == "layers" and row.time_us is not None]
    if len(timed) < 2:
        return None
    counts = [int(row.name.partition(" ")[0]) for row in timed]
    slope, intercept = linear_regression(counts, [row.time_us or 0.0 for row in timed])
    first = timed[0].prediction
    assert first is not None, "layers are predicted"
    modelled = first.time_us / counts[0]
    return {"modelled_us": modelled, "layer_us": slope, "graph_us": intercept}


def summary(record: Record) -> dict[str, Any]:
    """The record as one JSON document.

    Returns:
        `target`, `device`, `versions`, `predicted` (commit and source of the frozen predictions),
        `launch_us`, `layers` (as the function), `counts` of rows by status, `inside` and `outside`,
        and `rows`: of each `step`, `name`, `status`, `reason`, `modelled_us`, `range_us` (of the
        modelled time), `measured_us` (from launch to launch), `kernel_us` (without `launch_us`),
        `ratio` of that to the modelled time, `inside` (whether any time from `kernel_us` to
        `measured_us` is in the range), `error_ratio` of the values, and `decides`: uncertainties
        that it speaks of. What follows from a prediction is None where there is none. Rows
        "profiled" on trn2 have `published_us`: by what was published, "time" or an engine's
        "active".
    """
    launch = launch_us(record.rows)
    rows = [_row(row, launch) | _published(row, record.target) for row in record.rows]
    inside = Counter([row["inside"] for row in rows])
    return {
        "target": record.target,
        "device": record.device,
        "versions": record.versions,
        "predicted": record.predicted,
        "launch_us": launch,
        "counts": dict(Counter([row.status for row in record.rows])),
        "inside": inside[True],
        "outside": inside[False],
        "layers": layers(record.rows),
        "rows": rows,
    }


def _row(row: Finding, launch: float) -> dict[str, Any]:
    prediction, measured = row.prediction, row.time_us
    kernel = is_inside = ratio = None
    if measured is not None and prediction is not None:
        low, high = prediction.range_us
        kernel = max(0.0, measured - launch)
        ratio = kernel / prediction.time_us
        is_inside = kernel <= high * (1 + NOISE) and measured >= low * (1 - NOISE)
    return {
        "step": row.step,
        "name": row.name,
        "status": row.status,
        "reason": row.reason,
        "modelled_us": prediction and prediction.time_us,
        "range_us": prediction and list(prediction.range_us),
        "measured_us": measured,
        "kernel_us": kernel,
        "ratio": ratio,
        "inside": is_inside,
        "error_ratio": row.error_ratio,
        "decides": list(prediction.decides) if prediction else [],
    }


def _published(row: Finding, target: str) -> dict[str, dict[str, float]]:
    """What AWS published of a row: its time, or else how long TensorE was active."""
    case = PROFILED.get(row.name)
    if row.step != "profiled" or case is None or target != TARGET:
        return {}
    engine, ms = next(iter(case.published_ms.items()))
    return {"published_us": {f"{engine} active" if engine else "time": 1e3 * ms}}


def text(record: Record, document: dict[str, Any], missing: int) -> str:
    """The page, in Markdown, of a record and its `summary`."""
    rows, predicted = document["rows"], record.predicted
    counts = ", ".join([f"{count} {status}" for status, count in document["counts"].items()])
    current = "this package's" if frozen().is_current else "an earlier state of this package"
    parts = [
        f"# Modelled and measured: {record.target}, {record.device}",
        "Times in us. *Modelled* times were frozen before the run, at commit "
        f"{predicted['commit']} (source {predicted['source']}, {current}). A launch takes "
        f"{document['launch_us']:.1f} us beyond its kernel, by the rows of at most {SHORT_US:g} "
        "us; *kernel* is the measured time without it. A row is inside where any time from one to "
        f"the other lies in the modelled range, give or take {NOISE:.0%}. R is the largest error "
        "of the values over what the dtype excuses; up to 1.2 is right.",
        f"{len(rows)} rows: {counts or 'none'}; {document['inside']} inside their range, "
        f"{document['outside']} outside; {missing} not reached: the same command goes on.",
        "\n".join([f"- {name} {version}" for name, version in record.versions.items()]),
    ]
    if line := document["layers"]:
        parts.append(
            f"In a graph a layer takes {line['layer_us']:.1f} us, *modelled* "
            f"{line['modelled_us']:.1f}; the graph takes {line['graph_us']:.1f} us besides."
        )
    for step in dict.fromkeys([row["step"] for row in rows]):
        of_step = [row for row in rows if row["step"] == step]
        timed = [row for row in of_step if row["measured_us"] is not None]
        others = [row for row in of_step if row["reason"]]
        parts.append(f"## {step.capitalize()}")
        if timed:
            columns = (
                *("row", "modelled", "range", "measured", "kernel", "kernel / modelled"),
                *("inside", "R", "speaks of"),
            )
            cells = [_cells(row) for row in timed]
            if any("published_us" in row for row in timed):
                columns = (*columns, "published by AWS")
                cells = [(*line, _figure(row)) for line, row in zip(cells, timed, strict=True)]
            parts.append(_table(columns, cells))
        if others:
            reasons = [(row["name"], row["status"], row["reason"]) for row in others]
            parts.append(_table(("row", "", "reason"), reasons))
    parts.append(f"`neuroncore calibrate {MEASUREMENTS}` fits the clock to the microkernels.")
    return "\n\n".join(parts) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        _number(row["modelled_us"]),
        " to ".join([_number(end) for end in row["range_us"] or ()]),
        _number(row["measured_us"]),
        _number(row["kernel_us"]),
        _number(row["ratio"], 2),
        {True: "yes", False: "**no**", None: ""}[row["inside"]],
        _number(row["error_ratio"], 2),
        ", ".join(row["decides"]),
    )


def _figure(row: dict[str, Any]) -> str:
    figures = row.get("published_us", {}).items()
    return ", ".join([f"{us:.1f}" + f" {what}" * (what != "time") for what, us in figures])


def _number(value: float | None, places: int = 1) -> str:
    return "" if value is None else f"{value:.{places}f}"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    lines = [head, ["---"] * len(head), *[[_cell(each) for each in row] for row in rows]]
    return "\n".join([f"| {' | '.join(line)} |" for line in lines])


def _cell(value: str) -> str:
    return value.replace("|", "\\|")
