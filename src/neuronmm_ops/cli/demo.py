"""`demo`: the model that ships with the package, dense next to compressed, in half a minute."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.bench_ranks import as_range
from neuronmm_ops.cli.parser import add_command, add_output
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars

QUICK, RATIOS = (0.4,), (0.2, 0.4, 0.6)


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "compress the small model that ships with the package; needs no download"
    command = add_command(commands, "demo", _demo, _show, description, example="--quick")
    command.add_argument(
        "--quick", action="store_true", help="one ratio, in half a minute, instead of three"
    )
    add_output(command, "keep the models and texts in this new directory", required=False)


def _demo(options: argparse.Namespace) -> dict[str, Any]:
    transformers_models()
    from neuronmm_ops import demo

    ratios = QUICK if options.quick else RATIOS
    with _directory(options.output) as place, progress_bars() as progress:
        measured = demo.run(demo.MODEL, demo.CALIBRATION, demo.HELD_OUT, place, ratios, progress)
        if options.output is not None:
            shutil.copytree(demo.MODEL, place / "dense")
            for text in (demo.CALIBRATION, demo.HELD_OUT):
                shutil.copyfile(text, place / text.name)
    return {**measured, "output": options.output and str(options.output)}


@contextmanager
def _directory(output: Path | None) -> Generator[Path]:
    """Give a directory to work in, which becomes `output` at the end, or is removed for None."""
    if output is None:
        with tempfile.TemporaryDirectory() as place:
            yield Path(place)
        return
    from neuronmm_ops.output import check_target, replacement

    if os.path.lexists(output):
        raise FileExistsError(f"output {output} exists; choose another")
    check_target(output, force=False)
    with replacement(output, force=False) as place:
        yield place


def _show(document: dict[str, Any]) -> None:
    rows = document["rows"]
    show_table(
        ["model", "removed", "MLP kB", "perplexity", "excess"],
        [
            [
                row["model"],
                f"{row['effective_ratio']:.0%}",
                f"{row['bytes'] / 1e3:,.0f}",
                f"{row['ppl_token']:.3f}",
                f"{row['excess_log_ppl']:+.4f}",
            ]
            for row in rows
        ],
        left=["model"],
        title=f"a small Llama's MLPs; {document['tokens']:,} held-out tokens",
    )
    timed, modelled = document["timed"], document["modelled"]
    shape = f"{timed['K']} x {timed['N']}, rank {timed['r']}, one token"
    for line in (
        "removed: share of the MLPs' parameters; excess: ln of the perplexity less ln of dense",
        f"{shape}, measured here ({timed['compute_dtype']}, packed, one thread): {_times(timed)}",
        f"{shape}, modelled on one {modelled['target']} core, never run: {_times(modelled)}",
        "int8 and narrower MLPs (neuronmm prune) are the better bargains here: this small model "
        "has inner features to spare",
    ):
        stdout.print(line)
    if (output := document["output"]) is not None:
        following = f"next: neuronmm generate {output}/low-rank-0.4 --prompt 'Return the'"
        stdout.print(following, is_whole=True)


def _times(times: dict[str, Any]) -> str:
    """Times of a matrix, and their ratio: with its range where modelled, else of paired rounds."""
    is_measured = "packed_op_ms" in times
    dense, low_rank = (f"{'packed_' * is_measured}{name}_ms" for name in ("dense", "op"))
    shown = f"dense {times[dense]:.3g} ms, low rank {times[low_rank]:.3g} ms"
    if not is_measured:
        return f"{shown}: {as_range(times['speedup'])}"
    low, middle, high = times["packed_speedup_quartiles"]
    return f"{shown}; round by round {middle:.2f}x, half of the rounds {low:.2f} to {high:.2f}x"
