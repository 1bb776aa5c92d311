"""`import`: a low-rank checkpoint that others have published."""

import argparse
from pathlib import Path
from typing import Any

from neuroncore.cli.console import stdout
from neuronmm_ops.cli.parser import add_command, add_output
from neuronmm_ops.extras import transformers_models


def add(commands: Any) -> None:
    """Add the command to the parser."""
    described = "read a low-rank checkpoint that others have published"
    command = add_command(
        commands, "import", _import, _show, described, "--force", example="svd-llm -o small"
    )
    command.add_argument(
        "model",
        type=Path,
        metavar="DIR",
        help="its safetensors, with the dense model's config.json",
    )
    add_output(command, "the new directory")


def _import(options: argparse.Namespace) -> dict[str, Any]:
    return transformers_models().import_published(options.model, options.output, options.force)


def _show(document: dict[str, Any]) -> None:
    ranks = document["ranks"]
    told = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    stdout.print(
        f"wrote {document['output']}: {document['layers']} pairs, {told}, named as by "
        f"{document['layout']}"
    )
