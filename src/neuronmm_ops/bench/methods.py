"""The compression methods beside each other: perplexity of one model at several ratios."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.compress import SVDConfig, compress_
from neuronmm_ops.compress.config import METHODS, Method
from neuronmm_ops.eval import encode_documents, token_perplexity
from neuronmm_ops.eval.perplexity import default_seqlen

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def run(
    model_dir: str | Path,
    text: Sequence[str],
    calibration: Sequence[str],
    ratios: Sequence[float] = RATIOS,
    methods: Sequence[Method] = METHODS,
    block: int = 16,
    targets: str = "mlp",
    seqlen: int | None = None,
    samples: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Compress a trained model by each method at each ratio and measure token perplexity.

    Args:
        model_dir: a Transformers checkpoint with its tokenizer.
        text: documents to evaluate on.
        calibration: documents to calibrate on; others than `text`.
        ratios: nominal compression ratios.
        methods: of `plain`, `whiten`, `swift`.
        block: ranks are multiples of it; small, so that a small model has many ranks.
        targets: which Linears, as in `SVDConfig`.
        seqlen: tokens of an evaluation block and of a calibration sample; default the smaller of
            2048 and the model's limit.
        samples: calibration samples; default all that the calibration text gives.
        dtype: to load the model in; default the checkpoint's.
        progress: called with ("methods", compressions done, compressions in all).

    Returns:
        The dense row (`method` "dense", ratios 0), then one for each method and ratio: `method`,
        `ratio`, `effective_ratio`, `ppl_token` and `excess_log_ppl`, ln of the perplexity less ln
        of the dense model's.

    Raises:
        ValueError: the calibration text is shorter than one sample.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = _load(model_dir, dtype)
    seqlen = default_seqlen(model) if seqlen is None else seqlen
    ids = encode_documents(tokenizer, text)
    batches = _batches(encode_documents(tokenizer, calibration), seqlen, samples)
    dense = token_perplexity(model, ids, seqlen).ppl_token
    rows = [_row("dense", 0.0, 0.0, dense, dense)]
    total = len(ratios) * len(methods)
    for ratio in ratios:
        for method in methods:
            model = _load(model_dir, dtype)
            config = SVDConfig(ratio=ratio, block=block, targets=targets, method=method)
            report = compress_(model, config, batches)
            ppl = token_perplexity(model, ids, seqlen).ppl_token
            rows.append(_row(method, ratio, report.effective_ratio, ppl, dense))
            if progress:
                progress("methods", len(rows) - 1, total)
    return rows


def _load(model_dir: str | Path, dtype: torch.dtype | None) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype or "auto")


def _batches(ids: Tensor, seqlen: int, samples: int | None) -> list[Tensor]:
    """Cut token ids [T] into samples [1, seqlen]; a rest is left out."""
    full = [block[None] for block in ids.split(seqlen) if block.numel() == seqlen]
    if not full:
        raise ValueError(
            f"calibration text must have at least {seqlen} tokens, got {ids.numel()}; give more "
            "text, or a smaller seqlen"
        )
    return full if samples is None else full[:samples]


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
