"""Runs this package inside the engines' own public sources, on a CPU.

    python tests/engines/sources DIR [--json] [--engine NAME ...]

DIR holds the checkouts that `checkouts.py` names. Engines run in the environment that `make
engines-env` made. Prints a row an engine; exit code 1 where an answer differs or a
signature moved, 2 where a source or the environment is missing.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkouts import CHECKOUTS, missing
from signatures import moved

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-engines" / "bin" / "python"


@dataclass(frozen=True)
class Engine:
    """A row of the table.

    Attributes:
        name: of the engine.
        script: of this folder.
        folders: checkouts, each with the folder in it that the script takes.
        ranks: which cases, all where none is named, on how many ranks.
        ran: what of the engine ran.
    """

    name: str
    script: str
    folders: dict[str, str]
    ranks: dict[int, tuple[str, ...]]
    ran: str

    def run(self, directory: Path) -> dict[str, Any]:
        """Run every case; raise `RuntimeError` with the last line where it ends early."""
        sources = [str(directory / folder / inner) for folder, inner in self.folders.items()]
        rows: list[dict[str, Any]] = []
        for ranks, cases in self.ranks.items():
            command = [str(PYTHON), str(HERE / self.script), *sources, str(ranks), *cases]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found = [line for line in done.stdout.splitlines() if line.startswith("{")]
            rows += [json.loads(line) for line in found]
            if not found or (done.returncode and all(row["equal"] for row in rows)):
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise RuntimeError(
                    f"{self.name} on {ranks} ranks ended after {len(found)} cases: {last}"
                )
        return {
            "engine": self.name,
            "ran": self.ran,
            "sources": {
                CHECKOUTS[folder].repository: [CHECKOUTS[folder].version, CHECKOUTS[folder].commit]
                for folder in self.folders
            },
            "ranks": list(self.ranks),
            "cases": len(rows),
            "equal": sum(row["equal"] for row in rows),
            "new_tokens": sum(row["new_tokens"] for row in rows),
            "largest_error": max((row["error"] for row in rows if "error" in row), default=None),
        }


ENGINES = (
    Engine(
        "NxD Inference",
        "nxdi.py",
        {"nxd": "src", "nxdi": "src"},
        {
            1: ("llama", "qwen3"),
            2: ("llama", "llama one", "llama fused", "llama mixed", "llama biases", "qwen2"),
            4: ("llama heads",),
        },
        "models, generation, layers, `ModelBuilder.shard_checkpoint`, ranks over gloo",
    ),
    Engine(
        "vLLM on NxD Inference",
        "vllm_nxdi.py",
        {"nxd": "src", "nxdi": "src", "vllm-neuron-0.2": "."},
        {1: ("llama", "qwen3")},
        "our entry point, the plugin's model loader and its NxD Inference; not vLLM itself",
    ),
    Engine(
        "optimum-neuron",
        "optimum_neuron.py",
        {"nxd": "src", "optimum-neuron": "."},
        {1: ("llama", "qwen3"), 2: ("llama mixed",)},
        "models, generation, loading by `ModelBuilder.shard_checkpoint`, ranks over gloo",
    ),
)


def said(row: dict[str, Any]) -> str:
    """A row in words."""
    error = row["largest_error"]
    return (
        f"{row['engine']}: tokens of {row['equal']} of {row['cases']} cases equal Transformers' "
        f"({row['new_tokens']} tokens), ranks {', '.join(map(str, row['ranks']))}"
        + ("" if error is None else f", logits within {error:.1e}")
    )


def main() -> int:
    """Run the engines, print a line or a document."""
    parser = argparse.ArgumentParser(prog="python tests/engines/sources", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--engine", nargs="*", choices=[engine.name for engine in ENGINES])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [e for e in ENGINES if arguments.engine is None or e.name in arguments.engine]
    folders = tuple(dict.fromkeys(folder for engine in chosen for folder in engine.folders))
    problems = missing(arguments.directory, folders)
    if not PYTHON.exists():
        problems.append(f"{PYTHON} is missing; run make engines-env")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        print(f"python tests/engines/sources/checkouts.py {arguments.directory}", file=sys.stderr)
        return 2
    lines = [line for folder in folders for line in moved(arguments.directory, folder)]
    if lines:
        print("\n".join(lines), file=sys.stderr)
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        rows = [engine.run(arguments.directory) for engine in chosen]
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(said(row))
    return int(any(row["equal"] != row["cases"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
