"""The command `neuronmm`: arguments in, one table or one JSON document out.

Exit codes: 0 done, 2 usage or bad input (one line on stderr), 1 a defect, of ours or of the kernel
that `simulate` runs or `lint` reads, or a cell of `reproduce` that failed, 130 interrupted, 141
stdout was closed, 143 terminated. With `--json` stdout carries one JSON document and nothing else;
progress and tables go to stderr. Each module adds its command to the parser.
"""

import argparse
import json
import os
from collections.abc import Sequence

from neuronmm_ops import __version__
from neuronmm_ops.cli import (
    bench,
    compare,
    compress,
    demo,
    doctor,
    evaluate,
    export,
    generate,
    inspect,
    lint,
    plan,
    recover,
    reproduce,
    simulate,
    verify,
)
from neuronmm_ops.cli.console import (
    Terminated,
    explain,
    flushed,
    our_warnings,
    printable,
    terminable,
)
from neuronmm_ops.cli.parser import EXAMPLE, Parser
from neuronmm_ops.cli.workers import fail_once, joined, quiet
from neuronmm_ops.errors import WorkerLostError

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program's name; default `sys.argv`.
    """
    with quiet():
        try:
            with terminable():
                return _main(arguments)
        except KeyboardInterrupt:
            return fail_once("interrupted", 130)
        except Terminated:
            return fail_once("terminated", 143, is_echo=True)


def _main(arguments: Sequence[str] | None) -> int:
    commands = parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could follow: answers, and exits
        import argcomplete

        argcomplete.autocomplete(commands)
    try:
        options = commands.parse_args(arguments)
    except SystemExit as stop:  # --help, --version, or a mistake
        return flushed(lambda: None) or int(stop.code or 0)
    try:
        with our_warnings(), joined(options):
            document = options.run(options)
        text = json.dumps(document, indent=2, allow_nan=False) if options.json else None
    except BaseException as error:
        # Native libraries of Python, such as tokenizers, raise their panics as this one.
        is_panic = type(error).__name__ == "PanicException"
        if options.debug or not (is_panic or isinstance(error, Exception)):
            raise
        return fail_once(*explain(error), is_echo=isinstance(error, WorkerLostError))
    code = flushed(lambda: options.show(printable(document)) if text is None else print(text))
    return code or options.exit_code(document)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    root = Parser(
        prog="neuronmm",
        description="Low-rank LLMs: compress, evaluate and run them.",
        epilog=EXAMPLE + "demo --quick",
    )
    root.add_argument("--version", action="version", version=f"neuronmm-ops {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (
        *(demo, compress, recover, evaluate, compare, generate, inspect, verify, export, reproduce),
        *(doctor, bench, plan, simulate, lint),
    ):
        module.add(commands)
    return root
