"""prune_: narrower MLPs, against brute force, least squares and the model's own outputs."""

import copy
from itertools import pairwise

import pytest
import torch
from compress.toys import causal_lm, token_batches
from hf.families import tiny_family
from hf.multimodal import MULTIMODAL
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SIZES, tiny_ids, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from neuronmm_ops import CalibrationWarning, NonFiniteError, SVDConfig, compress_, prune_
from neuronmm_ops.compress.prune import RIDGE, kept_features

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
BATCHES = token_batches()


def mlps(model):
    return [layer.mlp for layer in model.model.layers]


def test_features_that_nothing_reads_go_first_and_cost_nothing():
    model = tiny_model()
    unread = torch.randperm(176, generator=torch.Generator().manual_seed(0))[:40]
    for mlp in mlps(model):
        mlp.down_proj.weight.data[:, unread] = 0
    expected = model(tiny_ids()).logits
    pruned = prune_(model, 40 / 176, BATCHES, block=8)
    assert (pruned.inner, pruned.kept) == (176, 136)
    assert max(pruned.losses.values()) < 1e-9
    torch.testing.assert_close(model(tiny_ids()).logits, expected, rtol=1e-4, atol=1e-5)


def test_one_of_two_equal_features_takes_over_the_others_part():
    model = tiny_model()
    for mlp in mlps(model):
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.data[88:] = linear.weight.data[:88]
    expected = model(tiny_ids()).logits
    assert prune_(model, 0.5, BATCHES, block=8).kept == 88
    torch.testing.assert_close(model(tiny_ids()).logits, expected, rtol=2e-3, atol=1e-4)


def problem(seed, N=12, inner=10, tokens=64):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inner, generator=random, dtype=torch.float64)
    x = x @ torch.randn(inner, inner, generator=random, dtype=torch.float64)
    return x, torch.randn(N, inner, generator=random, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000))
def test_the_first_to_go_is_the_one_that_least_squares_misses_least(seed):
    x, weight = problem(seed)
    moment = x.T @ x
    ridge = (RIDGE * moment.diagonal().mean()).sqrt() * torch.eye(10, dtype=torch.float64)
    rows = torch.cat([x, ridge])
    target = rows @ weight.T
    errors: list[float] = []
    for gone in range(10):
        left = torch.cat([rows[:, :gone], rows[:, gone + 1 :]], 1)
        fit = torch.linalg.lstsq(left, target).solution
        errors.append(float((left @ fit - target).square().sum()))
    assert set(range(10)) - set(kept_features(weight, moment, 9).tolist()) == {
        min(range(10), key=errors.__getitem__)
    }


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_those_kept_of_fewer_are_among_those_kept_of_more(seed):
    x, weight = problem(seed)
    kept = [set(kept_features(weight, x.T @ x, count).tolist()) for count in range(1, 10)]
    assert all(few < more for few, more in pairwise(kept))


def test_the_weight_and_its_moment_are_left_as_they_were():
    x, weight = problem(0)
    moment = x.T @ x
    given = weight.clone(), moment.clone()
    kept_features(weight, moment, 4)
    assert torch.equal(weight, given[0])
    assert torch.equal(moment, given[1])


@torch.no_grad()
def test_what_stays_is_refitted_by_least_squares_and_the_loss_is_measured():
    model = causal_lm()
    dense = copy.deepcopy(model)
    pruned = prune_(model, 0.3, BATCHES, block=8)
    rows: list[torch.Tensor] = []
    first = mlps(dense)[0]
    hook = first.down_proj.register_forward_pre_hook(lambda _, x: rows.append(x[0].flatten(0, -2)))
    for batch in BATCHES:
        dense(batch)
    hook.remove()
    hidden = torch.cat(rows).double()
    wanted = hidden @ first.down_proj.weight.T.double()
    own = mlps(model)[0]
    kept = [
        int((first.up_proj.weight == row).all(1).nonzero().flatten()) for row in own.up_proj.weight
    ]
    found = hidden[:, kept] @ own.down_proj.weight.T.double()
    best = torch.linalg.lstsq(hidden[:, kept], wanted).solution
    least = float((hidden[:, kept] @ best - wanted).square().sum())
    loss = float((found - wanted).square().sum())
    assert loss == pytest.approx(least, rel=1e-2)
    relative = loss / float(wanted.square().sum())
    assert pruned.losses["model.layers.0.mlp.down_proj"] == pytest.approx(relative, rel=1e-2)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "phi3", "phi", "gemma2", "nemotron", "starcoder2", "gpt_neox"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families(kind, dtype):
    model = tiny_family(kind, dtype)
    inner = model.config.intermediate_size
    expected = model(tiny_ids()).logits.float()
    pruned = prune_(model, 0.1, BATCHES, block=8)
    assert model.config.intermediate_size == pruned.kept == int(0.9 * inner) // 8 * 8
    found = model(tiny_ids()).logits.float()
    assert (found - expected).norm() < 0.5 * expected.norm()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype, name
        assert parameter.requires_grad, name
    again = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(tiny_ids()).logits.float(), found)


def test_too_little_text_is_warned_of():
    with pytest.warns(CalibrationWarning, match="has 128 tokens, fewer than 10\\*K = 1760 of") as w:
        prune_(tiny_model(), 0.25, BATCHES[:1], block=8)
    assert w[0].filename == __file__


def test_a_narrower_model_is_compressed_as_any_other():
    model = tiny_model()
    prune_(model, 0.25, BATCHES, block=8)
    report = compress_(model, SVDConfig(ratio=0.3, block=8), BATCHES)
    assert {layer.K for layer in report.layers} == {64, 128}
    assert torch.isfinite(model(tiny_ids()).logits).all()


@pytest.mark.parametrize("kind", ["opt", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_other_mlps_are_refused(kind):
    model = tiny_family(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"must be of dense nn\.Linears as wide as the config"):
        prune_(model, 0.2, BATCHES, block=8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_width_that_experts_have_too_is_refused():
    """Of GLM-4 MoE's the first layer is dense; a smaller width would be of shared experts, too."""
    sizes = {"moe_intermediate_size": 176, "n_routed_experts": 4, "num_experts_per_tok": 2}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    config = AutoConfig.for_model("glm4_moe", **SIZES, **sizes, **groups)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"must be that of dense MLPs alone, .* of model\.layers"):
        prune_(model, 0.25, BATCHES, block=8)
    assert model.config.intermediate_size == 176


@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen2_5_vl"])
def test_what_reads_images_keeps_its_width(kind):
    model = MULTIMODAL[kind]()
    before = {name: p.shape for name, p in model.named_parameters() if "language" not in name}
    pruned = prune_(model, 0.25, BATCHES, block=8)
    assert model.config.get_text_config().intermediate_size == pruned.kept == 128
    after = {name: p.shape for name, p in model.named_parameters() if "language" not in name}
    assert before == after


def test_mlps_that_text_does_not_pass_are_named():
    with pytest.raises(ValueError, match=r"layers\.1\.mlp is an MLP that text does not pass"):
        prune_(MULTIMODAL["mllama"](), 0.25, BATCHES, block=8)


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.5, float("nan")])
def test_ratios_out_of_range(ratio):
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\) and block at least 1"):
        prune_(tiny_model(), ratio, BATCHES, block=16)


@pytest.mark.parametrize(("ratio", "block"), [(0.99, 16), (0.2, 160)])
def test_ratios_that_leave_nothing(ratio, block):
    with pytest.raises(ValueError, match="some and not all of 176 inner features, in blocks of"):
        prune_(tiny_model(), ratio, BATCHES, block=block)


def test_a_share_that_binary_fractions_miss():
    model = causal_lm(intermediate_size=160)
    assert prune_(model, 0.9, BATCHES, block=16).kept == 16


def test_an_activation_that_is_not_finite_leaves_the_model_as_it_was():
    model = tiny_model()
    mlps(model)[1].up_proj.weight.data[3] = torch.inf
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj: input activations"):
        prune_(model, 0.2, BATCHES, block=8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.intermediate_size == 176
