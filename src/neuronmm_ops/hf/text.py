"""Calibration text: from a file to batches of token ids."""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from neuronmm_ops.eval import encode_documents
from neuronmm_ops.files import read_bounded

# Tokens in one forward pass: matmuls run at full speed, activations fit a laptop's memory.
BATCH_TOKENS = 4096
TEXT_BYTES = 4 << 30
LONGEST_WORD = 1_000_000

Order = Literal["spread", "head"]
ORDERS: tuple[Order, ...] = get_args(Order)


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        ValueError: the file is missing, empty, binary, not UTF-8, or one word.
    """
    try:
        data = read_bounded(path, TEXT_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read text {path}: {error.strerror}") from None
    if b"\0" in data:
        raise ValueError(f"text {path} must be UTF-8 text, got binary data (a NUL byte)")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text {path} must be UTF-8, got byte {data[error.start]:#x} at {error.start}; "
            "convert it first"
        ) from None
    if not text.strip():
        raise ValueError(f"text {path} is empty; give a file with text")
    if (longest := max(map(len, text.split()))) > LONGEST_WORD:
        raise ValueError(
            f"text {path} must hold at most {LONGEST_WORD:,} characters without a space or line "
            f"break, got {longest:,}; tokenizers need gigabytes for it, cut it into lines"
        )
    return text


def calibration_batches(
    tokenizer: Any, text: str, samples: int, seqlen: int, order: Order = "spread"
) -> list[Tensor]:
    """Cut a text into batches of blocks `[B, seqlen]`.

    Deterministic: there is no seed. Fewer blocks than `samples` are taken when the text is short.

    Args:
        tokenizer: a Transformers tokenizer.
        text: the calibration text.
        samples: how many blocks.
        seqlen: tokens in a block.
        order: `spread` takes blocks evenly over the whole text, `head` the first ones.

    Raises:
        ValueError: the text is shorter than one block, a number is smaller than 1, or the order
            is unknown.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    if samples < 1 or seqlen < 1:
        raise ValueError(f"samples and seqlen must be at least 1, got {samples} and {seqlen}")
    ids = encode_documents(tokenizer, [text])
    available = ids.numel() // seqlen
    if available == 0:
        raise ValueError(
            f"calibration text must hold at least one block of {seqlen} tokens, "
            f"got {ids.numel()}; use a longer text or a smaller --seqlen"
        )
    count = min(samples, available)
    blocks = ids[: available * seqlen].view(available, seqlen)
    indices = torch.arange(count)
    sample = blocks[indices if order == "head" else indices * available // count]
    return list(sample.split(max(1, BATCH_TOKENS // seqlen)))
