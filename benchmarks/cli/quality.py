"""`methods`, `storages`, `divergence` and `residuals`: what compression costs a model."""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.parser import add_command, add_texts, texts_of
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the commands to the parser."""
    description = "perplexity by method and ratio"
    _add(commands, "methods", _methods, show_methods, description, "--dtype")
    description = "perplexity by storage, dense, at equal ranks and at equal bytes"
    storages = _add(commands, "storages", _storages, _show_storages, description)
    storages.add_argument(
        "--ratio",
        type=float,
        nargs="+",
        default=[0.2],
        help="fractions of parameters to remove (default 0.2)",
    )
    description = "divergence by method, at equal kept parameters, next to dense one byte"
    add_command(commands, "divergence", _divergence, _show_divergence, description)
    description = "the same of a model that others trained, of which nothing is spare"
    command = add_command(commands, "stories", _stories, _show_divergence, description)
    command.add_argument(
        "clones", type=Path, metavar="CLONES", help="a folder of the clones, named by their owners"
    )
    description = "divergence by bytes: coarse matrices with a low-rank correction, next to dense"
    add_command(commands, "residuals", _residuals, _show_residuals, description)


def _add(commands: Any, *command_and_options: Any) -> argparse.ArgumentParser:
    """Add a command with the options of both; the arguments are those of `add_command`."""
    example = "model --text test.txt --calibration train.txt"
    command = add_command(commands, *command_and_options, "model", "--device", example=example)
    add_texts(command)
    command.add_argument(
        "--calibration",
        type=Path,
        required=True,
        metavar="FILE.txt",
        help="UTF-8 text to calibrate on",
    )
    command.add_argument(
        "--block", type=int, default=16, help="ranks are multiples of this (default 16)"
    )
    return command


def _read_texts(options: argparse.Namespace) -> tuple[dict[str, str], str]:
    """The texts to evaluate on by their paths, and the one to calibrate on."""
    paths = texts_of(options)
    hf = transformers_models()
    return {str(path): hf.read_text(path) for path in paths}, hf.read_text(options.calibration)


def _methods(options: argparse.Namespace) -> list[dict[str, Any]]:
    texts, calibration = _read_texts(options)
    from benchmarks import methods

    configs = methods.candidates_at(block=options.block)
    computing = {"dtype": options.dtype, "device": options.device}
    with progress_bars() as progress:
        return methods.run(
            options.model, texts, calibration, configs, **computing, progress=progress
        )


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
    from benchmarks import storages

    config = replace(storages.DEFAULT, block=options.block)
    with progress_bars() as progress:
        return storages.run(
            options.model,
            texts,
            calibration,
            options.ratio,
            device=options.device,
            config=config,
            progress=progress,
        )


def _show_storages(rows: list[dict[str, Any]]) -> None:
    """Print a table of the storages' excess, a column a text."""
    texts = list(dict.fromkeys(row["text"] for row in rows))
    dense = ", ".join(
        f"{Path(row['text']).stem} {row['dense_ppl_token']:.2f}" for row in rows[: len(texts)]
    )
    stdout.print(
        f"Dense perplexity: {dense}. Below, what ln of it grows by, and that as a multiple of what "
        "factors in bf16 add at the ratio, with its standard error over paired tokens; then the "
        "divergence from the dense model's predictions in nats, and as such a multiple."
    )
    left = ["storage", "equal", "rounding"]
    for ratio, text in product(dict.fromkeys([row["ratio"] for row in rows]), texts):
        cells: list[list[object] | None] = []
        for row in [row for row in rows if (row["ratio"], row["text"]) == (ratio, text)]:
            if cells and cells[-1] and row["storage"] != cells[-1][0]:
                cells.append(None)
            size = f"{row['bytes'] / row['dense_bytes']:.3f}"
            cells.append([*(row[label] or "" for label in left), size, *_paired_excess(row)])
        title = f"ratio {ratio:g}, {Path(text).stem}"
        columns = [*left, "bytes", "excess", "quotient", "±", "KL", "quotient"]
        show_table(columns, cells, left, title)


def _paired_excess(row: dict[str, Any]) -> list[str]:
    quotients = row["excess_quotient"], row["quotient_error"], row["kl_quotient"]
    excess, error, divergence = ["" if each is None else f"{each:.3f}" for each in quotients]
    return [f"{row['excess_log_ppl']:.5f}", excess, error, f"{row['kl']:.5f}", divergence]


def _divergence(_: argparse.Namespace) -> list[dict[str, Any]]:
    transformers_models()
    from benchmarks import divergence

    with progress_bars() as progress:
        return divergence.run(progress)


def _stories(options: argparse.Namespace) -> list[dict[str, Any]]:
    transformers_models()
    from benchmarks import stories

    with progress_bars() as progress:
        return stories.run(options.clones, progress)


def _show_divergence(rows: list[dict[str, Any]]) -> None:
    """Print a table of the divergences of each text."""
    stdout.print(
        "All Linears of the layers. Below, the divergence from the dense model's predictions in "
        "nats a token, that as a multiple of what whiten with uniform ranks adds, and what the "
        "cross entropy grows by, with standard errors over tokens."
    )
    columns = ["ratio", "method", "bytes", "KL", "±", "quotient", "growth", "±"]
    for trial, text in dict.fromkeys((row["trial"], row["text"]) for row in rows):
        shown = [row for row in rows if (row["trial"], row["text"]) == (trial, text)]
        title = f"{trial}, {text}, dense {shown[0]['dense_ce']:.3f} nats"
        show_table(columns, [_apart(row) for row in shown], left=["method"], title=title)


def _apart(row: dict[str, Any]) -> list[object]:
    quotient = row["kl_quotient"]
    return [
        f"{row['ratio']:g}",
        _candidate(row),
        f"{row['bytes']:.3f}",
        f"{row['kl']:.5f}",
        f"{row['kl_error']:.5f}",
        "" if quotient is None else f"{quotient:.2f}x",
        f"{row['ce'] - row['dense_ce']:.5f}",
        f"{row['ce_error']:.5f}",
    ]


def _residuals(_: argparse.Namespace) -> list[dict[str, Any]]:
    transformers_models()
    from benchmarks import residuals

    with progress_bars() as progress:
        return residuals.run(progress)


def _show_residuals(rows: list[dict[str, Any]]) -> None:
    """Print a table of each model and text, ordered by bytes."""
    stdout.print(
        "All Linears of the layers. Below, bytes as a share of bfloat16's, scales included; the "
        "divergence from the dense model's predictions in nats a token with its standard error, "
        "and as a multiple of what the best of dense int2, int3, int4, int5, int8 and fp8 has at "
        "as many bytes, log-linear between them."
    )
    columns = ["what", "bytes", "KL", "±", "quotient"]
    for trial, text in dict.fromkeys((row["trial"], row["text"]) for row in rows):
        shown = [row for row in rows if (row["trial"], row["text"]) == (trial, text)]
        cells = [_residual(row) for row in sorted(shown, key=lambda row: row["bytes"])]
        show_table(columns, cells, left=["what"], title=f"{trial}, {text}")


def _residual(row: dict[str, Any]) -> list[object]:
    from benchmarks.residuals import label

    quotient = row["quotient"]
    return [
        label(row),
        f"{row['bytes']:.3f}",
        f"{row['kl']:.5f}",
        f"{row['kl_error']:.5f}",
        "" if quotient is None else f"{quotient:.2f}x",
    ]
