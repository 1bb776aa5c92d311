# PYTHON_ARGCOMPLETE_OK
"""The command `neuroncore`: arguments in, one table or one JSON document out.

Exit codes: 0 done, 2 usage or bad input (one line on stderr), 1 a defect, of ours or of the kernel
that `simulate` and `check` run or `lint` reads, 130 interrupted, 141 stdout was closed, 143
terminated. With `--json` stdout carries one JSON document and nothing else. Each module adds its
command to the parser.
"""

import argparse
import contextlib
import json
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager

from neuroncore import __version__
from neuroncore.cli import calibrate, check, compare, judge, lint, migrate, script, simulate
from neuroncore.cli.console import Terminated, explain, fail, flushed, printable, terminable
from neuroncore.cli.parser import EXAMPLE, Parser

__all__ = ["execute", "main", "parser", "run"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program's name; default `sys.argv`.
    """
    return run(parser(), arguments, _without_warnings, explain)


def run(
    commands: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    during: Callable[[argparse.Namespace], AbstractContextManager[None]],
    explained: Callable[[BaseException], tuple[str, int]],
) -> int:
    """`execute` as a program of one process, which may be interrupted or terminated.

    Args:
        commands: the parser.
        arguments: the command line without the program's name; None for `sys.argv`.
        during: gives the context in which the command runs.
        explained: gives one line for an error, and the exit code.
    """

    def failed(error: BaseException) -> int:
        return fail(commands.prog, *explained(error))

    try:
        with terminable():
            return execute(commands, arguments, during, failed)
    except KeyboardInterrupt:
        return fail(commands.prog, "interrupted", 130)
    except Terminated:
        return fail(commands.prog, "terminated", 143)


def execute(
    commands: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    during: Callable[[argparse.Namespace], AbstractContextManager[None]],
    failed: Callable[[BaseException], int],
) -> int:
    """Run the command that the arguments name, print its document, and return its exit code.

    Args:
        commands: the parser.
        arguments: the command line without the program's name; None for `sys.argv`.
        during: gives the context in which the command runs.
        failed: prints one line for an error and returns the exit code.
    """
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could follow: answers, and exits
        import argcomplete

        argcomplete.autocomplete(commands)
    try:
        options = commands.parse_args(arguments)
    except SystemExit as stop:  # --help, --version, or a mistake
        return flushed(commands.prog, lambda: None) or int(stop.code or 0)
    try:
        with during(options):
            document = options.run(options)
        text = json.dumps(document, indent=2, allow_nan=False) if options.json else None
    except BaseException as error:
        # Native libraries of Python, such as tokenizers, raise their panics as this one.
        is_panic = type(error).__name__ == "PanicException"
        if options.debug or not (is_panic or isinstance(error, Exception)):
            raise
        return failed(error)
    code = flushed(
        commands.prog,
        lambda: options.show(printable(document)) if text is None else print(text),
    )
    return code or options.exit_code(document)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    root = Parser(
        prog="neuroncore",
        description="A NeuronCore on the CPU: run and read NKI kernels.",
        epilog=EXAMPLE + "simulate kernel.py:scale --arg 'x=bf16[128,512]'",
    )
    root.add_argument("--version", action="version", version=f"neuroncore {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (script, simulate, lint, migrate, check, judge, compare, calibrate):
        module.add(commands)
    return root


@contextlib.contextmanager
def _without_warnings(_: argparse.Namespace) -> Generator[None]:
    """Hide what libraries warn of; `simulate` prints the warnings of kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
