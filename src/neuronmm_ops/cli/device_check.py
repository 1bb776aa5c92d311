"""`device-check`: what the clock says, next to what a device says, in a bounded time."""

import argparse
from pathlib import Path
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.parser import add_command, add_output
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = (
        "run the kernels on this machine's device: values, and times next to modelled ones"
    )
    example = "-o checked --minutes 60"
    command = add_command(commands, "device-check", _check, _show, description, example=example)
    add_output(command, "directory of the results; the same command goes on with what is missing")
    command.add_argument(
        "--minutes", type=float, default=60.0, help="after which nothing more starts (default 60)"
    )
    command.add_argument("--target", help="trn1, trn2 or trn3 (default: this machine's)")
    command.add_argument(
        "--simulated", action="store_true", help="run it on the simulated device, to see the page"
    )


def _check(options: argparse.Namespace) -> dict[str, Any]:
    from neuroncore.hardware import resolve_target
    from neuronmm_ops.device.run import run
    from neuronmm_ops.device.runners import SimulatedDevice, device_here

    target = resolve_target(options.target).target
    runner = SimulatedDevice(target) if options.simulated else device_here(options.target)
    with progress_bars() as progress:
        return run(options.output, options.minutes, runner, progress)


def _show(document: dict[str, Any]) -> None:
    from neuronmm_ops.device.record import PAGE

    told = [
        row for row in document["rows"] if row["status"] != "measured" or row["inside"] is False
    ]
    cells = [
        (row["name"], row["status"], *[_number(row[key]) for key in _NUMBERS.values()])
        for row in told
    ]
    if told:
        columns = ("row", "status", *_NUMBERS)
        title = "What did not run, is wrong, or is outside its modelled range"
        show_table(columns, cells, left=columns[:2], title=title)
    counts = ", ".join([f"{count} {status}" for status, count in document["counts"].items()])
    stdout.print(
        f"{counts or 'no row'}, {document['missing']} not reached; {document['inside']} inside the "
        f"modelled range, {document['outside']} outside; a launch takes "
        f"{document['launch_us']:.1f} us beyond its kernel on the {document['device']} "
        f"{document['target']}; see {Path(document['output']) / PAGE}"
    )


_NUMBERS = {
    "modelled us": "modelled_us",
    "measured us": "measured_us",
    "kernel / modelled": "ratio",
    "R": "error_ratio",
}
"""Columns of numbers, and what they are in the document."""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
