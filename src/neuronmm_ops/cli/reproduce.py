"""`reproduce`: the papers' tables, from one TOML file."""

import argparse
from typing import Any

from neuroncore.cli.console import show_table, stderr, stdout
from neuronmm_ops.cli.parser import add_command, add_output
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "the papers' tables: accuracy, times, and quality lost for speed (gamma)"
    example = "demo -o out/reproduce"
    command = add_command(commands, "reproduce", _reproduce, _show, description, example=example)
    command.add_argument(
        "file",
        nargs="?",
        metavar="FILE.toml",
        help="a TOML file, or the name of one in the package",
    )
    add_output(
        command,
        "directory of results and checkpoints; the same command resumes a killed run",
        required=False,
    )
    command.add_argument("--list", action="store_true", help="name the shipped files")
    command.set_defaults(exit_code=_exit_code)


def _reproduce(options: argparse.Namespace) -> dict[str, Any]:
    transformers_models()
    from neuronmm_ops.reproduce import config

    if options.list:
        shipped = {name: config.load(path) for name, path in config.shipped().items()}
        return {"shipped": {name: asked.title for name, asked in shipped.items()}}
    if options.file is None or options.output is None:
        raise ValueError("FILE.toml and -o OUT are needed; --list names the shipped files")
    asked = config.load(config.find(options.file))
    from neuronmm_ops.reproduce.run import run

    with progress_bars() as progress:
        document = run(asked, options.output, progress, stderr.print)
    return {"output": str(options.output), **document}


def _exit_code(document: dict[str, Any]) -> int:
    return 1 if document.get("counts", {}).get("failed") else 0


def _show(document: dict[str, Any]) -> None:
    if "shipped" in document:
        for name, title in document["shipped"].items():
            stdout.print(f"{name:16} {title}")
        return
    from neuronmm_ops.reproduce.render import sections

    for section in sections(document):
        left = section.columns if section.is_text else section.columns[:1]
        show_table(section.columns, section.rows, left=left, title=section.title)
        for note in section.notes:
            stdout.print(note)
    counts = {state: count for state, count in document["counts"].items() if count}
    parts = ", ".join(f"{count} {state}" for state, count in counts.items() if state != "cells")
    stdout.print(f"{counts['cells']} cells: {parts}; {document['output']}")
