"""The compression methods beside each other: perplexity of one model at several ratios."""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from neuronmm_ops.compress import SVDConfig, compress_
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.eval import block_length, encode_documents, token_perplexity
from neuronmm_ops.ops.backends.cpu import name_of

RATIOS = (0.05, 0.2, 0.4, 0.6, 0.8)


def run(
    directory: str | Path,
    text: str,
    calibration: str,
    ratios: Sequence[float] = RATIOS,
    block: int = 16,
    samples: int = 64,
    seqlen: int | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Compress a trained model's MLPs by each method at each ratio and measure token perplexity.

    Args:
        directory: a Transformers checkpoint with its tokenizer, or a hub id.
        text: to evaluate on.
        calibration: to calibrate on; other text than `text`.
        ratios: nominal compression ratios.
        block: ranks are multiples of it; small, so that a small model has many ranks.
        samples: calibration blocks.
        seqlen: tokens of an evaluation block and of a calibration block; default the smaller of
            2048 and the model's limit.
        dtype: to compute in, as `hf.compress` takes it; the factors are in the checkpoint's.
        device: to compute on.
        progress: called with ("methods", compressions done, compressions in all).

    Returns:
        The dense row (`method` "dense", ratios 0), then one for each ratio and method: `method`,
        `ratio`, `effective_ratio`, `ppl_token`, `excess_log_ppl`, ln of the perplexity less ln
        of the dense model's, and `compute_dtype`.

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
    ids = encode_documents(tokenizer, [text])
    batches = hf.calibration_batches(tokenizer, calibration, samples, seqlen)
    batches = [batch.to(place) for batch in batches]
    dense = token_perplexity(model, ids, seqlen).ppl_token
    rows: list[dict[str, Any]] = []

    def add(method: str, ratio: float, effective_ratio: float, ppl: float) -> None:
        rows.append(
            {
                "method": method,
                "ratio": ratio,
                "effective_ratio": effective_ratio,
                "ppl_token": ppl,
                "excess_log_ppl": math.log(ppl) - math.log(dense),
                "compute_dtype": name_of(compute),
            }
        )

    add("dense", 0.0, 0.0, dense)
    for ratio, method in product(ratios, METHODS):
        model = load_on(directory, place)
        config = SVDConfig(ratio=ratio, block=block, method=method)
        with computing_in(model, compute):
            report = compress_(model, config, batches)
        cast_(model, compute)
        ppl = token_perplexity(model, ids, seqlen).ppl_token
        add(method, ratio, report.effective_ratio, ppl)
        if progress:
            progress("methods", len(rows) - 1, len(ratios) * len(METHODS))
    return rows
