"""Train a larger Llama on three domains of text, calibrate on one, compress, evaluate on all.

Run it as `python examples/study`: 20 to 60 minutes on two cores. Prints the table of
`python benchmarks methods`, and writes its rows and a plot of them.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from neuronmm_ops.eval import DOCUMENT_SEPARATOR
from neuronmm_ops.progress import progress_bars

sys.path += [str(Path(__file__).parents[1] / "demo"), str(Path(__file__).parents[2])]
from domains import Domain, load_domains
from plot import save_plot
from train import QUICK, TrainConfig, trained

from benchmarks import methods
from benchmarks.cli.quality import show_methods

CONFIG = TrainConfig(
    vocab_size=6144,
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    steps=400,
)
# Of each domain's held-out text: some 18,000 tokens, whose perplexity is taken 51 times.
EVALUATED_CHARACTERS = 60_000
THREADS = 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/study", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/study"), help="default: out/study")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; the numbers mean nothing"
    )
    arguments = parser.parse_args()
    out, quick = arguments.out, arguments.quick
    console = Console(soft_wrap=True)  # a line with a path stays one line
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    console.print("Reading the installed libraries' documentation and source …")
    corpus, domains = load_domains(20 if quick else None)
    dense = out / "dense"
    fresh = trained(QUICK if quick else CONFIG, corpus, dense, console)
    console.print(f"Dense model: {dense}" + ("" if fresh else ", from the cache"))
    calibration = DOCUMENT_SEPARATOR.join(corpus.calibration)
    (out / "calibration.txt").write_text(calibration, encoding="utf-8")
    texts = _write_held_out(domains, out, 4000 if quick else EVALUATED_CHARACTERS)

    with progress_bars() as progress:
        rows = methods.run(
            dense,
            texts,
            calibration,
            methods.candidates_at((0.4,), candidates=methods.CANDIDATES[:2])
            if quick
            else methods.candidates_at(),
            dtype="float32",
            progress=progress,
        )
    show_methods(rows)
    (out / "methods.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    save_plot(rows, out / "methods.png")
    console.print(f"Rows: {out / 'methods.json'}   plot: {out / 'methods.png'}")
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def _write_held_out(domains: dict[str, Domain], out: Path, characters: int) -> dict[str, str]:
    """Write the beginning of each domain's held-out text; return it by the path of its file."""
    texts: dict[str, str] = {}
    for name, domain in domains.items():
        path = out / f"{name}.txt"
        texts[str(path)] = DOCUMENT_SEPARATOR.join(domain.held_out)[:characters]
        path.write_text(texts[str(path)], encoding="utf-8")
    return texts


if __name__ == "__main__":
    sys.exit(main())
