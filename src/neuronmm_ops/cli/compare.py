"""`compare`: compressed checkpoints next to their dense model, as a table and a plot."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neuroncore.cli.console import check_output, show_table, stdout
from neuronmm_ops.cli.parser import add_command, add_texts, chosen, texts_of
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "perplexity, size and speed of checkpoints and their dense model"
    example = "small smaller --text test.txt --plot compare.png"
    options = ("--seqlen", "--dtype", "--device")
    command = add_command(
        commands, "compare", _compare, _show, description, *options, example=example
    )
    command.add_argument(
        "directories", type=Path, nargs="+", metavar="DIR", help="a compressed checkpoint"
    )
    add_texts(command)
    command.add_argument(
        "--dense",
        metavar="MODEL",
        help="the dense model (default: the one that the checkpoints record)",
    )
    command.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw perplexity and speed (matplotlib)"
    )


def _compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    paths = texts_of(options)
    hf = transformers_models()
    from neuronmm_ops.measure import compare, compare_plot

    if options.plot is not None:
        check_output(options.plot)
        compare_plot.check_format(options.plot)
    texts = {str(path): hf.read_text(path) for path in paths}
    with progress_bars() as progress:
        rows = compare.run(
            options.directories,
            texts,
            options.dense,
            **chosen(options, "seqlen", "dtype", "device"),
            progress=progress,
        )
    if options.plot is not None:
        compare_plot.save(rows, options.plot)
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    dense = rows[0]
    names = ["dense", *(Path(row["dir"]).resolve().name for row in rows[1:])]
    # Several tables, so that a terminal of 80 columns shows every number.
    texts = list(dense["ppl_token"])
    cells = [[_quality(row, text) for text in texts] for row in rows]
    _show_models(names, [Path(text).stem for text in texts], cells, "perplexity (excess)")
    _show_models(names, ["ratio", "effective", "MB", "gamma"], map(_size, rows), "size")
    columns = ["prefill/s", "", "decode/s", ""]
    _show_models(names, columns, map(_speed, rows), "tokens/s, over dense")
    versions = ", ".join(f"{name} {value}" for name, value in dense["versions"].items())
    for line in (
        "excess: ln of the perplexity less ln of the dense model's, nats a token",
        f"tokens/s measured, batch 1, prefill of {dense['prefill_tokens']} tokens and decode of "
        f"{dense['decode_tokens']}, each checkpoint in turn with the dense model",
        "gamma: mean excess / (end-to-end speed-up - 1), lower is better; reconstructed, the "
        "paper defines it in words only, and with accuracy",
        f"blocks of {dense['seqlen']} tokens, computed in {dense['compute_dtype']} on "
        f"{dense['device']}, threads: {dense['threads']}; {versions}",
    ):
        stdout.print(line)


def _show_models(
    names: list[str], columns: list[str], cells: Iterable[list[str]], title: str
) -> None:
    rows = [[name, *row] for name, row in zip(names, cells, strict=True)]
    show_table(["model", *columns], rows, left=["model"], title=title)


def _quality(row: dict[str, Any], text: str) -> str:
    return f"{row['ppl_token'][text]:.3f} ({row['excess_log_ppl'][text]:+.4f})"


def _size(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['ratio']:.2f}", f"{row['effective_ratio']:.3f}", f"{row['bytes'] / 1e6:.1f}"]
    return [*cells, "" if row["gamma"] is None else f"{row['gamma']:.4f}"]


def _speed(row: dict[str, Any]) -> list[str]:
    cells: list[str] = []
    for phase in ("prefill", "decode"):
        cells += [f"{row['tokens_per_s'][phase]:.0f}", f"{row['speedup'][phase]:.2f}x"]
    return cells
