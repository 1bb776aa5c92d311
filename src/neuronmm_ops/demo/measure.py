"""Compress a model, and measure it next to the dense one and next to what else is as small."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.compress import SVDConfig, prune_
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.estimate.ends import ENDS, compared
from neuronmm_ops.estimate.launches import Tracer, of_op
from neuronmm_ops.estimate.linears import DTYPE
from neuronmm_ops.eval import encode_documents, token_perplexity
from neuronmm_ops.measure import cpu
from neuronmm_ops.ops.backends.cpu import compute_dtype

# The default block of 128 is for real models: here it would leave one rank to choose.
BLOCK = 16
SEQLEN = 256
# More than ten tokens an input feature, below which compress_ warns.
SAMPLES = 64
# Matrices of the model are too small to be timed; these are of a real one, at the paper's ratio.
TIMED_SHAPE, TIMED_RATIO, TARGET = "Llama-3.2-1B", 0.2, "trn2"


WAYS = {
    "low rank": SVDConfig(),
    "low rank int8": SVDConfig(storage="int8"),
    "plain SVD": SVDConfig(method="plain", allocation="uniform"),
}


def run(
    model: str | Path,
    calibration: Path,
    held_out: Path,
    output: Path,
    ratios: Sequence[float],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compress the MLPs of a model by each of `WAYS`, narrow them, and measure what that costs.

    Everything runs on one thread and in float32, the timed matrix apart: the numbers are then the
    same on every machine, and a busy one is little slower.

    Args:
        model: a Transformers directory of bfloat16 weights.
        calibration: a text file to calibrate on.
        held_out: a text file to take the perplexity on.
        output: an existing directory, which gets a checkpoint for each way and ratio.
        ratios: shares of the MLPs' parameters to remove.
        progress: called with ("demo", models done, models in all).

    Returns:
        `rows`: the dense model, the same with MLPs rounded to int8 with a scale an output, then at
        each ratio each way and both again with narrower MLPs, with `model`, `ratio`,
        `effective_ratio`, `bytes` of the MLPs,
        `ppl_token` and `excess_log_ppl` (ln of the perplexity less ln of the dense model's);
        `tokens` of the text; `timed`: a row of `measure.cpu.run`, measured here; `modelled`:
        `dense_ms` and `op_ms` of that matrix on one core of `target`, never run there, and
        `speedup` with all that is not known, as `ends.compared`.
    """
    from neuronmm_ops import hf

    tokenizer = hf.load_tokenizer(model)
    tokens = encode_documents(tokenizer, [hf.read_text(held_out)])
    batches = hf.calibration_batches(tokenizer, hf.read_text(calibration), SAMPLES, SEQLEN)
    rows: list[dict[str, Any]] = []
    total = 2 + len(ratios) * (len(WAYS) + 2)

    def add(name: str, variant: Any, size: int, ratio: float = 0.0, effective: float = 0.0) -> None:
        ppl = token_perplexity(variant, tokens, SEQLEN).ppl_token
        rows.append(
            {
                "model": name,
                "ratio": ratio,
                "effective_ratio": effective,
                "bytes": size,
                "ppl_token": ppl,
                "excess_log_ppl": log(ppl / rows[0]["ppl_token"]) if rows else 0.0,
            }
        )
        if progress:
            progress("demo", len(rows), total)

    def add_dense(name: str, ratio: float = 0.0) -> None:
        """The dense model, narrower where a ratio is given, and the same in int8."""
        dense = hf.load_computing(model, "float32")
        effective = 0.0
        if ratio:
            pruned = prune_(dense, ratio, batches, BLOCK)
            effective = 1 - pruned.kept / pruned.inner
        mlps = list(select_targets(dense, SVDConfig()).linears.values())
        numbers = sum(mlp.weight.numel() for mlp in mlps)
        add(name, dense, 2 * numbers, ratio, effective)
        scales = sum(_round_to_int8_(mlp.weight) for mlp in mlps)
        add(f"{name} int8", dense, numbers + 4 * scales, ratio, effective)

    with _one_thread():
        add_dense("dense")
        for ratio in ratios:
            for name, config in WAYS.items():
                target = output / f"{name.replace(' ', '-')}-{ratio:g}"
                config = replace(config, ratio=ratio, block=BLOCK)
                options: dict[str, Any] = {"samples": SAMPLES, "seqlen": SEQLEN}
                report = hf.compress(model, config, calibration, target, **options, dtype="float32")
                size = sum(layer.bytes for layer in report.layers)
                variant = hf.load_computing(target, "float32")
                add(name, variant, size, ratio, report.effective_ratio)
            add_dense("narrower", ratio)
        dtype = compute_dtype(torch.bfloat16)
        (timed,) = cpu.run(cpu.CpuOptions(TIMED_SHAPE, ("xuv",), (TIMED_RATIO,), (1,), dtype, 20))
    return {"rows": rows, "tokens": len(tokens), "timed": timed, "modelled": _modelled(timed)}


@torch.no_grad()
def _round_to_int8_(weight: Tensor) -> int:
    """Round a weight `[N, K]` to nearest with a scale an output; return the number of scales."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    weight.copy_((weight / scale).round() * scale)
    return len(scale)


def _modelled(timed: dict[str, Any]) -> dict[str, Any]:
    """Return the times of the timed matrix on one NeuronCore."""
    M, K, r, N = (timed[name] for name in "MKrN")
    dense, low_rank = (
        Tracer(TARGET).launches(of_op(op, M, matrices, DTYPE, TARGET, 1)).times_ms
        for op, matrices in (("xw", ((K, N),)), ("xuv", ((K, r), (r, N))))
    )
    both = dict(zip(ENDS, low_rank, strict=True)), dict(zip(ENDS, dense, strict=True))
    return {
        "target": TARGET,
        "dense_ms": dense[0],
        "op_ms": low_rank[0],
        "speedup": compared(*both),
    }


@contextmanager
def _one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
