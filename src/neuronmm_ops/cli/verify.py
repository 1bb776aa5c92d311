"""`verify`: every file and tensor of a directory compared with its manifest."""

import argparse
from pathlib import Path
from typing import Any

from neuroncore.cli.console import stdout
from neuronmm_ops.cli.parser import add_command


def add(commands: Any) -> None:
    """Add the command to the parser."""
    described = "compare every file and tensor of a checkpoint with its manifest"
    command = add_command(commands, "verify", _verify, _show, described, example="small")
    command.add_argument("model", type=Path, metavar="DIR", help="a directory that neuronmm wrote")


def _verify(options: argparse.Namespace) -> dict[str, Any]:
    from neuronmm_ops.checkpoint import read_config
    from neuronmm_ops.manifest import verify

    read_config(options.model)  # says what is wrong with a path that is no model's
    manifest = verify(options.model)
    return {
        "dir": str(options.model),
        "files": len(manifest["files"]),
        "tensors": len(manifest["tensors"]),
        "bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
        **{
            key: manifest[key]
            for key in ("weights_sha256", "made_by", "source", "texts", "versions")
        },
    }


def _show(document: dict[str, Any]) -> None:
    source = document["source"]
    made = f"made by {document['made_by']}" + (f" of {source['path']}" if source else "")
    stdout.print(
        f"{document['dir']}: {document['files']} files and {document['tensors']} tensors are what "
        f"manifest.json says; {made}; weights SHA-256 {document['weights_sha256']}"
    )
