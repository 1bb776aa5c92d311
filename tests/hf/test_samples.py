"""Rows that the dense model writes for a recovery."""

import math

import pytest
import torch
from causal_lms import family_model

from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.hf.samples import samples


def successor() -> torch.nn.Module:
    """A model whose next token is the last one plus 1, as good as surely."""
    model = family_model("llama").eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        rows = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1)
        model.model.embed_tokens.weight.copy_(rows)
        model.lm_head.weight.copy_(200 * rows.roll(1, 0))
    return model


def test_rows_are_what_the_model_writes_after_a_few_tokens_of_the_text():
    model, state = successor(), torch.random.get_rng_state()
    model.generation_config.eos_token_id = 30
    rows = samples(model, torch.arange(20, 40), 12, 400, math.inf, seed=0).view(-1, 12)
    assert len(rows) == 34
    assert (rows.diff() == 1).all()  # past the end of a text, too
    assert len(rows[:, 0].unique()) > 10
    again = samples(model, torch.arange(20, 40), 12, 400, 1e9, seed=0)
    assert torch.equal(again, rows.flatten())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_takes_too_long_or_is_not_finite_is_left_out_or_refused():
    model, ids = successor(), torch.arange(20, 40)
    assert samples(model, ids, 12, 400, -1.0, seed=0).numel() == 0
    assert samples(model, ids, 12, 400, 1e-9, seed=0).numel() == 0
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(NonFiniteError, match="dense model's logits must be finite"):
        samples(model, ids, 12, 400, 1.0, seed=0)
