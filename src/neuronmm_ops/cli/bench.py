"""`bench`: what the ops and methods reach here, and how far the simulated core is right."""

import argparse
import os
from itertools import product
from pathlib import Path
from typing import Any

from neuronmm_ops.cli import bench_generate, bench_model
from neuronmm_ops.cli.console import check_output, show_rows, show_table, stderr, stdout
from neuronmm_ops.cli.library import transformers_models
from neuronmm_ops.cli.parser import (
    add_command,
    add_group,
    add_shape,
    add_texts,
    add_tokens,
    texts_of,
    tokens_of,
)
from neuronmm_ops.progress import progress_bars

_DESCRIPTION = "measure the ops and the methods here; hold the simulated core against devices"
_HELP = {
    "cpu": "ops beside dense layers",
    "overhead": "what an op call costs",
    "methods": "perplexity by method and ratio",
    "storages": "perplexity by storage, at equal ranks and equal bytes",
    "published": "published times of NKI kernels beside the simulated core's",
    "kernels": "the NKI kernels beside NeuronMM's on the simulated core; time is modelled",
}


def add(commands: Any) -> None:
    """Add the command and its benchmarks to the parser."""
    example = "cpu --model Llama-3.2-1B --tokens 1,64"
    benchmarks = add_group(commands, "bench", "benchmark", _DESCRIPTION, example)

    example = "--model Llama-3.2-1B --tokens 1,64"
    description = _HELP["cpu"]
    command = add_command(
        benchmarks, "cpu", _cpu, show_rows, description, "--dtype", example=example
    )
    add_shape(command, " (default Llama-3.2-1B)", default="Llama-3.2-1B")
    add_tokens(command, [1, 8, 64, 512])
    command.add_argument(
        "--backward", action="store_true", help="also a forward with the gradients of all operands"
    )
    command.add_argument("--storage", help="also the op on factors in fp8 or int8")

    description = _HELP["overhead"]
    command = add_command(benchmarks, "overhead", _overhead, show_rows, description)
    command.add_argument("--xla", action="store_true", help="time tracing on XLA tensors instead")

    bench_generate.add(benchmarks)

    example = "model --text test.txt --calibration train.txt"
    description, options = _HELP["methods"], ("model", "--dtype", "--device")
    command = add_command(
        benchmarks, "methods", _methods, show_methods, description, *options, example=example
    )
    add_texts(command)
    command.add_argument("--calibration", type=Path, required=True, metavar="FILE.txt")
    command.add_argument(
        "--block", type=int, default=16, help="ranks are multiples of it (default 16)"
    )

    description, options = _HELP["storages"], ("model", "--device")
    command = add_command(
        benchmarks, "storages", _storages, show_storages, description, *options, example=example
    )
    add_texts(command)
    command.add_argument("--calibration", type=Path, required=True, metavar="FILE.txt")
    command.add_argument(
        "--block", type=int, default=16, help="ranks are multiples of it (default 16)"
    )
    command.add_argument(
        "--ratio", type=float, nargs="+", default=[0.2], help="of parameters removed (default 0.2)"
    )

    description = _HELP["published"]
    add_command(benchmarks, "published", _published, _show_published, description)

    description, example = _HELP["kernels"], "--model Llama-3.2-1B --tokens 1 --target trn2"
    command = add_command(
        benchmarks, "kernels", _kernels, _show_kernels, description, "--lnc", example=example
    )
    command.add_argument(
        "--target",
        help="trn1, trn2 or trn3 (default: this machine's or trn2; with --figure1 trn1, on which "
        "the paper measured)",
    )
    command.add_argument("--figure1", action="store_true", help="at the paper's shape, M 1K to 32K")
    add_shape(command, "; or paper (default: all names, and paper)", nargs="+", default=[])
    add_tokens(command, [], "each kernel's own")
    command.add_argument(
        "--storage", nargs="+", default=[], help="also our kernels on factors in fp8 or int8"
    )
    command.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw the paper's Figure 1 (matplotlib)"
    )

    bench_model.add(benchmarks)


def _cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from neuronmm_ops.bench import cpu
    from neuronmm_ops.ops.backends.cpu import compute_dtype

    is_auto = options.dtype == "auto"
    dtype = compute_dtype(torch.bfloat16) if is_auto else getattr(torch, options.dtype)
    with progress_bars() as progress:
        return cpu.run(
            options.model,
            tokens=tokens_of(options),
            dtype=dtype,
            backward=options.backward,
            storage=options.storage,
            progress=progress,
        )


def _overhead(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import overhead

    with stderr.status("calling tiny ops many times"):
        return overhead.run_xla() if options.xla else overhead.run()


def _read_texts(options: argparse.Namespace) -> tuple[dict[str, str], str]:
    """The texts to evaluate on by their paths, and the one to calibrate on."""
    paths = texts_of(options)
    hf = transformers_models()
    return {str(path): hf.read_text(path) for path in paths}, hf.read_text(options.calibration)


def _methods(options: argparse.Namespace) -> list[dict[str, Any]]:
    texts, calibration = _read_texts(options)
    from neuronmm_ops.bench import methods

    chosen = {"block": options.block, "dtype": options.dtype, "device": options.device}
    with progress_bars() as progress:
        return methods.run(options.model, texts, calibration, **chosen, progress=progress)


def show_methods(rows: list[dict[str, Any]]) -> None:
    """Print a table of the methods' excess, a column a text."""
    texts = [row["text"] for row in rows if row["method"] == "dense"]
    dense = ", ".join(
        f"{Path(row['text']).stem} {row['ppl_token']:.2f}" for row in rows[: len(texts)]
    )
    stdout.print(
        f"Dense perplexity: {dense}. Below, what ln of it grows by, and that as a multiple of what "
        f"whiten with uniform ranks adds. Computed in {rows[0]['compute_dtype']}."
    )
    cells: list[list[object] | None] = []
    for start in range(len(texts), len(rows), len(texts)):
        group = rows[start : start + len(texts)]
        if cells and group[0]["ratio"] != rows[start - 1]["ratio"]:
            cells.append(None)
        first = group[0]
        ratios = f"{first['ratio']:g}", f"{first['effective_ratio']:.3f}"
        cells.append([*ratios, _candidate(first), *map(_excess, group)])
    columns = ["ratio", "effective", "method", *(Path(text).stem for text in texts)]
    show_table(columns, cells, left=["method"])


def _candidate(row: dict[str, Any]) -> str:
    """The method, with what is not greedy, or what greedy weighs by."""
    if row["allocation"] == "uniform":
        return f"{row['method']} uniform"
    return row["method"] + (f" by {row['importance']}" if row["importance"] else "")


def _excess(row: dict[str, Any]) -> str:
    quotient = row["excess_quotient"]
    return f"{row['excess_log_ppl']:.4f}" + ("" if quotient is None else f" {quotient:.2f}x")


def _storages(options: argparse.Namespace) -> list[dict[str, Any]]:
    texts, calibration = _read_texts(options)
    from neuronmm_ops.bench import storages

    chosen = {"ratios": options.ratio, "block": options.block, "device": options.device}
    with progress_bars() as progress:
        return storages.run(options.model, texts, calibration, **chosen, progress=progress)


def show_storages(rows: list[dict[str, Any]]) -> None:
    """Print a table of the storages' excess, a column a text."""
    texts = list(dict.fromkeys(row["text"] for row in rows))
    dense = ", ".join(
        f"{Path(row['text']).stem} {row['dense_ppl_token']:.2f}" for row in rows[: len(texts)]
    )
    stdout.print(
        f"Dense perplexity: {dense}. Below, what ln of it grows by, and that as a multiple of what "
        "factors in bf16 add at the ratio, with its standard error over paired tokens; then the "
        "divergence from the dense model's predictions, as such a multiple."
    )
    left = ["storage", "equal", "rounding"]
    for ratio, text in product(dict.fromkeys([row["ratio"] for row in rows]), texts):
        cells: list[list[object] | None] = []
        for row in [row for row in rows if (row["ratio"], row["text"]) == (ratio, text)]:
            if cells and cells[-1] and row["storage"] != cells[-1][0]:
                cells.append(None)
            size = f"{row['bytes'] / row['dense_bytes']:.3f}"
            cells.append([*(row[label] for label in left), size, *_paired_excess(row)])
        title = f"ratio {ratio:g}, {Path(text).stem}"
        show_table([*left, "bytes", "excess", "quotient", "±", "KL"], cells, left, title)


def _paired_excess(row: dict[str, Any]) -> list[str]:
    quotients = row["excess_quotient"], row["quotient_error"], row["kl_quotient"]
    shown = ["" if quotient is None else f"{quotient:.3f}" for quotient in quotients]
    return [f"{row['excess_log_ppl']:.5f}", *shown]


def _published(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import published

    with progress_bars() as progress:
        return published.run(progress, workers=min(2, os.cpu_count() or 1))


def _show_published(rows: list[dict[str, Any]]) -> None:
    from neuronmm_ops.bench import published
    from neuronmm_ops.hardware import DMA_MODELS

    cells = [_published_cells(row) for row in rows]
    columns = ["figure", "target", "published", "modelled", *DMA_MODELS]
    show_table(columns, cells, left=["figure"])
    stdout.print(
        f"Times in ms, modelled under {DMA_MODELS[0]}; its error, and that of the other DMA model. "
        "* fixed a constant. A token is a bound, which no published system beats: its share."
    )
    for model in DMA_MODELS:
        errors = [row["errors"][model] for row in published.predicted(rows)]
        worst = max(errors, key=abs)
        stdout.print(
            f"{model}: {len(errors)} predicted figures, mean absolute error "
            f"{published.mean_error(rows, model):.1%}, the worst {worst:+.0%}"
        )


def _published_cells(row: dict[str, Any]) -> list[str]:
    name = row["name"] + (" *" if row["calibration"] else "")
    if row["refused"]:
        return [f"{name}: refused, {row['refused']}", row["target"]]
    if row["published_share"] is not None:
        values = [f"{row['published_share']:.1%}", f"{row['modelled_share']:.1%}"]
    else:
        values = [_number(row["published_ms"]), _number(row["modelled_ms"])]
    errors = [f"{error:+.1%}" for error in (row["errors"] or {}).values()]
    if row["measure"] == "bound":
        errors = [f"{row['modelled_ms'] / row['published_ms']:.1%}"]
    return [name, row["target"], *values, *errors]


def _number(value: float | None, unit: int = 1, spec: str = ".4g") -> str:
    """A number in a unit; nothing for None."""
    return "" if value is None else format(value / unit, spec)


def _kernels(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.bench import figure1_plot, kernels

    if options.plot is not None:
        if not options.figure1:
            raise ValueError("--plot draws the paper's Figure 1: it needs --figure1")
        check_output(options.plot)
        figure1_plot.check_format(options.plot)
    with progress_bars() as progress:
        rows = kernels.run(
            options.model,
            tokens_of(options),
            target=options.target,
            lnc=options.lnc,
            figure1=options.figure1,
            storage=options.storage,
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
        _show_model(model, [row for row in rows if row["model"] == model])
    _show_shares(rows)
    _show_speedups(rows)


def _show_model(model: str, rows: list[dict[str, Any]]) -> None:
    """The rows of one model; with what was published for its shape, if anything was."""
    shapes = list(dict.fromkeys(f"{row['K']}x{row['N']}" for row in rows))
    published = any(row["published_bytes"] is not None for row in rows)
    rank = next(row["r"] for row in rows if row["r"])
    stdout.print(
        f"\n{model}, " + (f"K x N {shapes[0]}, " if len(shapes) == 1 else "") + f"r={rank}"
    )
    columns = ["M", "kernel", "ms", "of limit", "bound"]
    columns += ["GiB", "publ. ms", "GiB"] if published else ["MiB"]
    if len(shapes) > 1:
        columns.insert(1, "K x N")
    cells: list[list[object] | None] = []
    tokens = rows[0]["M"]
    for row in rows:
        if row["M"] != tokens:
            cells.append(None)
            tokens = row["M"]
        sizes = [row["M"], f"{row['K']}x{row['N']}"][: min(2, len(shapes))]
        measured = _modelled_cells(row, 2**30 if published else 2**20)
        pair = [_number(row["published_ms"]), _number(row["published_bytes"], 2**30, ".3g")]
        cells.append([*sizes, row["kernel"], *measured, *(pair if published else [])])
    show_table(columns, cells, left=["kernel"])
    if published:
        stdout.print("Published times and traffic: NeuronMM's Figure 1.")


def _modelled_cells(row: dict[str, Any], unit: int) -> list[str]:
    if row["time_ms"] is None:
        return ["no room", "", "", ""]
    share, moved = f"{row['limit_share']:.0%}", _number(row["hbm_bytes"], unit, ".3g")
    return [_number(row["time_ms"]), share, row["bound"], moved]


def _show_shares(rows: list[dict[str, Any]]) -> None:
    from neuronmm_ops.bench import kernels

    worst = kernels.worst_shares(rows)
    regimes = [regime for regime in kernels.REGIMES if any(r == regime for _, r in worst)]
    stdout.print("\nSmallest share of the modelled limit, by tokens:")
    cells: list[list[str]] = []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        found = [worst.get((kernel, regime)) for regime in regimes]
        cells.append([kernel, *("" if r is None else f"{r['limit_share_low']:.0%}" for r in found)])
    show_table(["kernel", *regimes], cells, left=["kernel"])


def _show_speedups(rows: list[dict[str, Any]]) -> None:
    """Speed-ups over other kernels, each with its range over the DMA models and its least."""
    from neuronmm_ops.bench import kernels

    compared = [(*names, kernels.speedup(rows, *names)) for names in kernels.COMPARED]
    found = [(*names, ratios) for *names, ratios in compared if ratios]
    if found:
        stdout.print("Modelled speed-ups, geometric means, by what small DMAs are taken to cost:")
    for ours, theirs, regime, ratios in found:
        low, high = min(ratios.values()), max(ratios.values())
        models = ", ".join([f"{model} {ratio:.2f}x" for model, ratio in ratios.items()])
        least = kernels.least_speedup(rows, ours, theirs, regime)
        stdout.print(
            f"{ours} over {theirs}, {regime}: {low:.2f}x to {high:.2f}x ({models}), "
            f"least {least:.2f}x"
        )
