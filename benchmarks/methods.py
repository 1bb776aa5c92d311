"""The compression methods next to each other: perplexity of one model at several ratios."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from neuronmm_ops.compress import SVDConfig, compress_
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.eval import block_length, encode_documents, token_perplexity
from neuronmm_ops.ops.backends.cpu import name_of

RATIOS = (0.05, 0.2, 0.4, 0.6, 0.8)
# SVD-LLM(W): what the others are measured against.
BASELINE = SVDConfig(method="whiten", allocation="uniform")
DEFAULT = SVDConfig()
# NeuronMM's own, then every method with one budget, and every importance with one method.
CANDIDATES = (
    BASELINE,
    DEFAULT,
    SVDConfig(method="plain", allocation="uniform"),
    *(SVDConfig(method=method) for method in ("plain", "whiten", "drift", "zero-sum")),
    *(SVDConfig(method="swift", importance=name) for name in ("gradient", "error", "perplexity")),
)


def candidates_at(
    ratios: Sequence[float] = RATIOS,
    block: int = 16,
    candidates: Sequence[SVDConfig] = CANDIDATES,
) -> list[SVDConfig]:
    """Each candidate at each nominal ratio; a small block gives a small model many ranks."""
    return [replace(c, ratio=ratio, block=block) for ratio, c in product(ratios, candidates)]


def run(
    directory: str | Path,
    texts: Mapping[str, str],
    calibration: str,
    configs: Sequence[SVDConfig],
    samples: int = 64,
    seqlen: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Compress a trained model's MLPs by each config and take perplexities.

    Args:
        directory: a Transformers checkpoint with its tokenizer, or a hub id.
        texts: name to the text to evaluate on.
        calibration: to calibrate on; other text than `texts`.
        configs: what to compare, such as `candidates_at` returns.
        samples: calibration blocks.
        seqlen: tokens of an evaluation block and of a calibration block; default the smaller of
            2048 and the model's limit.
        dtype: to compute in, as `hf.compress` takes it; the factors are in the checkpoint's.
        device: to compute on.
        progress: called with ("methods", compressions done, compressions in all).

    Returns:
        For each text the dense row (`method` "dense", ratios 0), then for each config and
        text: `method`, `allocation`, `importance`, `ratio`, `effective_ratio`, `text`,
        `ppl_token`, `excess_log_ppl`, ln of the perplexity less ln of the dense model's,
        `excess_quotient`, that divided by `BASELINE`'s, and `compute_dtype`. The quotient is None
        where the baseline is no candidate, or no worse than the dense model.

    Raises:
        ValueError: the calibration text is shorter than one block, or a block longer than the
            model takes.
        CheckpointError: the directory cannot be loaded.
    """
    from neuronmm_ops import hf
    from neuronmm_ops.hf.computing import cast_, check_device, computing_in, load_on

    place = check_device(device)
    tokenizer = hf.load_tokenizer(directory)
    model = hf.load_computing(directory, dtype, place)
    compute = model.dtype
    seqlen = block_length(model, seqlen)
    ids = {name: encode_documents(tokenizer, [text]) for name, text in texts.items()}
    batches = hf.calibration_batches(tokenizer, calibration, samples, seqlen)
    batches = [batch.to(place) for batch in batches]
    dense = {name: token_perplexity(model, ids[name], seqlen).ppl_token for name in ids}
    rows: list[dict[str, Any]] = []

    def add(config: SVDConfig | None, ratio: float, effective_ratio: float) -> None:
        for name in ids:
            ppl = token_perplexity(model, ids[name], seqlen).ppl_token if config else dense[name]
            rows.append(
                {
                    "method": config.method if config else "dense",
                    "allocation": config and config.allocation,
                    "importance": config and config.weighs_by,
                    "ratio": ratio,
                    "effective_ratio": effective_ratio,
                    "text": name,
                    "ppl_token": ppl,
                    "excess_log_ppl": math.log(ppl) - math.log(dense[name]),
                    "excess_quotient": None,
                    "compute_dtype": name_of(compute),
                }
            )

    add(None, 0.0, 0.0)
    for done, config in enumerate(configs, start=1):
        model = load_on(directory, place)
        with computing_in(model, compute):
            report = compress_(model, config, batches)
        cast_(model, compute)
        add(config, config.ratio, report.effective_ratio)
        if progress:
            progress("methods", done, len(configs))
    _add_quotients(rows)
    return rows


def _add_quotients(rows: Sequence[dict[str, Any]]) -> None:
    """Set each row's `excess_quotient` from the baseline's row of the same ratio and text."""
    baseline = {
        (row["ratio"], row["text"]): row["excess_log_ppl"]
        for row in rows
        if (row["method"], row["allocation"]) == (BASELINE.method, BASELINE.allocation)
    }
    for row in rows:
        excess = baseline.get((row["ratio"], row["text"]), 0.0)
        if excess > 0:
            row["excess_quotient"] = row["excess_log_ppl"] / excess
