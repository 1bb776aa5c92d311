"""Calibration: blocks of a text as a model takes them, and what a record says of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from neuronmm_ops.compress.batches import check_ids
from neuronmm_ops.eval import block_length
from neuronmm_ops.hf.provenance import CalibrationSource
from neuronmm_ops.hf.text import Order, calibration_batches


def calibration_of(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    path: Path | None,
    samples: int,
    seqlen: int | None,
    device: torch.device,
    order: Order = "spread",
) -> tuple[list[Tensor], CalibrationSource]:
    """Return batches of token ids `[B, seqlen]` on the device, and the record of them.

    Args:
        model: that is to take them; its values may be elsewhere.
        tokenizer: of the model.
        text: whole.
        path: of the file that it was read from, if it was.
        samples: blocks, as of `calibration_batches`.
        seqlen: tokens in a block; None for the smaller of 2048 and the model's limit.
        device: to put them on.
        order: of the blocks.

    Raises:
        ValueError: a number is out of range, the text is too short, or the model does not know a
            token.
    """
    seqlen = block_length(model, seqlen)
    batches = calibration_batches(tokenizer, text, samples, seqlen, order)
    check_ids(model, torch.cat(batches), "calibration text")
    source = CalibrationSource.of(path, text, samples, seqlen, order)
    return [batch.to(device) for batch in batches], source
