"""`neuronmm generate --backend simulated`: the CPU's tokens, and a modelled time of one."""

from dataclasses import replace

import pytest
import torch
from outcomes import refused
from quantized import nearest, quantized
from tiny import tiny_model, tiny_tokenizer

import neuronmm_ops as nm
from neuronmm_ops import SVDConfig, hf
from neuronmm_ops.estimate.one_launch import others_of
from neuronmm_ops.hf import simulated as simulated_text
from neuronmm_ops.kernels.decoder_layer.operands import operands
from neuronmm_ops.models import shape_from_config
from neuronmm_ops.ops.backends import simulated
from neuronmm_ops.plan import plan_op
from neuronmm_ops.plan.launches import planned_kernels, shapes_of
from neuronmm_ops.plan.rms_norm import plan_rms_norm

SIMULATED = ("--backend", "simulated", "--new-tokens", 6)


@pytest.mark.parametrize("low_rank", [False, True])
def test_whole_tokens_are_decoded_on_the_simulated_core(run, dense, low_rank, tmp_path):
    directory = tmp_path / "low_rank" if low_rank else dense
    if low_rank:
        config = SVDConfig(ratio=0.5, block=8, method="plain", allocation="uniform")
        hf.compress(dense, config, None, directory)
    prompt = ("--prompt", "The quick")
    document = run("generate", directory, *prompt, *SIMULATED, "--json").document()
    times = document.pop("modelled_us_per_token")
    assert document.pop("target") == "trn2"
    assert document.pop("launches") == ["decoder_layer_decode", "rms_norm", "lm_head_decode"]
    plain = run("generate", directory, *prompt, "--new-tokens", 6, "--json").document()
    assert document == plain
    assert 10 < times["low"] <= times["middle"] <= times["high"] < 200
    page = run("generate", directory, *prompt, *SIMULATED).page()
    wanted = f"trn2, modelled: {times['middle']:.1f} us a decoded token ({times['low']:.1f} to "
    assert page.startswith("The quick" + plain["text"] + "\n" + wanted)
    assert page.endswith("), 3 launches\n")


def test_the_time_is_that_of_all_launches(dense):
    model, tokenizer = hf.load(dense), hf.load_tokenizer(dense)
    both = hf.generate_simulated(model, tokenizer, "The quick", 3)
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    one = hf.generate_simulated(model, tokenizer, "The quick", 3)
    H, V = model.lm_head.weight.shape[::-1]
    norm = plan_rms_norm(1, H, residual=True, dtype="float32").profile("trn2").time_ms
    plan = plan_op("lm_head", 1, ((H, V),), "float32")
    head = planned_kernels(plan)[0].profile("trn2").time_ms
    T = len(tokenizer("The quick").input_ids) + 3
    shape = shape_from_config(dense / "config.json")
    others = others_of(shape, 1, T)[1:]  # the stream is in one piece at first
    matrices = tuple(shape.projections.values())
    plan = plan_op("decoder_layer", 1, matrices, "float32", others=others)
    for count, found in ((1, one), (2, both)):
        launch = replace(
            planned_kernels(plan)[0], operands=shapes_of(operands(plan.problem, count))
        )
        of_layers = launch.profile("trn2").time_ms
        assert 1e3 * of_layers > 10 * count
        assert found.times_us[0] == pytest.approx(1e3 * (norm + head + of_layers), rel=1e-6)
    assert one.launches == both.launches
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_of_another_window_are_another_launch():
    config = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}
    model = tiny_model("qwen2", num_hidden_layers=3, **config)
    found = hf.generate_simulated(model, tiny_tokenizer(), "The quick", 3)
    assert found.launches == (*["decoder_layer_decode"] * 2, "rms_norm", "lm_head_decode")


@pytest.mark.parametrize("storage", ["", "int8"])
@pytest.mark.parametrize("kind", ["dense", "pair"])
def test_the_head_may_be_compressed(kind, storage):
    model, tokenizer = tiny_model("llama", tie_word_embeddings=False), tiny_tokenizer()
    weight = model.lm_head.weight.detach().t()
    if kind == "pair":
        u, sigma, v = torch.linalg.svd(weight, full_matrices=False)
        pair = u[:, :40] * sigma[:40], v[:40]
        nm.swap_(model, {"lm_head": quantized(*pair, storage) if storage else pair})
    elif storage:
        nm.swap_(model, {"lm_head": nearest(weight, storage)})
    found = hf.generate_simulated(model, tokenizer, "The quick", 6)
    assert found[:2] == hf.generate_text(model, tokenizer, "The quick", 6)
    assert found.launches[-1] == "lm_head_decode"
    assert ("xw" in found.launches) == (kind == "pair")


def test_the_cores_greatest_logit_is_the_token(dense, monkeypatch):
    model, tokenizer = hf.load(dense), hf.load_tokenizer(dense)
    own = torch.tensor([tokenizer.encode("q")[-1]]), torch.ones(1)
    monkeypatch.setattr(simulated_text._Ending, "_greatest", lambda *_: own)
    assert hf.generate_simulated(model, tokenizer, "The quick", 4).text.endswith("qqq")
    model.generation_config.repetition_penalty = 1.5  # which needs all logits
    plain = hf.generate_text(model, tokenizer, "The quick", 4)
    assert hf.generate_simulated(model, tokenizer, "The quick", 4)[:2] == plain


def test_a_head_with_a_bias_is_refused(dense):
    model, tokenizer = hf.load(dense), hf.load_tokenizer(dense)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(model.lm_head.weight)))
    with pytest.raises(ValueError, match="lm_head has a bias; run without the backend simulated"):
        hf.generate_simulated(model, tokenizer, "The quick", 3)
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_the_simulated_core_cannot_do_is_one_line(run, dense, monkeypatch):
    given = ("generate", dense, "--prompt", "x", "--backend", "simulated")
    refused(run(*given, "--new-tokens", 1), "a decode step needs at least 2 new tokens, got 1")
    refused(run(*given, "--device", "meta"), "runs in one process on the CPU; leave out --device")
    monkeypatch.setattr(simulated, "launch_of", lambda *_: None)
    refused(run(*given, "--new-tokens", 2), "a decoder layer has no kernel for these sizes")
