"""The losses against their definitions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.recover.losses import Distillation, NextToken


class Toy(nn.Module):
    """Two layers of hidden states and logits, from ids."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.head = nn.Parameter(torch.randn(5, 7, generator=generator))

    def forward(
        self, input_ids: Tensor, use_cache: bool, output_hidden_states: bool = False
    ) -> Any:
        assert not use_cache
        first = self.embedding[input_ids]
        hidden = (first, first.sin(), first.cos())
        logits = hidden[-1] @ self.head
        logits = torch.cat([logits, torch.full_like(logits[..., :1], -torch.inf)], -1)
        return SimpleNamespace(
            logits=logits, hidden_states=hidden if output_hidden_states else None
        )


IDS = torch.arange(12).view(2, 6) % 7


def test_next_token():
    model = Toy(0)
    logits = model(IDS, use_cache=False).logits[..., :7]
    expected = [F.cross_entropy(logits[b, t], IDS[b, t + 1]) for b in range(2) for t in range(5)]
    torch.testing.assert_close(NextToken(model)(IDS), torch.stack(expected).mean())


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_distillation(weight):
    model, dense = Toy(0), Toy(1)
    found, target = (m(IDS, use_cache=False, output_hidden_states=True) for m in (model, dense))
    # The last entry is masked, which has no part in it.
    p, q = target.logits[..., :7].softmax(-1), found.logits[..., :7].softmax(-1)
    divergence = (p * (p / q).log()).sum(-1).mean()
    errors = [
        (f - t).square().sum() / t.square().sum()
        for f, t in zip(found.hidden_states[1:], target.hidden_states[1:], strict=True)
    ]
    expected = divergence + weight * torch.stack(errors).mean()
    loss = Distillation(model, dense, weight)(IDS)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, [model.embedding, model.head])
    wanted = torch.autograd.grad(expected, [model.embedding, model.head])
    torch.testing.assert_close(found, wanted)


def test_the_dense_model_gets_no_gradient():
    model, dense = Toy(0), Toy(1)
    Distillation(model, dense, 1.0)(IDS).backward()
    assert model.head.grad is not None
    assert dense.head.grad is None


def test_the_dense_model_itself_has_no_distance():
    assert Distillation(Toy(2), Toy(2), 1.0)(IDS).item() == 0
