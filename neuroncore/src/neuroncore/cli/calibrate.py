"""`calibrate`: what times of a device say of the clock's constants and of what is not known."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuroncore.cli.parser import add_command

_DESCRIPTION = """\
Fit the clock's constants to the times that `neuronmm device-check` measured, and say which end of
each uncertainty they speak for. Changes no clock."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    command = add_command(
        *(commands, "calibrate", _calibrate, _show, "fit the clock to a device's times"),
        example="measurements.json -o calibration.json",
    )
    command.description = _DESCRIPTION
    command.add_argument(
        "measurements", type=Path, metavar="JSON", help="what `neuronmm device-check` measured"
    )
    command.add_argument("-o", "--output", type=Path, metavar="OUT.json", help="write the document")


def _calibrate(options: argparse.Namespace) -> dict[str, Any]:
    from neuroncore.calibration.fit import calibrate
    from neuroncore.calibration.measurements import read
    from neuroncore.files import replacing

    calibration = asdict(calibrate(read(options.measurements), options.measurements))
    document = {"measurements": str(options.measurements), **calibration}
    if options.output is not None:
        with replacing(options.output) as temporary:
            temporary.write_text(json.dumps(document, indent=2, allow_nan=False), encoding="utf-8")
    return document


def _show(document: dict[str, Any]) -> None:
    versions = "".join([f", {name} {text}" for name, text in document["versions"].items()])
    stdout.print(f"{document['measurements']}: {document['target']}{versions}")
    launch = f"A launch costs {document['launch_us']:.4g} us beyond its kernel (median)."
    stdout.print(launch)
    show_table(
        ["constant", "before", "after", "+-", "of what"],
        [
            [c["name"], *[_number(c[key]) for key in ("before", "after", "plus_minus")],
             c["meaning"] + (f"; not decided: {c['reason']}" if c["reason"] else "")]
            for c in document["constants"]
        ],
        left=("constant", "of what"),
    )  # fmt: skip
    show_table(
        ["uncertainty", "decided for", "error assumed", "otherwise"],
        [
            [v["name"], v[v["decided"]] if v["decided"] else f"undecided: {v['reason']}",
             *[_percent(v[f"error_{end}"]) for end in ("assumed", "otherwise")]]
            for v in document["uncertainties"]
        ],
        left=("uncertainty", "decided for"),
    )  # fmt: skip
    show_table(
        ["series", "ns measured", "modelled before", "after"],
        [
            [s["series"], *[_number(s[f"{key}_ns"]) for key in ("measured", "before", "after")]]
            for s in document["slopes"]
        ],
        left=("series",),
        title="ns per repetition",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
