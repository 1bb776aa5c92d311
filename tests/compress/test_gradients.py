"""Gradient statistics against autograd's own, and that they leave no trace."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import FAMILIES, GatedMLP, causal_lm, token_batches

from neuronmm_ops import NonFiniteError
from neuronmm_ops.compress import gradients
from neuronmm_ops.compress.gradients import collect_gradients, drawn_label_loss

NAME = "model.layers.0.mlp.down_proj"


def test_the_weight_gradient_is_autograd_s():
    model, batches = causal_lm(), token_batches(2)
    found = collect_gradients(model, {NAME: "weight"}, batches)[NAME]
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    loss = sum(
        F.cross_entropy(model(b).logits[:, :-1].flatten(0, 1), b[:, 1:].flatten(), reduction="sum")
        for b in batches
    )
    loss.backward()
    tokens = sum(b[:, 1:].numel() for b in batches)
    expected = model.get_submodule(NAME).weight.grad.double() / tokens
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_scale_and_diagonal_are_those_of_the_moment(family):
    model, batches = causal_lm(family), token_batches(2)
    kinds = ("moment", "diagonal", "scale")
    moment, diagonal, scale = (
        collect_gradients(model, {NAME: kind}, batches)[NAME] for kind in kinds
    )
    assert moment.dtype == diagonal.dtype == scale.dtype == torch.float64
    assert torch.allclose(moment.diagonal(), diagonal, rtol=1e-5)
    assert float(scale) == pytest.approx(float(diagonal.mean()), rel=1e-5)
    assert torch.linalg.eigvalsh(moment)[0] > -1e-9 * moment.diagonal().mean()


def test_the_moment_predicts_the_divergence():
    """Half of the mean of e C e is the divergence from a model with an error e in that output."""
    model, name = causal_lm().double(), "model.layers.1.mlp.down_proj"
    batches = token_batches(8)
    c = collect_gradients(model, {name: "moment"}, batches)[name]
    error = 1e-3 * torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        clean = torch.cat([model(b).logits.log_softmax(-1).flatten(0, 1) for b in batches])
        hook = model.get_submodule(name).register_forward_hook(lambda m, a, y: y + error)
        moved = torch.cat([model(b).logits.log_softmax(-1).flatten(0, 1) for b in batches])
        hook.remove()
    divergence = float(F.kl_div(moved, clean, log_target=True, reduction="batchmean"))
    # Tokens share the error: gradients of other positions count too, hence the factor.
    assert divergence == pytest.approx(float(error @ c @ error) / 2, rel=0.5)


def test_drawn_labels_have_the_model_s_distribution():
    logits = torch.tensor([[2.0, 0.0, 1.0]]).expand(20000, 3).clone().requires_grad_()
    drawn_label_loss(logits, True, torch.Generator().manual_seed(0)).backward()
    p = logits.detach()[0].softmax(0)
    # The gradient is softmax less the label: its mean is zero, its moment diag(p) - p p.
    assert torch.allclose(logits.grad.mean(0), torch.zeros(3), atol=0.02)
    moment = logits.grad.t() @ logits.grad / 20000
    assert torch.allclose(moment, p.diag() - torch.outer(p, p), atol=0.02)


def test_a_model_without_logits_is_a_gaussian():
    model = GatedMLP().double()
    x = torch.randn(4000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    c = collect_gradients(model, {"down_proj": "moment"}, [x[None]])["down_proj"]
    assert torch.allclose(c, torch.eye(8).double(), atol=0.1)


def test_frozen_and_tied_models_and_in_place_code_are_taken():
    model = causal_lm("Qwen3").requires_grad_(False)
    found = collect_gradients(model, {NAME: "scale"}, token_batches(1))[NAME]
    assert found > 0
    assert not any(p.requires_grad for p in model.parameters())

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(x)
            y += x
            return y

    assert collect_gradients(InPlace(), {"a": "scale"}, [torch.randn(1, 5, 8)])["a"] > 0


def test_masked_tokens_do_not_count():
    model, ids = causal_lm(), token_batches(1)[0][:1]
    padded = torch.cat([ids, torch.zeros(1, 9, dtype=torch.long)], dim=1)
    mask = torch.cat([torch.ones_like(ids), torch.zeros(1, 9, dtype=torch.long)], dim=1)
    plain = collect_gradients(model, {NAME: "weight"}, [ids])[NAME]
    masked = collect_gradients(
        model, {NAME: "weight"}, [{"input_ids": padded, "attention_mask": mask}]
    )[NAME]
    assert torch.allclose(plain, masked, rtol=1e-4, atol=1e-8)


def test_few_tokens_are_enough_and_more_are_not_run(monkeypatch):
    calls = []
    model = causal_lm()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(gradients, "MAX_TOKENS", 96)
    collect_gradients(model, {NAME: "scale"}, token_batches(4))
    assert len(calls) == 3


def test_errors_name_the_layer():
    model = causal_lm()
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"layers\.0\.mlp\.down_proj: input activations"):
        collect_gradients(model, {NAME: "scale"}, token_batches(1))
    with pytest.raises(ValueError, match="need a causal language model and token ids"):
        collect_gradients(GatedMLP(), {"up_proj": "weight"}, [torch.randn(1, 4, 8)])

    class Unused(GatedMLP):
        def forward(self, x):
            self.up_proj(x)
            with torch.no_grad():
                self.down_proj(self.up_proj(x))
            return self.gate_proj(x)

    for name in ("up_proj", "down_proj"):
        with pytest.raises(ValueError, match=f"the loss does not depend on {name}; leave it out"):
            collect_gradients(Unused(), {name: "scale"}, [torch.randn(1, 4, 8)])
