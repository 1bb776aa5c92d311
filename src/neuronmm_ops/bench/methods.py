"""The compression methods beside each other: perplexity of one model at several ratios."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuronmm_ops.compress import SVDConfig, compress_
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.config import METHODS
from neuronmm_ops.eval import encode_documents, token_perplexity
from neuronmm_ops.eval.perplexity import default_seqlen

RATIOS = (0.05, 0.2, 0.4, 0.6, 0.8)


def run(
    directory: str | Path,
    text: str,
    calibration: str,
    ratios: Sequence[float] = RATIOS,
    block: int = 16,
    samples: int = 64,
    seqlen: int | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Compress a trained model's MLPs by each method at each ratio and measure token perplexity.

    Args:
        directory: a Transformers checkpoint with its tokenizer.
        text: to evaluate on.
        calibration: to calibrate on; other text than `text`.
        ratios: nominal compression ratios.
        block: ranks are multiples of it; small, so that a small model has many ranks.
        samples: calibration blocks.
        seqlen: tokens of an evaluation block and of a calibration block; default the smaller of
            2048 and the model's limit.
        progress: called with ("methods", compressions done, compressions in all).

    Returns:
        The dense row (`method` "dense", ratios 0), then one for each ratio and method: `method`,
        `ratio`, `effective_ratio`, `ppl_token` and `excess_log_ppl`, ln of the perplexity less ln
        of the dense model's.

    Raises:
        ValueError: the calibration text is shorter than one block.
        CheckpointError: the directory cannot be loaded.
    """
    from neuronmm_ops import hf

    tokenizer = hf.load_tokenizer(directory)
    model = hf.load(directory)
    seqlen = default_seqlen(model) if seqlen is None else seqlen
    ids = encode_documents(tokenizer, [text])
    batches = hf.calibration_batches(tokenizer, calibration, samples, seqlen)
    dense = token_perplexity(model, ids, seqlen).ppl_token
    rows = [_row("dense", 0.0, 0.0, dense, dense)]
    total = len(ratios) * len(METHODS)
    for ratio in ratios:
        for method in METHODS:
            model = hf.load(directory)
            report = compress_(model, SVDConfig(ratio=ratio, block=block, method=method), batches)
            ppl = token_perplexity(model, ids, seqlen).ppl_token
            rows.append(_row(method, ratio, report.effective_ratio, ppl, dense))
            if progress:
                progress("methods", len(rows) - 1, total)
    return rows


def _row(
    method: str, ratio: float, effective_ratio: float, ppl: float, dense: float
) -> dict[str, Any]:
    return {
        "method": method,
        "ratio": ratio,
        "effective_ratio": effective_ratio,
        "ppl_token": ppl,
        "excess_log_ppl": math.log(ppl) - math.log(dense),
    }
