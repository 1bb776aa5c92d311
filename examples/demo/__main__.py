"""Train a small Llama on Python's documentation, compress it, and report what that cost and won.

Run it as `python examples/demo`; the page it writes is `out/demo/report.html`. Nothing is
downloaded: the text is what every Python installation holds. No budget is in seconds, so that a
busy machine is slower and no worse; the page is there after the first point, and a run that is
stopped goes on at the next one.
"""

import argparse
import functools
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

sys.path.append(str(Path(__file__).parents[2]))  # where the package `benchmarks` is
import torch
from corpus import Corpus, load_corpus
from measure import sample_text
from points import KeptPoints
from report import write_report
from results import BASELINE, OURS, RECOVERED, Point, Results, Rival, told_ratio
from rich.console import Console
from rich.table import Table
from train import QUICK, RECORD, TrainConfig, dtype_name, trained, training_dtype
from trainium import on_trainium
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from neuronmm_ops import CompressionReport, SVDConfig, compress_, hf
from neuronmm_ops.eval import DOCUMENT_SEPARATOR, encode_documents, token_perplexity
from neuronmm_ops.measure.speed import PairedSpeed, paired_speed
from neuronmm_ops.measure.timing import cpu_name
from neuronmm_ops.progress import progress_bars
from neuronmm_ops.recover import RecoverConfig
from neuronmm_ops.storages import STORAGES

METHODS = {
    "plain": SVDConfig(method="plain", allocation="uniform"),
    BASELINE: SVDConfig(method="whiten", allocation="uniform"),
    OURS: SVDConfig(),
}
RATIOS = (0.05, 0.2, 0.4, 0.6, 0.8)
# The default block of 128 is for real models: here it would leave three ranks to choose from.
BLOCK = 16
RECOVERED_RATIOS = (0.4, 0.8)
CHARS_PER_TOKEN = 4
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
    recovery_steps: int

    @property
    def points(self) -> tuple[tuple[str, float], ...]:
        """Method and ratio of each point; at some ratios the default's factors are also trained."""
        return tuple(
            (method, ratio)
            for ratio in self.ratios
            for method in (*METHODS, *([RECOVERED] if ratio in RECOVERED_RATIOS else []))
        )


def main(words: Sequence[str] | None = None) -> None:
    arguments = _arguments(words)
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

    kept = KeptPoints(arguments.out / "points", _inputs(plan, corpus, dense_dir))
    already = sum(kept.read(*each) is not None for each in plan.points)
    console.print(
        f"Compressing at each ratio by each method, and measuring: {len(plan.points)} points"
        + (f", {already} kept from before in {kept.directory}" if already else "")
        + " …"
    )
    report = arguments.out / "report.html"
    results = run(plan, corpus, dense_dir, kept, report)
    console.print(summary_table(results))
    console.print(f"Report: {report}   ({time.perf_counter() - start:.0f} s in all)")


def run(plan: Plan, corpus: Corpus, dense_dir: Path, kept: KeptPoints, page: Path) -> Results:
    """Measure the dense model, then every ratio by every method; write the page after each point.

    Args:
        plan: how much to do.
        corpus: the texts.
        dense_dir: the dense model; compressed ones are written next to it.
        kept: points of earlier runs, and then also of this one.
        page: where the report goes.
    """
    seqlen = plan.train.context
    tokenizer = AutoTokenizer.from_pretrained(dense_dir)
    calibration = _blocks(tokenizer, corpus.calibration, seqlen, plan.calibration_blocks)
    held_out = _blocks(tokenizer, corpus.held_out, seqlen, plan.held_out_blocks).flatten()
    prompt_tokens = held_out[:seqlen]

    def load() -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(dense_dir, dtype=torch.float32).eval()

    dense = load()
    speeds: dict[tuple[int | None, ...], PairedSpeed] = {}

    def compressed(config: SVDConfig) -> tuple[LlamaForCausalLM, CompressionReport]:
        model = load()
        batches = list(calibration.split(8)) if config.needs_calibration else None
        return model, compress_(model, config, calibration=batches)

    def low_rank(method: str, ratio: float) -> tuple[LlamaForCausalLM, CompressionReport]:
        return compressed(replace(METHODS[method], ratio=ratio, block=BLOCK))

    def rival(storage: str) -> Rival:
        model, compression = compressed(SVDConfig(ratio=0.0, storage=storage))
        layers = compression.layers
        share = sum(each.bytes for each in layers) / sum(2 * each.K * each.N for each in layers)
        return Rival(storage, share, token_perplexity(model, held_out, seqlen=seqlen).ppl_token)

    # The one that is also trained, and whose kernels run on the simulated core.
    ours = functools.cache(lambda ratio: low_rank(OURS, ratio))

    def recovered(ratio: float) -> tuple[LlamaForCausalLM, CompressionReport]:
        model, compression = ours(ratio)
        source, target = (dense_dir.with_name(f"{name}-{ratio:g}") for name in (OURS, RECOVERED))
        hf.save(model, source, compression, tokenizer, force=True)
        # A killed run's: this one may have other inputs, and its steps take a minute at most.
        shutil.rmtree(target.with_name(f"{target.name}.recovery"), ignore_errors=True)
        # As much as the steps read: a tenth of it is evaluated as often as there are steps.
        length = CHARS_PER_TOKEN * plan.recovery_steps * RecoverConfig.batch_tokens
        text = DOCUMENT_SEPARATOR.join(corpus.calibration)[:length]
        compression = hf.recover(
            *(source, text, target, RecoverConfig(steps=plan.recovery_steps)),
            dense=dense_dir,
            force=True,
            progress=progress,
        )
        return cast(LlamaForCausalLM, hf.load(target)), compression

    def measured(method: str, ratio: float, tell: Callable[[str], None]) -> Point:
        tell("train" if method == RECOVERED else "compress")
        if method == RECOVERED:
            model, compression = recovered(ratio)
        else:
            model, compression = ours(ratio) if method == OURS else low_rank(method, ratio)
        tell("perplexity")
        ppl = token_perplexity(model, held_out, seqlen=seqlen).ppl_token
        tell("speed")
        ranks = _ranks(compression)
        if ranks not in speeds:
            speeds[ranks] = paired_speed(
                *(dense, model, prompt_tokens),
                decode_tokens=plan.decode_tokens,
                rounds=plan.rounds,
            )
        tell("sample")
        sample = sample_text(model, tokenizer, PROMPT, new_tokens=plan.sample_tokens)
        return Point(method, ratio, compression, ppl, speeds[ranks], sample)

    with progress_bars() as progress:
        results = Results(
            dense_ppl=token_perplexity(dense, held_out, seqlen=seqlen).ppl_token,
            dense_sample=sample_text(dense, tokenizer, PROMPT, new_tokens=plan.sample_tokens),
            rivals=tuple(rival(storage) for storage in STORAGES),
            prompt=PROMPT,
            block=BLOCK,
            points=(),
            planned=len(plan.points),
            prefill_tokens=len(prompt_tokens),
            decode_tokens=plan.decode_tokens,
            trainium=None,
            provenance=_provenance(plan, dense, calibration.numel(), held_out.numel(), corpus),
        )
        for done, (method, ratio) in enumerate(plan.points):
            name = f"{method} at {ratio:.0%}"
            point = kept.read(method, ratio)
            is_new = point is None
            if point is None:
                point = measured(
                    *(method, ratio),
                    lambda what: progress("measure", done, len(plan.points), f"{name}: {what}"),  # noqa: B023
                )
                kept.write(point)
            # Models of equal ranks are equally fast: one measurement serves them all.
            speeds.setdefault(_ranks(point.compression), point.speed)
            results = replace(results, points=(*results.points, point))
            if is_new:
                write_report(results, page)
            progress("measure", done + 1, len(plan.points), name)
        told = told_ratio(results.points)
        progress("simulate", 0, 1, "kernels on the simulated NeuronCore")
        trainium = on_trainium(
            *(ours(told)[0], told, prompt_tokens, dense_dir.parent, len(prompt_tokens))
        )
        progress("simulate", 1, 1)
    results = replace(results, trainium=trainium)
    write_report(results, page)
    return results


def _ranks(compression: CompressionReport) -> tuple[int | None, ...]:
    return tuple(layer.r for layer in compression.layers)


def summary_table(results: Results) -> Table:
    """The numbers that matter most, for the terminal."""
    table = Table(title=f"Dense perplexity {results.dense_ppl:.2f}")
    for column in ("ratio", "bytes", "method", "perplexity", "prefill", "decode"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for rival in results.rivals:
        table.add_row("", f"{rival.bytes:.1%}", f"dense, {rival.storage}", f"{rival.ppl:.2f}")
    for point in results.points:
        table.add_row(
            f"{point.ratio:.0%}",
            f"{1 - point.compression.effective_ratio:.1%}",
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


def _inputs(plan: Plan, corpus: Corpus, dense_dir: Path) -> dict[str, Any]:
    """What decides a point's numbers, besides its method and ratio."""
    return {
        "dense": json.loads((dense_dir / RECORD).read_text(encoding="utf-8"))["key"],
        "text": corpus.fingerprint,
        "plan": {**asdict(plan), "ratios": None},
        "provenance": _machine(),
    }


def _machine() -> dict[str, str]:
    packages = ("neuronmm-ops", "torch", "transformers", "tokenizers")
    return {
        "CPU": cpu_name(),
        "threads": str(torch.get_num_threads()),
        "versions": ", ".join(f"{name} {version(name)}" for name in packages)
        + f", Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
    }


def _provenance(
    plan: Plan,
    dense: torch.nn.Module,
    calibration_tokens: int,
    held_out_tokens: int,
    corpus: Corpus,
) -> dict[str, str]:
    shape = plan.train
    parameters = sum(parameter.numel() for parameter in dense.parameters())
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
        "recovery": f"{RecoverConfig.method}, {plan.recovery_steps} steps a ratio, "
        "on the calibration text",
        "replaced": f"gate, up and down projections of every layer, rank block {BLOCK}",
        "dtype": "fp32",
        "timing": f"median of {plan.rounds} paired rounds",
        **_machine(),
    }


def _plan(arguments: argparse.Namespace) -> Plan:
    config = QUICK if arguments.quick else TrainConfig()
    if arguments.steps is not None:
        config = TrainConfig(**{**vars(config), "steps": arguments.steps})
    if arguments.quick:
        ratios = tuple(arguments.ratios or (0.4,))
        numbers = {"decode_tokens": 8, "rounds": 2, "sample_tokens": 16}
        return Plan(config, 60, ratios, 40, 8, **numbers, recovery_steps=2)
    ratios = tuple(arguments.ratios or RATIOS)
    numbers = {"decode_tokens": 64, "rounds": 5, "sample_tokens": 80}
    return Plan(config, None, ratios, 64, 40, **numbers, recovery_steps=24)


def _check_ratios(ratios: tuple[float, ...], shape: TrainConfig) -> None:
    K, N = shape.hidden_size, shape.intermediate_size
    largest = 1 - BLOCK * (K + N) / (K * N)
    if max(ratios) > largest:
        sys.exit(
            f"ratios must be at most {largest:.3f}, one block of ranks for every matrix; "
            f"got {max(ratios)}"
        )


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python examples/demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="default: out/demo")
    parser.add_argument("--steps", type=_positive, help="training steps")
    parser.add_argument(
        "--ratios", type=_ratio, nargs="+", help="shares of the MLP parameters to remove, in (0, 1)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; the numbers mean nothing"
    )
    return parser.parse_args(words)


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
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on after the last point that was measured")
