"""Calibration text: what is read, what is refused, which blocks are taken."""

import pytest
import torch
from tiny import tiny_tokenizer

from neuronmm_ops.hf import calibration_batches


@pytest.mark.parametrize(("order", "taken"), [((), "aeimq"), (("head",), "abcde")])
def test_blocks_are_spread_over_the_text_or_the_first(order, taken):
    text = "".join(chr(97 + i) * 10 for i in range(20))
    first = torch.cat(calibration_batches(tiny_tokenizer(), text, 5, 10, *order))
    assert tiny_tokenizer().batch_decode(first) == [c * 10 for c in taken]


@pytest.mark.parametrize(
    ("length", "seqlen", "shapes"),
    [(35, 10, [[3, 10]]), (10_000, 1000, [[4, 1000], [4, 1000], [2, 1000]])],
)
def test_batches_hold_what_there_is_and_at_most_4096_tokens(length, seqlen, shapes):
    batches = calibration_batches(tiny_tokenizer(), "x" * length, 100, seqlen)
    assert [list(batch.shape) for batch in batches] == shapes
