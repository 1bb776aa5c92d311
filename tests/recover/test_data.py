"""Held-out blocks and the order of the windows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuronmm_ops.recover.data import MAX_HELD_OUT_TOKENS, Windows, hold_out


@given(tokens=st.integers(8, 5000), seqlen=st.integers(2, 64))
def test_every_token_is_either_held_out_or_trained_on(tokens, seqlen):
    ids = torch.arange(tokens)
    if tokens < 4 * seqlen:
        with pytest.raises(ValueError, match=f"at least 4 blocks of {seqlen} tokens, got {tokens}"):
            hold_out(ids, seqlen)
        return
    rest, held_out = hold_out(ids, seqlen)
    assert torch.equal(torch.cat([rest, held_out.flatten()]).sort().values, ids)
    assert held_out.shape[1] == seqlen
    assert (held_out.diff() == 1).all()
    blocks = tokens // seqlen
    assert len(held_out) == max(1, round(0.1 * blocks)) or blocks * seqlen > MAX_HELD_OUT_TOKENS


def test_held_out_blocks_are_spread_and_few():
    _, held_out = hold_out(torch.arange(10**6), 256)
    assert held_out.numel() == MAX_HELD_OUT_TOKENS
    gaps = held_out[:, 0].diff()
    assert gaps.max() - gaps.min() <= 256


def test_an_epoch_has_every_window_once_and_the_next_cuts_elsewhere():
    windows = Windows(torch.arange(1000), seqlen=10, batch=8, seed=0)
    steps = -(-windows.count // 8)
    epochs = [[windows.of_step(s + e * steps) for s in range(steps)] for e in range(3)]
    firsts = [torch.cat(epoch)[: windows.count, 0] for epoch in epochs]
    for first in firsts:
        assert len(first.unique()) == windows.count == 99
        assert len((first % 10).unique()) == 1
    assert len({tuple(first.tolist()) for first in firsts}) == 3


def test_a_step_is_a_function_of_the_seed_alone():
    ids = torch.arange(1000)
    late = Windows(ids, 10, 4, seed=3).of_step(77)
    again = Windows(ids, 10, 4, seed=3)
    for step in range(77):
        again.of_step(step)
    assert torch.equal(again.of_step(77), late)
    assert not torch.equal(Windows(ids, 10, 4, seed=4).of_step(77), late)


def test_a_text_of_few_windows():
    windows = Windows(torch.arange(25), seqlen=10, batch=8, seed=0)
    assert {windows.of_step(step).shape for step in range(5)} == {(1, 10)}
