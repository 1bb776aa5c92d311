"""`bench generate`: how fast models generate on this machine, as tables."""

import argparse
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.parser import add_command, add_numbers, chosen
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars

HELP = "time to first token, time per token and memory of models that generate here, measured"


def add(benchmarks: Any) -> None:
    """Add the benchmark to the parser."""
    example = "model small --new-tokens 64"
    command = add_command(benchmarks, "generate", _run, _show, HELP, "--device", example=example)
    command.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="models; the others are compared with the first",
    )
    add_numbers(
        command,
        ("--prompt-tokens", "prompt", 512, "tokens of a prompt"),
        ("--new-tokens", "new", 64, "tokens that follow it"),
        ("--batch-size", "batch", 1, "sequences"),
        ("--rounds", "rounds", 7, "timing rounds; fewer if they take more than a minute"),
    )
    command.add_argument("--compile", action="store_true", help="also measure with torch.compile")


def _run(options: argparse.Namespace) -> list[dict[str, Any]]:
    transformers_models()
    from neuronmm_ops.measure import generate

    with progress_bars() as progress:
        names = ("prompt", "new", "batch", "compile", "rounds", "device")
        return generate.run(options.directories, **chosen(options, *names), progress=progress)


def _show(rows: list[dict[str, Any]]) -> None:
    # Several tables, so that a terminal of 80 columns shows every number.
    columns = ["model", "TTFT ms", "prefill/s", "token ms", "tokens/s", "peak MB"]
    show_table(columns, map(_measured, rows), left=["model"])
    if any(row["compiled"] for row in rows):
        cells = [[_name(row), _number(row["compile_s"], ".0f")] for row in rows if row["compiled"]]
        show_table(["model", "compile s"], cells, left=["model"])
    compared = [row for row in rows if row["speedup"]]
    if compared:
        title = f"speed-up over {rows[0]['dir']}: median and range of paired rounds"
        columns = ["model", "prefill", "decode", "end to end"]
        show_table(columns, map(_compared, compared), left=["model"], title=title)
    for row in rows:
        if row["failed"]:
            stdout.print(f"{_name(row)}: not measured, {row['failed']}")
    first = rows[0]
    versions = ", ".join(f"{name} {value}" for name, value in first["versions"].items())
    rounds = min(row["rounds"] for row in rows if row["rounds"])
    for line in (
        f"measured: prompts of {first['prompt']} tokens and {first['new']} new ones, batch "
        f"{first['batch']}, {first['cache']} cache, rounds: {rounds}",
        "TTFT: time to first token, which prefill/s is taken from; tokens/s: after it; peak: of a "
        "process that does nothing else",
        f"computed in {first['compute_dtype']} on {first['device']} ({first['device_name']}), "
        f"threads: {first['threads']}; {versions}",
    ):
        stdout.print(line)


def _name(row: dict[str, Any]) -> str:
    return row["dir"] + ", compiled" * row["compiled"]


def _measured(row: dict[str, Any]) -> list[str]:
    memory = row["peak_memory_bytes"]
    values = [
        *((row["ttft_ms"], ".1f"), (row["prefill_tokens_per_s"], ".0f")),
        *((row["token_ms"], ".2f"), (row["tokens_per_s"], ".1f")),
        (memory and memory / 1e6, ".0f"),
    ]
    return [_name(row), *(_number(value, spec) for value, spec in values)]


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _compared(row: dict[str, Any]) -> list[str]:
    phases = (row["speedup"][phase] for phase in ("prefill", "decode", "end_to_end"))
    return [_name(row), *(f"{p['median']:.2f}x ({p['low']:.2f}-{p['high']:.2f})" for p in phases)]
