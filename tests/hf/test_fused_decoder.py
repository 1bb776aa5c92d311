"""`fuse_decoder_`: tokens are the unfused model's, whatever holds the weights."""

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from commands import run
from quantized import nearest, quantized
from tiny import SIZES, tiny_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

import neuronmm_ops as nm
from neuronmm_ops.nn import fused_decoder
from neuronmm_ops.nn.decode_cache import cache_name
from neuronmm_ops.nn.dense_linear import dense_linears

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3")
NEW = 12
WINDOW = {"sliding_window": 12}


def family_model(kind: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """A tiny model whose biases and norms are no constants."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, "eos_token_id": None, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "layers" in name:
                parameter.mul_(8)  # so that layers change the next token
    return model


def factored(model: PreTrainedModel, kind: str, storage: str = "") -> PreTrainedModel:
    """Swap all of a model's decoder Linears: "pairs" of low rank, or "dense" in a storage."""
    factors: dict[str, Any] = {}
    for name, linear in dense_linears(model).items():
        if "layers" not in name:
            continue
        weight = linear.weight.detach().t()
        if kind == "dense":
            factors[name] = nearest(weight, storage)
            continue
        u, sigma, v = torch.linalg.svd(weight.float(), full_matrices=False)
        pair = u[:, :24] * sigma[:24], v[:24]
        factors[name] = quantized(*pair, storage) if storage else pair
    nm.swap_(model, factors)
    return model


def prompts(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (3 if padded else 1, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4], mask[2, :7] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model: PreTrainedModel, new: int = NEW, padded: bool = False) -> Tensor:
    options = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static"}
    return model.generate(**prompts(padded), **options, pad_token_id=256)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New tokens of each call of the op."""
    made: list[int] = []
    original = fused_decoder.decoder_layer

    def run(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        made.append(x.shape[1])
        return original(x, *rest)

    monkeypatch.setattr(fused_decoder, "decoder_layer", run)
    return made


def assert_fused(
    model: PreTrainedModel, calls: list[int], padded: bool, layers: int = 1, ops: int | None = None
) -> None:
    """Every token after the first is made by so many ops, and is the unfused model's."""
    expected = generated(model, padded=padded)
    assert nm.fuse_decoder_(model, layers) is model
    calls.clear()
    assert torch.equal(generated(model, padded=padded), expected)
    assert len(calls) == (NEW - 1) * (ops or model.config.num_hidden_layers)
    assert len(set(expected[:, 9:].flatten().tolist())) > 2  # no model that repeats itself


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_tokens_are_those_of_the_unfused_model(family, padded, calls):
    assert_fused(family_model(family), calls, padded)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_window_drops_what_it_has_passed(family, padded, calls):
    assert_fused(family_model(family, **WINDOW), calls, padded)


@pytest.mark.parametrize(("layers", "ops"), [(2, 2), (3, 1), (9, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_one_op_have_the_tokens_of_the_unfused_model(family, layers, ops, calls):
    """The last op has the layer that is left."""
    sizes = WINDOW if family in ("mistral", "phi3") else {}
    model = family_model(family, **sizes, num_hidden_layers=3)
    assert_fused(model, calls, padded=True, layers=layers, ops=ops)


def test_an_op_has_layers_of_one_window(calls):
    config = {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 5}
    model = family_model("qwen2", **WINDOW, **config)
    assert_fused(model, calls, padded=True, layers=4, ops=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_low_rank_tokens_are_those_of_the_unfused_model(family, calls):
    assert_fused(factored(family_model(family), "pairs"), calls, padded=True)


@pytest.mark.parametrize("storage", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("kind", ["dense", "pairs"])
@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_stored_tokens_are_those_of_the_unfused_model(family, kind, storage, calls):
    assert_fused(factored(family_model(family), kind, storage), calls, padded=False)


@pytest.mark.parametrize(("target", "layers"), [("trn1", 1), ("trn2", 1), ("trn2", 2)])
@pytest.mark.parametrize("storage", ["", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_simulated_core_has_the_same_tokens(family, storage, target, layers):
    """A padded batch, whose windows are full, where the family has windows."""
    sizes = WINDOW if family in ("mistral", "phi3") else {}
    model = factored(family_model(family, **sizes), "pairs", storage)
    expected = generated(model, new=6, padded=True)
    nm.fuse_decoder_(model, layers)
    with nm.use_impl("simulated", target):
        assert torch.equal(generated(model, new=6, padded=True), expected)
        profile = nm.last_profile()
    assert (profile.kernel_name, profile.target) == ("decoder_layer_decode", target)


def test_bfloat16_logits_are_as_accurate_as_the_unfused_models(calls):
    exact, plain = family_model("qwen3").double(), family_model("qwen3").bfloat16()
    exact.load_state_dict(plain.state_dict())
    fused = nm.fuse_decoder_(copy.deepcopy(plain))
    oracle, rough, found = (stepped(model) for model in (exact, plain, fused))
    assert len(calls) >= 2 * 4
    errors = [(logits.double() - oracle).square().mean().sqrt() for logits in (found, rough)]
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.parametrize("names", [("self_attn.q_proj", "mlp.down_proj"), ("mlp.up_proj",)])
def test_some_projections_of_one_input_may_be_dense(names, calls):
    model = family_model("llama")
    for name in names:
        low_rank(name, 8)(model)
    assert_fused(model, calls, padded=False)


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_the_mlp_alone_may_be_stored(storage, calls):
    stored, model = factored(family_model("llama"), "low rank", storage), family_model("llama")
    for layer, own in zip(model.model.layers, stored.model.layers, strict=True):
        layer.mlp = own.mlp
    assert_fused(model, calls, padded=False)


def stepped(model: PreTrainedModel, sizes: tuple[int, ...] = (9, 1, 1, 1, 1)) -> Tensor:
    """Logits of a text that passes in pieces of these sizes, batch 1."""
    past = StaticCache(config=model.config, max_cache_len=40)
    ids = torch.randint(0, 256, (1, sum(sizes)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        pieces = [model(piece, **{cache_name(model): past}).logits for piece in ids.split(sizes, 1)]
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("sizes", [{}, WINDOW])
def test_drafts_and_later_prompts_continue_a_cache(sizes, layers, calls):
    pieces = (9, 1, 2, 8, 3, 11, 1, 1)
    model = family_model("mistral", **sizes)
    expected = stepped(model, pieces)
    nm.fuse_decoder_(model, layers)
    calls.clear()
    torch.testing.assert_close(stepped(model, pieces), expected, rtol=1e-4, atol=1e-4)
    passed = (1, 2, 8, 3, 1, 1) if not sizes else (1, 2, 1, 1)  # a full window takes one at a time
    assert calls == [size for size in passed for _ in range(2 // layers)]


def continued(model: PreTrainedModel) -> Tensor:
    """Logits of a padded batch: a prompt, two tokens, a second prompt, two tokens."""
    given = prompts(padded=True)
    past, mask = StaticCache(config=model.config, max_cache_len=40), given["attention_mask"]
    ids = torch.randint(0, 256, (3, 14), generator=torch.Generator().manual_seed(4))
    found: list[Tensor] = []
    with torch.no_grad():
        for piece in (given["input_ids"], *ids.split((1, 1, 10, 1, 1), 1)):
            if found:
                mask = torch.cat([mask, torch.ones_like(piece)], 1)
            places = (mask.cumsum(-1) - 1).clamp_min(0)[:, -piece.shape[1] :]
            output = model(
                piece, attention_mask=mask, position_ids=places, **{cache_name(model): past}
            )
            found.append(output.logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("sizes", [{}, WINDOW])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_padded_batch_goes_on_with_a_second_prompt(sizes, layers, attention, calls):
    model = family_model("mistral", **sizes, attn_implementation=attention)
    expected = continued(model)
    nm.fuse_decoder_(model, layers)
    calls.clear()
    torch.testing.assert_close(continued(model), expected, rtol=1e-4, atol=1e-4)
    assert calls == [1] * (8 // layers)


def test_a_cache_that_is_reset_begins_anew():
    model = nm.fuse_decoder_(family_model("llama"))
    past = StaticCache(config=model.config, max_cache_len=30)
    options = {"max_new_tokens": 5, "do_sample": False, cache_name(model): past}
    first = model.generate(**prompts(padded=True), **options, pad_token_id=256)
    past.reset()
    assert torch.equal(model.generate(**prompts(padded=True), **options, pad_token_id=256), first)


def test_names_and_weights_stay_and_unfuse_restores(calls):
    model = factored(family_model("llama"), "pairs")
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    nm.fuse_decoder_(nm.fuse_decoder_(model), layers=2)
    after = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert after == before
    assert [type(module) for module in model.modules()] == kinds
    calls.clear()
    assert nm.unfuse_(model) is model
    generated(model)
    assert calls == []
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_weight_that_changes_counts_at_once(calls):
    model = nm.fuse_decoder_(family_model("llama"))
    before = generated(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    after = generated(model)
    assert not torch.equal(before, after)
    assert torch.equal(generated(nm.unfuse_(model)), after)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],  # noqa: S301
)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_copy_is_fused_with_its_own_weights(copied, layers, calls):
    model = nm.fuse_decoder_(family_model("llama"), layers)
    expected, other = generated(model), copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    calls.clear()
    assert torch.equal(generated(other), expected)
    assert calls


@pytest.mark.slow
def test_a_fused_model_is_saved_as_any_other(tmp_path):
    model = nm.fuse_decoder_(factored(family_model("llama"), "pairs"))
    model.save_pretrained(tmp_path)
    tokens = generated(model)
    script = f"""
import sys, torch
sys.path.insert(0, "tests")
import neuronmm_ops as nm
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).eval()
for each in (model, nm.fuse_decoder_(model)):
    ids = torch.tensor({tokens[:, :9].tolist()})
    options = dict(max_new_tokens={NEW}, do_sample=False, cache_implementation="static")
    print(each.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist())
"""
    lines = run(sys.executable, "-c", script).splitlines()
    assert lines == [str(tokens.tolist())] * 2


def test_hidden_states_between_layers_of_an_op_are_the_unfused_models(calls):
    model = family_model("llama")
    expected = hidden_states(model)
    nm.fuse_decoder_(model, layers=2)
    for way in ("argument", "config"):
        calls.clear()
        found = hidden_states(model, way)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert calls == [1]  # the step that asks for none


def hidden_states(model: PreTrainedModel, way: str = "argument") -> list[Tensor]:
    """Those of a token after a prompt and another token; asked for by an argument, or config."""
    past, ids = StaticCache(config=model.config, max_cache_len=20), prompts(padded=False)
    options = {cache_name(model): past}
    with torch.no_grad():
        model(ids["input_ids"], **options)
        model(ids["input_ids"][:, :1], **options)
        model.config.output_hidden_states = way == "config"
        asked = {} if way == "config" else {"output_hidden_states": True}
        states = model(ids["input_ids"][:, 1:2], **options, **asked).hidden_states
        model.config.output_hidden_states = False
    return list(states)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("sizes", [{}, WINDOW])
def test_a_decode_step_is_one_graph(sizes, layers):
    model = nm.fuse_decoder_(family_model("mistral", **sizes), layers)
    torch.compiler.reset()  # a function has few graphs in a process
    expected = stepped(model)
    past = StaticCache(config=model.config, max_cache_len=40)
    ids = torch.randint(0, 256, (1, 13), generator=torch.Generator().manual_seed(3))
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = [model(ids[:, :9], **{cache_name(model): past}).logits]
        for place in range(9, 13):
            found.append(step(ids[:, place : place + 1], **{cache_name(model): past}).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected)


@pytest.mark.slow
def test_prompts_in_a_bucket_and_steps_are_two_graphs():
    """The program of docs/trainium.md, which sets the length that a padded prompt has."""
    model = family_model("llama")
    torch.compiler.reset()
    expected = [bucketed(model, prompt) for prompt in ([1, 2, 3, 4, 5], [7, 8])]
    compiled = torch.compile(
        nm.fuse_decoder_(model), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    assert [bucketed(compiled, prompt) for prompt in ([1, 2, 3, 4, 5], [7, 8])] == expected


def bucketed(model: Any, prompt: list[int]) -> list[int]:
    """Ten tokens after a prompt that is padded on the right to 16."""
    config, length = model.config, len(prompt)
    past = StaticCache(config=config, max_cache_len=40)
    past.early_initialization(1, config.num_key_value_heads, config.head_dim, model.dtype, "cpu")
    ids, last = torch.tensor([prompt + [0] * (16 - length)]), length - 1
    found: list[int] = []
    for _ in range(10):
        with torch.no_grad():
            kept = {cache_name(model): past, "logits_to_keep": torch.tensor([last])}
            logits = model(ids, **kept).logits
        if not found:
            for layer in past.layers:
                layer.cumulative_length.copy_(torch.tensor(length))
        found.append(int(logits[0, -1].argmax()))
        ids, last = torch.tensor([found[-1:]]), 0
    return found


def test_what_needs_gradients_passes_through_the_modules(calls):
    model = nm.fuse_decoder_(family_model("llama"))
    calls.clear()
    ids = prompts(padded=False)["input_ids"]
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert calls == []
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


# --- what is refused -----------------------------------------------------------------------------


def refused(change: Any, match: str, family: str = "llama", **sizes: Any) -> None:
    """A model that a change makes unfit is refused in one line, and stays as it is."""
    model = family_model(family, **sizes)
    change(model)
    with pytest.raises(ValueError, match=match) as caught:
        nm.fuse_decoder_(model)
    assert "\n" not in str(caught.value)
    assert not any(fused_decoder.is_fused(module) for module in model.modules())


def on_last(name: str, change: Any) -> Any:
    """A change of a module of the last layer."""
    return lambda model: change(model.model.layers[-1].get_submodule(name))


def replaced(name: str, module: nn.Module) -> Any:
    parent, _, attribute = name.rpartition(".")
    return on_last(parent, lambda layer: setattr(layer, attribute, module))


def low_rank(name: str, rank: int) -> Any:
    parent, _, attribute = name.rpartition(".")
    return on_last(
        parent,
        lambda layer: setattr(
            layer, attribute, nm.SVDLinear.from_linear(getattr(layer, attribute), rank)
        ),
    )


BAD = [
    (lambda model: None, "o_proj has a bias|output has a bias", {"attention_bias": True}),
    (lambda model: None, "has a bias; the op has those of query", {"mlp_bias": True}),
    (
        on_last("mlp.up_proj", lambda m: m.register_forward_hook(print)),
        "model.layers.1 cannot be fused: up_proj is a Linear, or has hooks",
        {},
    ),
    (replaced("self_attn.q_proj", nn.Sequential()), "q_proj is a Sequential; it must be nn", {}),
    (replaced("input_layernorm", nn.LayerNorm(64)), "a norm is a LayerNorm", {}),
    (replaced("mlp", nn.Identity()), "Identity", {}),
    (
        low_rank("self_attn.o_proj", 64),
        "model.layers.1 cannot be fused: output: a pair's rank must be less",
        {},
    ),
    (lambda model: model.model.layers.append(nn.Identity()), "layers.2 is no decoder layer", {}),
    (
        on_last("input_layernorm", lambda norm: setattr(norm, "variance_epsilon", 1e-3)),
        "norms must have one eps",
        {},
    ),
    (
        on_last("self_attn", lambda attention: setattr(attention, "scaling", 1.0)),
        "scores must be scaled by head_dim",
        {},
    ),
]


@pytest.mark.parametrize(("change", "match", "sizes"), BAD)
def test_a_model_that_the_op_does_not_compute_is_refused(change, match, sizes):
    refused(change, match, **sizes)


def test_rope_of_a_part_of_each_head_is_refused():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    refused(lambda model: None, "partial_rotary_factor 0.5", "phi3", rope_parameters=rope)


def test_rounding_of_activations_is_refused():
    def change(model: PreTrainedModel) -> None:
        nm.set_compute_(factored(model, "pairs", "fp8"), "fp8")

    refused(change, "q_proj computes in fp8, the op does not")


def test_layers_that_no_op_takes_together_are_refused():
    model = family_model("llama")
    model.model.layers[1].bfloat16()
    nm.unfuse_(nm.fuse_decoder_(model))
    with pytest.raises(
        ValueError, match=r"layers\.0 to model\.layers\.1 cannot be fused: .*bfloat"
    ):
        nm.fuse_decoder_(model, layers=2)
    with pytest.raises(ValueError, match="layers of an op must be 1 or more, got 0"):
        nm.fuse_decoder_(model, layers=0)
    assert not any(fused_decoder.is_fused(module) for module in model.modules())


def test_a_model_of_another_family_is_refused():
    with pytest.raises(ValueError, match=r"takes models of Llama, Mistral.*got Gemma2ForCausalLM"):
        nm.fuse_decoder_(tiny_model("gemma2"))


def test_another_cache_is_refused_once_it_has_tokens():
    model = nm.fuse_decoder_(family_model("llama"))
    past, ids = DynamicCache(config=model.config), prompts(padded=False)["input_ids"]
    with torch.no_grad():
        model(ids, **{cache_name(model): past})
        with pytest.raises(TypeError, match="decode with a StaticCache, got DynamicCache; call"):
            model(ids[:, :1], **{cache_name(model): past})


def test_a_full_cache_is_refused():
    model = nm.fuse_decoder_(family_model("llama"))
    past, ids = StaticCache(config=model.config, max_cache_len=9), prompts(padded=False)
    with torch.no_grad():
        model(ids["input_ids"], **{cache_name(model): past})
        with pytest.raises(ValueError, match=r"must be in 0\.\.T - M = 8, got \[9\]"):
            model(ids["input_ids"][:, :1], **{cache_name(model): past})


def test_padding_on_the_right_is_refused():
    model, given = nm.fuse_decoder_(family_model("llama")), prompts(padded=True)
    past = StaticCache(config=model.config, max_cache_len=20)
    options = {"attention_mask": given["attention_mask"].flip(1), cache_name(model): past}
    with torch.no_grad(), pytest.raises(ValueError, match="pad on the left"):
        model(given["input_ids"], **options)
