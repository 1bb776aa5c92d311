"""The document of a reproduction: a row for each model, next to it what others published."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from neuronmm_ops.measure.compare import gamma
from neuronmm_ops.reproduce.cells import Cell
from neuronmm_ops.reproduce.config import Reproduction
from neuronmm_ops.reproduce.plan import Study, Variant
from neuronmm_ops.reproduce.published import published_for

STATES = ("computed", "reused", "failed", "not run", "to do")
Results = Mapping[str, Mapping[str, Any]]


def document_of(
    asked: Reproduction,
    planned: Study,
    results: Results,
    reused: Collection[str],
    failed: Mapping[str, str],
    not_run: Collection[str],
) -> dict[str, Any]:
    """Return what `results.json` holds.

    Args:
        asked: what is to be done.
        planned: its cells.
        results: of the cells that are done, by key.
        reused: keys of results of an earlier run.
        failed: why, by key.
        not_run: keys of cells whose model could not be made.

    Returns:
        `title`, `model`, `rows` (see `_row`), `published`, `left_out`, `counts`, `cells` (each with
        its `status`, of a failed one also `error`), `settings` (the file, as it was read).
    """

    def status(cell: Cell) -> str:
        if cell.key in failed:
            return "failed"
        if cell.key in not_run:
            return "not run"
        if cell.key not in results:
            return "to do"
        return "reused" if cell.key in reused else "computed"

    cells = [
        {"cell": cell.name, "key": cell.key, "status": status(cell)}
        | ({"error": failed[cell.key]} if cell.key in failed else {})
        for cell in planned.cells
    ]
    states = [cell["status"] for cell in cells]
    rows = [_row(variant, results) for variant in planned.variants]
    _compare(rows, asked.evaluate.tasks)
    return {
        "title": asked.title,
        "model": {"id": asked.model.id, **planned.model},
        "rows": rows,
        "published": published_for(asked.published),
        "left_out": list(planned.left_out),
        "counts": {"cells": len(cells), **{each: states.count(each) for each in STATES}},
        "cells": cells,
        "settings": _settings(asked),
    }


def _settings(asked: Reproduction) -> dict[str, Any]:
    methods = {name: config.to_dict() for name, config in asked.methods.items()}
    for config in methods.values():  # both are compress's
        del config["ratio"], config["storage"]
    recovery = asked.recovery and {"data": asked.recovery.data, **asked.recovery.config.to_dict()}
    tables = ("model", "compress", "evaluate", "modelled", "measured")
    settings = {name: (table := getattr(asked, name)) and asdict(table) for name in tables}
    return {**settings, "methods": methods, "recovery": recovery, "data": asked.data}


def _row(variant: Variant, results: Results) -> dict[str, Any]:
    """Return what is known of a model: values that are not are None."""
    config = variant.config
    made = results.get(variant.steps[-1].key, {}) if variant.steps else {}
    row: dict[str, Any] = {
        "name": variant.name,
        "method": variant.method,
        "ratio": config.ratio if config else 0.0,
        "effective_ratio": made.get("effective_ratio") if config else 0.0,
        "storage": config.storage if config else None,
        "recovered": variant.recovered,
        "bytes": made.get("bytes"),
        "dense_bytes": made.get("dense_bytes"),
        "ppl": {},
        "accuracy": {},
        "mean_accuracy": None,
        "modelled": None,
        "measured": None,
        **dict.fromkeys(("accuracy_drop", "gamma_modelled", "gamma_measured")),
    }
    for cell in variant.cells:
        result = results.get(cell.key)
        if cell.kind == "perplexity":
            row["ppl"][cell.subject] = result and result["ppl_token"]
        elif cell.kind == "task":
            row["accuracy"][cell.subject] = result and result["accuracy"]
        elif result is not None:
            row[cell.kind] = _times(result) if cell.kind == "modelled" else dict(result)
    return row


def _times(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modelled times that a row shows."""
    times = {each["name"]: each for each in result["variants"]}

    def speedup(of: str) -> dict[str, Any] | None:
        return result["speedups"].get(of, {}).get("end_to_end")

    def shown(of: str) -> dict[str, Any]:
        names, served = ("end_to_end_ms", "tokens_per_s"), times[of]["phases"]["decode"]
        return {name: times[of][name] for name in names} | {"as_served": served["as_served"]}

    return {
        **shown("low_rank"),
        "dense": shown("dense"),
        "speedup": times["dense"]["end_to_end_ms"] / times["low_rank"]["end_to_end_ms"],
        "speedup_range": speedup("ours"),
        "decode_speedup_as_served": result["speedups"]["ours"]["decode"]["as_served"],
        "published_setting_range": speedup("published"),
        "left_out": result.get("left_out", []),
    }


def _compare(rows: list[dict[str, Any]], tasks: Collection[str]) -> None:
    """Set what needs the dense row, or other rows, too."""
    # A task without an accuracy, such as a perplexity of lm-eval's, has no part in the mean.
    scored = [t for t in tasks if any(row["accuracy"].get(t) is not None for row in rows)]
    for row in rows:
        values = [row["accuracy"][task] for task in scored]
        if values and None not in values:
            row["mean_accuracy"] = sum(values) / len(values)
    dense = rows[0]["mean_accuracy"]
    for row in rows[1:]:
        own = row["mean_accuracy"]
        drop = None if dense is None or own is None else dense - own
        row["accuracy_drop"] = drop
        row["gamma_modelled"] = gamma(drop, row["modelled"] and row["modelled"]["speedup"])
        speedup = row["measured"] and row["measured"]["speedup"]["end_to_end"]
        row["gamma_measured"] = gamma(drop, speedup)
    times = next((row["modelled"] for row in rows if row["modelled"]), None)
    if times is not None:
        names = ("speedup_range", "decode_speedup_as_served", "published_setting_range")
        one = dict.fromkeys(names)
        rows[0]["modelled"] = {**times["dense"], **one, "speedup": 1.0, "left_out": []}
