"""`compile`: a model's kernels through NKI's compiler, before a device is rented."""

import argparse
from typing import Any

from neuroncore.cli.console import one_line, show_table, stdout
from neuronmm_ops.cli.parser import (
    OWN_RANKS,
    add_command,
    add_output,
    add_shape,
    add_storages,
    add_tokens,
    chosen,
    numbers_of,
    tokens_of,
)
from neuronmm_ops.progress import progress_bars

_DESCRIPTION = "a model's kernels through NKI's compiler; needs its packages, and no device"
_MODEL = "Llama-3.2-1B"


def add(commands: Any) -> None:
    """Add the command to the parser."""
    options, example = ("--target", "--lnc", "--ratio"), f"--model {_MODEL} --target trn2 -o neff"
    command = add_command(
        commands, "compile", _compile, _show, _DESCRIPTION, *options, example=example
    )
    add_shape(command, f"{OWN_RANKS} (default {_MODEL})", default=_MODEL)
    add_tokens(command, [1, 2048])
    add_storages(command)
    add_output(command, "directory of what is compiled; the same command resumes a killed run")
    command.add_argument(
        "--timeout",
        default="1800",
        metavar="SECONDS",
        help="what one kernel may take (default 1800)",
    )
    command.set_defaults(exit_code=_exit_code)


def _compile(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.precompile.run import installed, run

    installed()  # what follows imports nki
    from neuronmm_ops.estimate.subject import Options

    tokens = tokens_of(options)
    (seconds, *_) = numbers_of("--timeout", options.timeout, "1800")
    names = ("target", "lnc", "ratio", "storage", "storage_dense", "storage_lm_head")
    settings = Options(
        **chosen(options, *names), targets=options.targets and tuple(options.targets)
    )
    with progress_bars() as progress:
        return run(options.model, tokens, settings, options.output, seconds, progress)


def _refused(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in document["kernels"] if row["verdict"] == "refused"]


def _exit_code(document: dict[str, Any]) -> int:
    return 1 if _refused(document) else 0


def _show(document: dict[str, Any]) -> None:
    refused, rows = _refused(document), document["kernels"]
    versions = ", ".join([f"{name} {version}" for name, version in document["versions"].items()])
    cells = [
        (
            ", ".join(row["components"]),
            row["kernel"],
            ", ".join(map(str, row["tokens"])),
            row["verdict"],
            f"{row['seconds']:.1f}",
            row["file"] or row["code"],
        )
        for row in rows
    ]
    columns = ("component", "kernel", "tokens", "verdict", "s", "file or code")
    title = f"{document['model']} on {document['target']}, lnc {document['lnc']}; {versions}"
    show_table(columns, cells, left=[name for name in columns if name != "s"], title=title)
    for row in refused:
        stdout.print(f"{row['kernel']}: {one_line(row['message'])}; {row['remedy']}")
    stdout.print(f"{len(rows) - len(refused)} compiled, {len(refused)} refused.")
