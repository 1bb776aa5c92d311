"""`bench`: what the ops and methods reach here, and how far the simulated core is right."""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from neuronmm_ops.cli.console import COMPACT, show_rows, stderr, stdout
from neuronmm_ops.cli.library import transformers_models
from neuronmm_ops.cli.parser import (
    add_command,
    add_computing,
    add_dtype,
    add_model,
    add_shape,
    add_tokens,
    tokens_of,
)
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command and its benchmarks to the parser."""
    description = "measure the ops and the methods here; hold the simulated core against devices"
    bench = commands.add_parser("bench", help=description, description=description)
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    command = add_command(benchmarks, "cpu", _bench_cpu, show_rows, "ops beside dense layers")
    add_shape(command, default="Llama-3.2-1B", help="a shape (default Llama-3.2-1B)")
    add_tokens(command, [1, 8, 64, 512])
    add_dtype(command, "bfloat16 where the CPU multiplies it fast, otherwise float32")
    command.add_argument(
        "--backward", action="store_true", help="also a forward with the gradients of all operands"
    )
    command = add_command(
        benchmarks, "overhead", _bench_overhead, show_rows, "what an op call costs"
    )
    command.add_argument("--xla", action="store_true", help="time tracing on XLA tensors instead")
    command = add_command(
        benchmarks, "methods", _bench_methods, show_rows, "perplexity by method and ratio"
    )
    add_model(command)
    command.add_argument("--text", type=Path, required=True, metavar="FILE")
    command.add_argument("--calibration", type=Path, required=True, metavar="FILE")
    add_computing(command)
    add_command(
        benchmarks,
        "published",
        _bench_published,
        _show_published,
        "published times of NKI kernels beside the simulated core's",
    )
    _add_kernels(benchmarks)


def _add_kernels(benchmarks: Any) -> None:
    command = add_command(
        benchmarks,
        "kernels",
        _bench_kernels,
        _show_kernels,
        "the NKI kernels beside NeuronMM's on the simulated core; time is modelled",
    )
    command.add_argument("--figure1", action="store_true", help="at the paper's shape, M 1K to 32K")
    command.add_argument("--target", help="trn1, trn2 or trn3 (default: this machine's or trn2)")
    command.add_argument("--lnc", type=int, choices=(1, 2), default=1, help="cores of a launch")
    add_shape(command, nargs="+", default=[], help="shapes (default: all), or paper")
    add_tokens(command, [], "each kernel's own")
    command.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw the paper's Figure 1 (matplotlib)"
    )


def _bench_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import cpu
    from neuronmm_ops.ops.cpu import compute_dtype

    is_auto = options.dtype == "auto"
    dtype = compute_dtype(torch.bfloat16) if is_auto else getattr(torch, options.dtype)
    tokens = tokens_of(options)
    with progress_bars() as progress:
        return cpu.run(
            options.model,
            tokens=tokens,
            dtype=dtype,
            backward=options.backward,
            progress=progress,
        )


def _bench_overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import overhead

    with stderr.status("calling tiny ops many times"):
        return overhead.run_xla() if options.xla else overhead.run()


def _bench_methods(options: argparse.Namespace) -> list[dict[str, Any]]:
    hf = transformers_models()
    from neuronmm_ops.bench import methods

    text, calibration = hf.read_text(options.text), hf.read_text(options.calibration)
    with progress_bars() as progress:
        return methods.run(
            options.model,
            text,
            calibration,
            dtype=options.dtype,
            device=options.device,
            progress=progress,
        )


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


def _bench_kernels(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import figure1_plot, kernels

    if options.plot is not None:
        if not options.figure1:
            raise ValueError("--plot draws the paper's Figure 1: it needs --figure1")
        figure1_plot.check(options.plot)
    with progress_bars() as progress:
        rows = kernels.run(
            options.model,
            tokens_of(options),
            target=options.target,
            lnc=options.lnc,
            figure1=options.figure1,
            workers=min(2, os.cpu_count() or 1),
            progress=progress,
        )
    if options.plot is not None:
        figure1_plot.save(rows, options.plot)
    return rows


def _show_kernels(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    cores = f", {first['lnc']} NeuronCores a launch" if first["lnc"] > 1 else ""
    stdout.print(f"{first['dtype']} on {first['target']}{cores}. All times are modelled.")
    for model in dict.fromkeys(row["model"] for row in rows):
        _show_section(model, [row for row in rows if row["model"] == model])
    _show_summary(rows)


def _show_section(model: str, rows: list[dict[str, Any]]) -> None:
    """The rows of one model; with what was published for its shape, if anything was."""
    shapes = list(dict.fromkeys((row["K"], row["N"]) for row in rows))
    published = any(row["published_bytes"] is not None for row in rows)
    rank = next(row["r"] for row in rows if row["r"])
    shape = f"K={shapes[0][0]} N={shapes[0][1]} " if len(shapes) == 1 else ""
    stdout.print(f"\n{model}, {shape}r={rank}")
    table = Table(**COMPACT)
    names = ["M", *(["K x N"] if not shape else []), "kernel", "ms", "of limit", "bound"]
    names += ["GiB", "publ. ms", "GiB"] if published else ["MiB"]
    for name in names:
        table.add_column(name, justify="left" if name == "kernel" else "right", no_wrap=True)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        sizes = [str(row["M"])] if shape else [str(row["M"]), f"{row['K']}x{row['N']}"]
        cells = [*sizes, row["kernel"], *_modelled_cells(row, 2**30 if published else 2**20)]
        last = after is not None and after["M"] != row["M"]
        table.add_row(*cells, *(_published_pair(row, rows) if published else ()), end_section=last)
    stdout.print(table)
    if published:
        stdout.print("Published times and traffic: NeuronMM's Figure 1; its own in brackets.")


def _modelled_cells(row: dict[str, Any], unit: int) -> list[str]:
    if row["time_ms"] is None:
        return ["no room", "", "", ""]
    share, moved = f"{row['limit_share']:.0%}", f"{row['hbm_bytes'] / unit:.3g}"
    return [f"{row['time_ms']:.4g}", share, row["bound"], moved]


def _published_pair(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Published time and traffic; beside our fused kernel NeuronMM's, in brackets."""
    of, form = row, "{}"
    if row["kernel"] == "xuv":
        peers = [r for r in rows if r["kernel"] == "neuronmm_published" and r["M"] == row["M"]]
        of, form = [*peers, row][0], "({})"
    ms, moved = of["published_ms"], of["published_bytes"]
    return [
        "" if ms is None else form.format(f"{ms:g}"),
        "" if moved is None else form.format(f"{moved / 2**30:.3g}"),
    ]


def _show_summary(rows: list[dict[str, Any]]) -> None:
    from neuronmm_ops.bench import kernels

    worst = kernels.worst_shares(rows)
    regimes = [regime for regime in kernels.REGIMES if any(r == regime for _, r in worst)]
    stdout.print("\nSmallest share of the modelled limit, by tokens:")
    table = Table(**COMPACT)
    table.add_column("kernel", no_wrap=True)
    for regime in regimes:
        table.add_column(regime, justify="right")
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        found = [worst.get((kernel, regime)) for regime in regimes]
        table.add_row(
            kernel, *("" if row is None else f"{row['limit_share']:.0%}" for row in found)
        )
    stdout.print(table)
    for ours, theirs, regime in kernels.COMPARED:
        ratio = kernels.speedup(rows, ours, theirs, regime)
        if ratio is not None:
            stdout.print(f"{ours} over {theirs}, {regime}: {ratio:.2f}x (geometric mean, modelled)")
