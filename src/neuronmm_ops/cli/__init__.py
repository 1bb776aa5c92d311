"""The command `neuronmm`: arguments in, one table or one JSON document out.

Exit codes: 0 done, 2 usage or bad input (one line on stderr), 1 a defect, of ours or of the kernel
that `simulate` runs or `lint` reads, a cell of `reproduce` that failed, or a kernel that `compile`
saw refused, 130 interrupted, 141 stdout was closed, 143 terminated. With `--json` stdout carries
one JSON document and nothing else; progress and tables go to stderr. Each module adds its command
to the parser.
"""

import argparse
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from neuroncore.cli import execute, lint, simulate
from neuroncore.cli.console import Terminated, terminable
from neuroncore.cli.parser import EXAMPLE, Parser
from neuronmm_ops import __version__
from neuronmm_ops.cli import (
    bench,
    compare,
    compress,
    demo,
    device_check,
    doctor,
    draft,
    evaluate,
    export,
    generate,
    importing,
    inspect,
    plan,
    precompile,
    prune,
    quantize,
    recover,
    reproduce,
    verify,
)
from neuronmm_ops.cli.console import explain, our_warnings, searches_told
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
    def failed(error: BaseException) -> int:
        return fail_once(*explain(error), is_echo=isinstance(error, WorkerLostError))

    return execute(parser(), arguments, _workers, failed)


@contextmanager
def _workers(options: argparse.Namespace) -> Generator[None]:
    with our_warnings(), searches_told(), joined(options):
        yield


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
        *(demo, compress, prune, recover, quantize, evaluate, compare, draft, generate),
        *(inspect, verify, export, importing, reproduce),
        *(doctor, device_check, bench, plan, precompile, simulate, lint),
    ):
        module.add(commands)
    return root
