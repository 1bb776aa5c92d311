"""`doctor`: which versions are installed, and which backends can run the ops here."""

import argparse
from typing import Any

from rich.table import Table

from neuronmm_ops.cli.console import COMPACT, show_fields, stdout
from neuronmm_ops.cli.parser import add_command


def add(commands: Any) -> None:
    """Add the command to the parser."""
    add_command(commands, "doctor", _doctor, _show, "versions, and which backends work here")


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.doctor import diagnose

    return diagnose()


def _show(document: dict[str, Any]) -> None:
    show_fields(document["versions"])
    table = Table("backend", "usable", "why", **COMPACT)
    for backend in document["backends"]:
        table.add_row(backend["name"], "yes" if backend["usable"] else "no", backend["reason"])
    stdout.print(table)
