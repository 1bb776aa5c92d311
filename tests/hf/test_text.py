"""Calibration text: what is read, what is refused, which blocks are taken."""

import pytest
import torch
from tiny import tiny_tokenizer

from neuronmm_ops.hf import calibration_batches, read_text


@pytest.mark.parametrize(("order", "taken"), [((), "aeimq"), (("head",), "abcde")])
def test_blocks_are_spread_over_the_text_or_the_first(order, taken):
    text = "".join(chr(97 + i) * 10 for i in range(20))
    first = torch.cat(calibration_batches(tiny_tokenizer(), text, 5, 10, *order))
    assert tiny_tokenizer().batch_decode(first) == [c * 10 for c in taken]


def test_an_unknown_order():
    with pytest.raises(ValueError, match="order must be one of spread, head; got 'tail'"):
        calibration_batches(tiny_tokenizer(), "abc" * 40, 5, 10, "tail")


@pytest.mark.parametrize(
    ("length", "seqlen", "shapes"),
    [(35, 10, [[3, 10]]), (10_000, 1000, [[4, 1000], [4, 1000], [2, 1000]])],
)
def test_batches_hold_what_there_is_and_at_most_4096_tokens(length, seqlen, shapes):
    batches = calibration_batches(tiny_tokenizer(), "x" * length, 100, seqlen)
    assert [list(batch.shape) for batch in batches] == shapes


def test_shorter_than_one_block():
    with pytest.raises(ValueError, match="at least one block of 64 tokens, got 3"):
        calibration_batches(tiny_tokenizer(), "abc", 1, 64)


@pytest.mark.parametrize(("samples", "seqlen"), [(0, 8), (1, 0), (-1, 8)])
def test_sizes_must_be_positive(samples, seqlen):
    with pytest.raises(ValueError, match="at least 1"):
        calibration_batches(tiny_tokenizer(), "abc", samples, seqlen)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"PK\0\x01", "binary"),
        (b"caf\xe9 au lait", "UTF-8, got byte 0xe9 at 3"),
    ],
)
def test_bad_files(tmp_path, data, word):
    path = tmp_path / "text"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=word):
        read_text(path)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read text .*nothing"):
        read_text(tmp_path / "nothing")
