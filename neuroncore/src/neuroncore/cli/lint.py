"""`lint`: what a line of NKI refuses in the kernels of files, which are read and not run."""

import argparse
from dataclasses import asdict
from typing import Any

from neuroncore.cli.console import one_line, stdout
from neuroncore.cli.parser import add_command

_DESCRIPTION = """\
Say what NKI refuses in the kernels of Python files, and in what these reach. Runs nothing. Exit
code 1 with findings."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    command = add_command(
        *(commands, "lint", _lint, _show, "report what NKI refuses in kernels' source"),
        example="kernels.py --nki 0.6",
    )
    command.description = _DESCRIPTION
    command.add_argument(
        "files", nargs="+", metavar="FILE.py", help="files to check; they do not run"
    )
    add_nki(command)
    command.set_defaults(exit_code=lambda document: int(bool(document["findings"])))


def add_nki(command: argparse.ArgumentParser) -> None:
    """Add the option that says whose language rules hold."""
    command.add_argument(
        "--nki",
        choices=("0.6", "0.7"),
        default="0.7",
        help="NKI release: up to 0.6 parses kernels, 0.7 traces them with Python (default: 0.7)",
    )


def _lint(options: argparse.Namespace) -> dict[str, Any]:
    from neuroncore.checks.lint import RULES, lint
    from neuroncore.checks.lint_source import Sources

    for file in options.files:
        if not Sources(options.nki).read(file).kernels():
            raise ValueError(f"{file} has no kernel: no function is decorated with nki.jit")
    errors = sorted({error for file in options.files for error in lint(file, options.nki)})
    findings = [
        {**asdict(error), "severity": error.severity, "remedy": RULES[error.rule].remedy}
        for error in errors
    ]
    return {"nki": options.nki, "findings": findings}


def _show(document: dict[str, Any]) -> None:
    for finding in document["findings"]:
        place = "{path}:{line}:{column}: {severity} {rule}".format_map(finding)
        text = one_line(f"{place}: {finding['message']}; {finding['remedy']}")
        stdout.print(text)
    count = len(document["findings"])
    stdout.print(f"{count or 'no'} finding{'s' * (count != 1)} (NKI {document['nki']})")
