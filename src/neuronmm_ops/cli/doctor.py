"""`doctor`: which versions are installed, and which backends and engines work here."""

import argparse
from typing import Any

from neuroncore.cli.console import show_fields, show_table
from neuronmm_ops.cli.parser import add_command


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "versions, and which backends and engines work here"
    add_command(commands, "doctor", _doctor, _show, description)


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.doctor import diagnose

    return diagnose()


def _show(document: dict[str, Any]) -> None:
    show_fields(document["versions"])
    columns = ("backend", "usable", "why")
    rows = [(b["name"], "yes" if b["usable"] else "no", b["reason"]) for b in document["backends"]]
    show_table(columns, rows, left=columns)
    columns = ("engine", "version", "usable", "why")
    rows = [
        (e["name"], e["version"] or "-", "yes" if e["usable"] else "no", e["reason"])
        for e in document["engines"]
    ]
    show_table(columns, rows, left=columns)
