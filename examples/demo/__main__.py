"""Train a small Llama on Python's documentation, compress it, and report what that cost and won.

Run it as `python examples/demo`; the page it writes is `out/demo/report.html`. Nothing is
downloaded: the text is what every Python installation holds.
"""

import argparse
import itertools
import platform
import sys
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
from corpus import Corpus, load_corpus
from measure import sample_text
from report import write_report
from results import BASELINE, OURS, RECOVERED, Point, Results, told_ratio
from rich.console import Console
from rich.table import Table
from train import QUICK, TrainConfig, dtype_name, trained, training_dtype
from trainium import on_trainium
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from neuronmm_ops import CompressionReport, SVDConfig, compress_, hf
from neuronmm_ops.bench.speed import PairedSpeed, paired_speed
from neuronmm_ops.eval import DOCUMENT_SEPARATOR, encode_documents, token_perplexity
from neuronmm_ops.progress import progress_bars
from neuronmm_ops.recover import RecoverConfig

METHODS = {
    "plain": SVDConfig(method="plain", allocation="uniform"),
    BASELINE: SVDConfig(method="whiten", allocation="uniform"),
    OURS: SVDConfig(),
}
RATIOS = (0.05, 0.2, 0.4, 0.6, 0.8)
# The default block of 128 is for real models: here it would leave three ranks to choose from.
BLOCK = 16
RECOVERED_RATIOS = (0.4, 0.8)
THREADS = 2
PROMPT = "read(self, size=-1)\n    Read"


@dataclass(frozen=True)
class Plan:
    """How much to do."""

    train: TrainConfig
    max_modules: int | None
    ratios: tuple[float, ...]
    calibration_blocks: int
    held_out_blocks: int
    decode_tokens: int
    rounds: int
    sample_tokens: int
    recovery: RecoverConfig

    @property
    def recovered_ratios(self) -> tuple[float, ...]:
        """Those of the ratios at which the default's factors are also trained."""
        return tuple(ratio for ratio in self.ratios if ratio in RECOVERED_RATIOS)


def main() -> None:
    arguments = _arguments()
    plan = _plan(arguments)
    _check_ratios(plan.ratios, plan.train)
    console = Console(soft_wrap=True)  # a line with a path stays one line
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    console.print("Reading the documentation of the standard library …")
    corpus = load_corpus(plan.max_modules)
    dense_dir = arguments.out / "dense"
    fresh = trained(plan.train, corpus, dense_dir, console)
    console.print(f"Dense model: {dense_dir}" + ("" if fresh else ", from the cache"))

    # For the command line: neuronmm compress --calibration, neuronmm eval --text.
    for name, documents in (("calibration", corpus.calibration), ("held_out", corpus.held_out)):
        text = DOCUMENT_SEPARATOR.join(documents)
        (arguments.out / f"{name}.txt").write_text(text, encoding="utf-8")

    console.print("Compressing at each ratio by each method, and measuring …")
    results = run(plan, corpus, dense_dir)
    report = arguments.out / "report.html"
    write_report(results, report)
    console.print(summary_table(results))
    console.print(f"Report: {report}   ({time.perf_counter() - start:.0f} s in all)")


def run(plan: Plan, corpus: Corpus, dense_dir: Path) -> Results:
    """Measure the dense model, then every ratio by every method."""
    seqlen = plan.train.context
    tokenizer = AutoTokenizer.from_pretrained(dense_dir)
    calibration = _blocks(tokenizer, corpus.calibration, seqlen, plan.calibration_blocks)
    held_out = _blocks(tokenizer, corpus.held_out, seqlen, plan.held_out_blocks).flatten()
    prompt_tokens = held_out[:seqlen]

    def load() -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(dense_dir, dtype=torch.float32).eval()

    dense = load()
    points: list[Point] = []
    compressed_models: dict[float, LlamaForCausalLM] = {}
    speeds: dict[tuple[int | None, ...], PairedSpeed] = {}
    with progress_bars() as progress:
        steps = itertools.count(1)
        total = 3 + 4 * (len(plan.ratios) * len(METHODS) + len(plan.recovered_ratios))

        def advance(what: str) -> None:
            progress("measure", next(steps), total, what)

        def measured(
            method: str, ratio: float, model: LlamaForCausalLM, compression: CompressionReport
        ) -> Point:
            name = f"{method} at {ratio:.0%}"
            advance(f"{name}: perplexity")
            ppl = token_perplexity(model, held_out, seqlen=seqlen).ppl_token
            advance(f"{name}: speed")
            # Models of equal ranks are equally fast: one measurement serves them all.
            ranks = tuple(layer.r for layer in compression.layers)
            if ranks not in speeds:
                speeds[ranks] = paired_speed(
                    dense,
                    model,
                    prompt_tokens,
                    decode_tokens=plan.decode_tokens,
                    rounds=plan.rounds,
                )
            advance(f"{name}: sample")
            sample = sample_text(model, tokenizer, PROMPT, new_tokens=plan.sample_tokens)
            return Point(method, ratio, compression, ppl, speeds[ranks], sample)

        dense_ppl = token_perplexity(dense, held_out, seqlen=seqlen).ppl_token
        advance("dense: sample")
        dense_sample = sample_text(dense, tokenizer, PROMPT, new_tokens=plan.sample_tokens)
        for ratio in plan.ratios:
            for method, config in METHODS.items():
                advance(f"{method} at {ratio:.0%}: compress")
                model = load()
                config = replace(config, ratio=ratio, block=BLOCK)
                batches = list(calibration.split(8)) if config.needs_calibration else None
                compression = compress_(model, config, calibration=batches)
                points.append(measured(method, ratio, model, compression))
                if method == OURS:
                    compressed_models[ratio] = model
                if method == OURS and ratio in plan.recovered_ratios:
                    advance(f"{RECOVERED} at {ratio:.0%}: train")
                    compressed = dense_dir.with_name(f"{OURS}-{ratio:g}")
                    hf.save(model, compressed, compression, tokenizer, force=True)
                    target = dense_dir.with_name(f"{RECOVERED}-{ratio:g}")
                    text = DOCUMENT_SEPARATOR.join(corpus.calibration)
                    compression = hf.recover(
                        *(compressed, text, target, plan.recovery),
                        dense=dense_dir,
                        force=True,
                        progress=progress,
                    )
                    model = cast(LlamaForCausalLM, hf.load(target))
                    points.append(measured(RECOVERED, ratio, model, compression))
        advance("on Trainium: run and trace kernels on the simulated core")
        told = told_ratio(points)
        trainium = on_trainium(
            compressed_models[told], told, prompt_tokens, dense_dir.parent, len(prompt_tokens)
        )
        advance("done")
    provenance = _provenance(plan, dense, calibration.numel(), held_out.numel(), corpus)
    return Results(
        dense_ppl=dense_ppl,
        dense_sample=dense_sample,
        prompt=PROMPT,
        block=BLOCK,
        points=tuple(points),
        prefill_tokens=len(prompt_tokens),
        decode_tokens=plan.decode_tokens,
        trainium=trainium,
        provenance=provenance,
    )


def summary_table(results: Results) -> Table:
    """The numbers that matter most, for the terminal."""
    table = Table(title=f"Dense perplexity {results.dense_ppl:.2f}")
    for column in ("ratio", "effective", "method", "perplexity", "prefill", "decode"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for point in results.points:
        table.add_row(
            f"{point.ratio:.0%}",
            f"{point.compression.effective_ratio:.1%}",
            point.method,
            f"{point.ppl:.2f}",
            f"{point.speed.speedup('prefill'):.2f}×",
            f"{point.speed.speedup('decode'):.2f}×",
        )
    return table


def _blocks(
    tokenizer: PreTrainedTokenizerFast, documents: tuple[str, ...], seqlen: int, count: int
) -> torch.Tensor:
    """The first `count` whole blocks of the documents' tokens, `[count, seqlen]`."""
    tokens = encode_documents(tokenizer, list(documents))
    count = min(count, len(tokens) // seqlen)
    return tokens[: count * seqlen].view(count, seqlen)


def _provenance(
    plan: Plan,
    dense: torch.nn.Module,
    calibration_tokens: int,
    held_out_tokens: int,
    corpus: Corpus,
) -> dict[str, str]:
    shape = plan.train
    parameters = sum(parameter.numel() for parameter in dense.parameters())
    packages = ("neuronmm-ops", "torch", "transformers", "tokenizers")
    return {
        "model": f"Llama, {parameters / 1e6:.2f} M parameters, {shape.num_hidden_layers} layers, "
        f"hidden {shape.hidden_size}, MLP {shape.intermediate_size}, "
        f"{shape.num_attention_heads} heads over {shape.num_key_value_heads} KV heads, "
        f"vocabulary {shape.vocab_size}, tied embeddings",
        "training": f"{shape.steps} steps of {shape.batch} × {shape.seq_len} tokens, "
        f"seed {shape.seed}, matmuls in {dtype_name(training_dtype())}",
        "text": f"Python {platform.python_version()} help topics and standard-library docstrings, "
        f"fingerprint {corpus.fingerprint}",
        "split": f"{len(corpus.train)} documents to train on, of which {len(corpus.calibration)} "
        f"calibrate; {len(corpus.held_out)} held out",
        "calibration": f"{calibration_tokens:,} tokens",
        "evaluation": f"{held_out_tokens:,} held-out tokens",
        "perplexity block": f"{shape.context} tokens",
        "recovery": _recovery(plan.recovery),
        "replaced": f"gate, up and down projections of every layer, rank block {BLOCK}",
        "dtype": "fp32",
        "CPU": _cpu_name(),
        "threads": str(torch.get_num_threads()),
        "timing": f"median of {plan.rounds} paired rounds",
        "versions": ", ".join(f"{name} {version(name)}" for name in packages)
        + f", Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _recovery(config: RecoverConfig) -> str:
    length = f"{60 * config.minutes:.0f} s" if config.steps is None else f"{config.steps} steps"
    return f"{config.method}, {length} a ratio, on the calibration text"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _plan(arguments: argparse.Namespace) -> Plan:
    config = QUICK if arguments.quick else TrainConfig()
    if arguments.steps is not None:
        config = TrainConfig(**{**vars(config), "steps": arguments.steps})
    if arguments.quick:
        ratios = tuple(arguments.ratios or (0.4,))
        numbers = {"decode_tokens": 8, "rounds": 2, "sample_tokens": 16}
        return Plan(config, 60, ratios, 40, 8, **numbers, recovery=RecoverConfig(steps=2))
    ratios = tuple(arguments.ratios or RATIOS)
    numbers = {"decode_tokens": 64, "rounds": 5, "sample_tokens": 80}
    return Plan(config, None, ratios, 64, 40, **numbers, recovery=RecoverConfig(minutes=0.25))


def _check_ratios(ratios: tuple[float, ...], shape: TrainConfig) -> None:
    K, N = shape.hidden_size, shape.intermediate_size
    largest = 1 - BLOCK * (K + N) / (K * N)
    if max(ratios) > largest:
        sys.exit(
            f"ratios must be at most {largest:.3f}, one block of ranks for every matrix; "
            f"got {max(ratios)}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python examples/demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="default: out/demo")
    parser.add_argument("--steps", type=_positive, help="training steps")
    parser.add_argument(
        "--ratios", type=_ratio, nargs="+", help="shares of the MLP parameters to remove, in (0, 1)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; the numbers mean nothing"
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
