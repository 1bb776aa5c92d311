"""`bench`: what the ops and methods reach here, and how far the simulated core is right."""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from neuronmm_ops.cli.console import COMPACT, progress_bars, show_rows, stderr, stdout
from neuronmm_ops.cli.models import transformers_models
from neuronmm_ops.cli.parser import add_command


def add(commands: Any) -> None:
    """Add the command and its benchmarks to the parser."""
    description = "measure the ops and the methods here; hold the simulated core against devices"
    bench = commands.add_parser("bench", help=description, description=description)
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    command = add_command(benchmarks, "cpu", _bench_cpu, show_rows, "ops beside dense layers")
    command.add_argument("--shape", default="Llama-3.2-1B", help="of a model, by name")
    command.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512], metavar="M")
    add_command(benchmarks, "overhead", _bench_overhead, show_rows, "what an op call costs")
    command = add_command(
        benchmarks, "methods", _bench_methods, show_rows, "perplexity by method and ratio"
    )
    command.add_argument("model", type=Path, metavar="DIR")
    command.add_argument("--text", type=Path, required=True, metavar="FILE")
    command.add_argument("--calibration", type=Path, required=True, metavar="FILE")
    add_command(
        benchmarks,
        "published",
        _bench_published,
        _show_published,
        "published times of NKI kernels beside the simulated core's",
    )


def _bench_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import cpu

    with progress_bars() as progress:
        return cpu.run(options.shape, tokens=options.tokens, progress=progress)


def _bench_overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import overhead

    with stderr.status("calling tiny ops many times"):
        return overhead.run()


def _bench_methods(options: argparse.Namespace) -> list[dict[str, Any]]:
    hf = transformers_models()
    from neuronmm_ops.bench import methods

    text, calibration = hf.read_text(options.text), hf.read_text(options.calibration)
    with progress_bars() as progress:
        return methods.run(options.model, text, calibration, progress=progress)


def _bench_published(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import published

    with progress_bars() as progress:
        return published.run(progress)


def _show_published(rows: list[dict[str, Any]]) -> None:
    from neuronmm_ops.bench import published

    table = Table(**COMPACT)
    table.add_column("kernel", ratio=1)
    for column in ("target", "published", "modelled", "documented", "error", "GiB", "modelled GiB"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*_published_cells(row))
    stdout.print(table)
    stdout.print(
        "Times in ms; modelled and documented are modelled times, with and without the fitted "
        "issue overhead of a matmul. * fixed that overhead."
    )
    stdout.print(f"Mean absolute error of the predicted times: {published.mean_error(rows):.1%}")


def _published_cells(row: dict[str, Any]) -> list[str]:
    name = row["name"] + (" *" if row["calibration"] else "")
    if row["refused"]:
        return [f"{name}: refused, {row['refused']}", row["target"], *[""] * 6]
    values = [f"{row[key]:.4g}" for key in ("published_ms", "modelled_ms") if row[key]]
    values.append(f"{row['documented_ms']:.4g}")
    if row["engine"]:
        values = [f"{row['published_share']:.1%}", f"{row['modelled_share']:.1%}", ""]
    traffic = [f"{(row[key] or 0) / 2**30:.2f}" for key in ("published_bytes", "modelled_bytes")]
    if row["published_bytes"] is None:
        traffic[0] = ""
    return [name, row["target"], *values, f"{row['error']:+.1%}", *traffic]
