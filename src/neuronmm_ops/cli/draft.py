"""`draft`: compress a model into what drafts for it fastest."""

import argparse
from pathlib import Path
from typing import Any

from neuroncore.cli.console import show_table
from neuronmm_ops.cli.parser import add_command, add_output, chosen
from neuronmm_ops.extras import transformers_models
from neuronmm_ops.progress import progress_bars


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "compress a model into its own draft, chosen for tokens per second of both"
    command = add_command(
        *(commands, "draft", _draft, _show, description, "model", "--force"),
        example="model -o small --text text.txt",
    )
    add_output(command, "the new directory; nothing is written where no draft pays")
    command.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="to calibrate and measure on (default: Python's documentation, from `demo`)",
    )
    command.add_argument(
        "--tokens-ahead",
        type=int,
        metavar="N",
        help="that the draft proposes, 1 to 8 (default: the fastest)",
    )
    command.add_argument(
        "--target", help="model passes on a core of trn1, trn2 or trn3 (default: measure them here)"
    )
    command.add_argument(
        "--steps", type=int, help="distil each candidate towards the model in so many"
    )


def _draft(options: argparse.Namespace) -> dict[str, Any]:
    transformers_models()
    from neuronmm_ops.demo import CALIBRATION
    from neuronmm_ops.draft import draft

    with progress_bars() as progress:
        return draft(
            options.model,
            options.text or CALIBRATION,
            options.output,
            **chosen(options, "tokens_ahead", "target", "steps", "force"),
            progress=progress,
        )


def _show(document: dict[str, Any]) -> None:
    names = ("ratio", "greedy", "sampled", "draft, ms", "tokens/s", "speed-up")
    keys = ("ratio", "acceptance", "acceptance_sampled", "draft_ms", "tokens_per_s", "speedup")
    cells = [
        [row["storage"] or "", len(row["layers"]), row["tokens_ahead"]]
        + [f"{row[key]:.3g}" for key in keys]
        for row in document["candidates"]
    ]
    passes = f"modelled on {document['target']}" if document["target"] else "measured here"
    title = f"Expected of acceptance and of passes {passes}"
    show_table(["storage", "layers", "ahead", *names], cells, left=["storage"], title=title)
    if measured := document.get("measured"):
        speedup = measured["speedup"]
        print(
            f"Measured in Transformers: {speedup['median']:.2f}x the tokens/s of the model alone "
            f"({speedup['low']:.2f} to {speedup['high']:.2f}, {measured['rounds']} paired rounds)"
        )
    if document["output"] is None:
        print("no draft pays: nothing is written")
    else:
        print(f"{document['output']}: {document['best']['tokens_ahead']} tokens ahead")
