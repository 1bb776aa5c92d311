"""The command `neuronmm`: arguments in, one table or one JSON document out.

Exit codes: 0 done, 2 usage or bad input (one line on stderr), 1 a defect, of ours or of the kernel
that `simulate` runs, 130 interrupted. With `--json` stdout carries one JSON document and nothing
else; progress and tables go to stderr. Each module adds its commands to the parser.
"""

import argparse
import json
from collections.abc import Sequence

from neuronmm_ops import __version__
from neuronmm_ops.cli import bench, models, plan, simulate
from neuronmm_ops.cli.console import explain, fail, our_warnings
from neuronmm_ops.cli.parser import Parser

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the console script's entry point.

    Args:
        arguments: the command line without the program's name; default `sys.argv`.
    """
    options = parser().parse_args(arguments)
    try:
        with our_warnings():
            document = options.run(options)
    except KeyboardInterrupt:
        return fail("interrupted; nothing was written", 130)
    except Exception as error:
        if options.debug:
            raise
        return fail(*explain(error))
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        options.show(document)
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    root = Parser(prog="neuronmm", description="Low-rank LLMs: compress, evaluate and run them.")
    root.add_argument("--version", action="version", version=f"neuronmm-ops {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (models, bench, plan, simulate):
        module.add(commands)
    return root
