"""The command `python benchmarks`: arguments in, one table or one JSON document out.

Exit codes are those of `neuronmm`. Each module adds its commands to the parser.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.cli import quality, simulated
from neuroncore.cli import run
from neuroncore.cli.console import show_rows, show_table, stderr, stdout
from neuroncore.cli.parser import EXAMPLE, Parser
from neuronmm_ops.cli.console import explain, our_warnings
from neuronmm_ops.cli.parser import add_command

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program's name; default `sys.argv`.
    """
    return run(parser(), arguments, lambda _: our_warnings(), explain)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    root = Parser(
        prog="python benchmarks",
        description="Prove what neuronmm-ops and neuroncore claim.",
        epilog=EXAMPLE + "published --json",
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    simulated.add(commands)
    quality.add(commands)
    description = "the cost of an op call"
    command = add_command(commands, "overhead", _overhead, show_rows, description)
    command.add_argument("--xla", action="store_true", help="time tracing on XLA tensors instead")
    description = "the ops on an NVIDIA GPU, next to dense layers and cuBLAS's pairs"
    add_command(commands, "gpu", _gpu, _show_gpu, description)
    return root


def _gpu(_: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import gpu

    with stderr.status("measuring on the GPU"):
        return gpu.run()


def _show_gpu(rows: list[dict[str, Any]]) -> None:
    stdout.print(f"{rows[0]['device']}, bf16 activations, us a call in a CUDA graph.")
    case = ("op", "M", "K", "N", "r")
    rivals = ("dense", "dense_fp8", "two_gemm", "op")
    stored = ("fp8", "int8", "int4")
    cells = [[*_of(row, case), *(f"{row[f'{name}_us']:.1f}" for name in rivals)] for row in rows]
    show_table([*case, "dense", "dense fp8", "two GEMMs", "bf16"], cells, title="In bf16")
    cells = [
        [
            *_of(row, case),
            *(f"{row[f'{name}_us']:.1f}" for name in stored),
            *(f"{row[name]:.2f}" for name in ("of_two_gemm", "of_dense_fp8")),
        ]
        for row in rows
    ]
    columns = [*case, *stored, "GEMMs / bf16", "dense fp8 / fp8"]
    show_table(columns, cells, title="Stored, and paired ratios")


def _of(row: dict[str, Any], names: Sequence[str]) -> list[Any]:
    return [row[name] for name in names]


def _overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks import overhead

    with stderr.status("calling tiny ops many times"):
        return overhead.run_xla() if options.xla else overhead.run()
