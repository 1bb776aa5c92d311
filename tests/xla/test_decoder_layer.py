"""Several layers through XLA's custom call: one call, whose caches are aliases."""

import copy
import ctypes
import re
from typing import Any

import pytest
import torch
import torch_xla
from decoder_layers import cast, operands
from graphs import lowered
from host import tensor_at
from torch.utils._pytree import tree_map_only
from torch_xla import _XLAC
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import neuronmm_ops as nm
from neuronmm_ops.nn.decode_cache import cache_name
from neuronmm_ops.nn.laid_linear import is_laid
from neuronmm_ops.ops.definitions.decoder_layer import SPEC


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_layers_are_one_call_that_changes_the_caches(device, handler, monkeypatch, mode):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    given = operands(torch.float32, (16, 0, 40), layers=2, bias=False)
    args = SPEC.complete((), given)
    spec = SPEC.of(args)
    tensors, options = spec.split(args)
    layouts = [(n, t.shape, t.dtype) for n, t in enumerate(tensors) if t is not None]

    def call(config, out, addresses):
        found: list[Any] = [None] * len(tensors)
        for address, (n, shape, dtype) in zip(addresses, layouts, strict=False):
            found[n] = tensor_at(address, tuple(shape), dtype)
        for n in (*spec.activations, *spec.states):
            found[n] = found[n].clone().view(tensors[n].shape)
        results = spec.reference(*spec.joined(tuple(found), options))
        every = [*results, *[found[n] for n in spec.states]]
        pointers = (ctypes.c_void_p * len(every)).from_address(out)
        for pointer, result in zip(pointers, every, strict=True):
            tensor_at(pointer, tuple(result.shape), result.dtype).copy_(result)

    monkeypatch.setattr(handler, "call", call)
    wanted = cast(given, torch.float32)
    there = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), given)
    with mode():
        results = nm.decoder_layer(**there)
    (lowered_call,) = lowered(*results, *there["caches"]).calls
    assert lowered_call.config["klir_binary"]["input_names"] == [
        operand.name
        for operand, tensor in zip(spec.tensors, tensors, strict=True)
        if tensor is not None
    ]
    caches = [f"{name}_cache_{n}" for n in range(2) for name in ("key", "value")]
    assert lowered_call.config["klir_binary"]["output_names"] == ["y0", "y1", *caches]
    torch_xla.sync()
    expected = [*SPEC.reference(**wanted), *wanted["caches"]]
    for found, own in zip([*results, *there["caches"]], expected, strict=True):
        torch.testing.assert_close(found.cpu(), own)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=72, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_fused_model_has_the_tokens_of_the_unfused_one(device, monkeypatch, layers):
    monkeypatch.setenv("NEURONMM_XLA", "composite")
    model, prompt = llama(), torch.randint(0, 64, (1, 9))
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    wanted = model.generate(prompt, **settings, disable_compile=True)
    nm.fuse_decoder_(model.to(device), layers)
    found = model.generate(prompt.to(device), **settings, disable_compile=True)
    assert torch.equal(found.cpu(), wanted)


def test_a_decode_step_transposes_no_weight_and_no_cache(device, handler, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    model, prompt = llama().to(device), torch.randint(0, 64, (1, 9)).to(device)
    past = StaticCache(config=nm.fuse_decoder_(model).config, max_cache_len=24)
    with torch.no_grad():
        model(prompt, **{cache_name(model): past})
        torch_xla.sync()
        logits = model(prompt[:, :1], **{cache_name(model): past}).logits
    caches = [each for layer in past.layers for each in (layer.keys, layer.values)]
    text = _XLAC._get_xla_tensors_hlo([logits, *caches])
    assert len(lowered(logits).calls) == 2
    transposed = re.findall(r" transpose\(f32\[(\d+,\d+)\]", text)
    assert transposed == ["72,64"]  # the head's, a product of XLA
    assert not re.search(r" transpose\(f32\[(\d+,)*24[,\]]", text)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_padded_batch_goes_on_with_prompts_and_a_reset(device, monkeypatch, layers):
    monkeypatch.setenv("NEURONMM_XLA", "composite")
    model = llama()
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(2))
    wanted = texts(model, ids)
    found = texts(nm.fuse_decoder_(model.to(device), layers), ids.to(device))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def texts(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a padded prompt, steps, a second prompt and steps, twice in one cache."""
    past, found = StaticCache(config=model.config, max_cache_len=24), list[torch.Tensor]()
    for _ in range(2):
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        seen = 0
        for piece in ids.split([6, 1, 1, 10, 1, 1], 1):
            seen += piece.shape[1]
            places = (mask[:, :seen].cumsum(-1) - 1).clamp_min(0)[:, -piece.shape[1] :]
            options = {"attention_mask": mask[:, :seen], "position_ids": places}
            with torch.no_grad():
                logits = model(piece, **options, **{cache_name(model): past}).logits[:, -1]
            found.append(logits.cpu())
        past.reset()
    return torch.stack(found)


def test_a_compiled_model_has_the_tokens_of_the_unfused_one(device, monkeypatch):
    """Prompts in a bucket, by the program of docs/trainium.md."""
    monkeypatch.setenv("NEURONMM_XLA", "composite")
    model, given = llama(), ([1, 2, 3, 4, 5], [7, 8])
    wanted = [bucketed(model, model, prompt) for prompt in given]
    nm.fuse_decoder_(model.to(device), layers=2)
    step = torch.compile(model, backend="openxla", fullgraph=True, dynamic=False)
    assert [bucketed(step, model, prompt) for prompt in given] == wanted


def bucketed(call: Any, model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """Tokens after a prompt that is padded on the right to 8."""
    past, device = StaticCache(config=model.config, max_cache_len=24), model.device
    past.early_initialization(1, 2, 16, model.dtype, device)
    ids, last = torch.tensor([prompt + [0] * (8 - len(prompt))]), len(prompt) - 1
    found: list[int] = []
    for _ in range(6):
        options = {cache_name(model): past, "logits_to_keep": torch.tensor([last]).to(device)}
        with torch.no_grad():
            found.append(int(call(ids.to(device), **options).logits[0, -1].argmax()))
        if len(found) == 1:
            for layer in past.layers:
                layer.cumulative_length.copy_(torch.tensor(len(prompt)))
        ids, last = torch.tensor([found[-1:]]), 0
    return found


def test_names_and_values_of_weights_stay(device):
    model = llama()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    nm.fuse_decoder_(nm.fuse_decoder_(model.to(device)))
    up = model.model.layers[0].mlp.up_proj
    assert up.weight.shape == (64, 128)
    assert [name for name, _ in model.named_parameters()] == names
    twin = copy.deepcopy(model)
    with torch.no_grad():
        up.weight.zero_()
    model.load_state_dict(wanted)
    for each in (model, twin, nm.unfuse_(model), nm.unfuse_(twin)):
        found = each.state_dict()
        assert list(found) == list(wanted)
        for name, value in found.items():
            assert torch.equal(value.cpu(), wanted[name])
    assert up.weight.shape == (128, 64)
    assert not any(is_laid(module) for module in (*model.modules(), *twin.modules()))
