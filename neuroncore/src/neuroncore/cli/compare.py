"""`compare`: a simulated profile next to what neuron-explorer says of a run on a device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroncore.cli.console import show_table, stdout
from neuroncore.cli.parser import add_command

if TYPE_CHECKING:
    from neuroncore.cli.summaries import Summary

_DESCRIPTION = """\
Hold a simulated profile next to the summary of a run on a device, or to another simulated one:
time, busy engines, bytes and instructions, and each source line where both sides name lines."""
_SAME_FLOPS = 4.0
"""Above this factor runs differ in kernel or shape; profilers count fp32 up to so many times."""
_LISTED = 16


def add(commands: Any) -> None:
    """Add the command to the parser."""
    command = add_command(
        *(commands, "compare", _compare, _show, "hold a modelled profile next to a measured one"),
        example="profile.json summary.json",
    )
    command.description = _DESCRIPTION
    command.add_argument(
        "profile",
        type=Path,
        metavar="PROFILE",
        help="what `simulate --json` printed, or `simulate --summary` wrote",
    )
    command.add_argument(
        "other",
        type=Path,
        metavar="SUMMARY.json|DIR",
        help="what `neuron-explorer view --output-format summary-json` printed, or `neuron-profile "
        "view --output-format json`, the directory of its parquet files (needs pyarrow), or "
        "another PROFILE",
    )


def _compare(options: argparse.Namespace) -> dict[str, Any]:
    from neuroncore.cli.summaries import FIELDS, read

    modelled, other = read(options.profile), read(options.other)
    _check(modelled, other)
    fields = [name for name in FIELDS if name in modelled.numbers or name in other.numbers]
    return {
        "kernel": modelled.kernel,
        "target": modelled.target,
        "profile": str(modelled.path),
        "other": str(other.path),
        "other_is_simulation": other.is_simulation,
        "fields": [
            {"name": n, **_pair(modelled.numbers.get(n), other.numbers.get(n))} for n in fields
        ],
        "lines": _lines(modelled, other),
    }


def _pair(modelled: float | None, other: float | None) -> dict[str, float | None]:
    ratio = None if modelled is None or not other else modelled / other
    return {"modelled": modelled, "other": other, "ratio": ratio}


def _check(modelled: Summary, other: Summary) -> None:
    """Raise ValueError unless both are of one kernel on one chip, as far as they say."""
    if not modelled.is_simulation:
        raise ValueError(f"{modelled.path} is measured; name the simulated profile first")
    both = f"{modelled.path} and {other.path} are of different"
    for what, ours, theirs in (
        ("chips", {modelled.target}, {other.target}),
        ("kernels", {modelled.kernel}, {other.kernel}),
        ("kernels", _files(modelled), _files(other)),
    ):
        if None not in ours | theirs and not ours & theirs:
            named = f"{', '.join(sorted(map(str, ours)))}; {', '.join(sorted(map(str, theirs)))}"
            raise ValueError(f"{both} {what}: {named}; simulate what was measured")
    flops, others = (side.numbers.get("model_flops") for side in (modelled, other))
    if flops and others and not 1 / _SAME_FLOPS <= flops / others <= _SAME_FLOPS:
        raise ValueError(
            f"{both} kernels or shapes: {flops:,.0f}; {others:,.0f} FLOPs; simulate it"
        )


def _files(side: Summary) -> set[str | None]:
    """Names of the source files; None where no lines are named."""
    return {None} if side.lines is None else {entry["file"] for entry in side.lines}


def _lines(modelled: Summary, other: Summary) -> list[dict[str, Any]]:
    """Lines of both sides by place, longest first; none where a side names no lines."""
    if modelled.lines is None or other.lines is None:
        return []
    names = ("file", "line", "engine")
    ours, theirs = (
        {tuple(entry[name] for name in names): entry for entry in lines}
        for lines in (modelled.lines, other.lines)
    )
    rows: list[dict[str, Any]] = []
    for place in ours | theirs:
        sides = ours.get(place, {}), theirs.get(place, {})
        pairs = {n: _pair(*[side.get(n) for side in sides]) for n in ("instructions", "busy_ms")}
        rows.append({**dict(zip(names, place, strict=True)), **pairs})
    rows.sort(key=lambda e: -max(e["busy_ms"]["modelled"] or 0, e["busy_ms"]["other"] or 0))
    return rows


def _show(document: dict[str, Any]) -> None:
    other = "other" if document["other_is_simulation"] else "measured"
    kind = "modelled" if document["other_is_simulation"] else other
    paths = f"{document['profile']} (modelled) next to {document['other']} ({kind})"
    on = f"{document['kernel'] or 'a kernel'} on {document['target']}"
    stdout.print(f"{on}: {paths}; ratios are modelled to {other}")
    rows: list[list[str]] = []
    for entry in document["fields"]:
        scale, unit = (1e3, ", ms") if entry["name"].endswith("_time") else (1, "")
        rows.append([entry["name"] + unit, *_cells(entry, scale)])
    show_table(["", "modelled", other, "ratio"], rows, left=("",))
    lines = document["lines"]
    if not lines:
        text = "No lines to compare: `simulate --json` and a directory of parquet of a kernel "
        stdout.print(text + "compiled under NKI_DEBUG_INFO=True name them.")
        return
    rows = [
        [
            *(f"{e['file']}:{e['line']}", e["engine"]),
            *(*_cells(e["instructions"])[:2], *_cells(e["busy_ms"])),
        ]
        for e in lines[:_LISTED]
    ]
    head = ["line", "engine", "instr.", other, "ms modelled", other, "ratio"]
    title = f"{len(rows)} of {len(lines)} lines, longest first"
    show_table(head, rows, left=("line",), title=title)


def _cells(pair: dict[str, Any], scale: float = 1) -> list[str]:
    """Both sides and their ratio as texts; what is not known is empty."""
    values = [pair["modelled"], pair["other"]]
    texts = [f"{v:,}" if isinstance(v, int) else f"{(v or 0) * scale:.4g}" for v in values]
    shown = ["" if v is None else text for v, text in zip(values, texts, strict=True)]
    return [*shown, "" if pair["ratio"] is None else f"{pair['ratio']:.3f}"]
