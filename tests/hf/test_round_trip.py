"""Saving and loading keep every value bit for bit, in any storage, also in a fresh process."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from quantized import swap_quantized_
from safetensors import safe_open
from small import compressed
from stored import assert_same_bits, bits, config_of
from tiny import FAMILIES, tiny_ids, tiny_model, tiny_tokenizer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM

from neuronmm_ops import checkpoint, hf
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.compress.record import low_rank_layers
from neuronmm_ops.manifest import tensor_hashes
from neuronmm_ops.nn import SVDMLP, SVDLinear
from neuronmm_ops.storages import STORAGES

LOADERS = (hf.load, AutoModelForCausalLM.from_pretrained)


def low_rank(storage):
    """A model with low-rank layers in a storage; Qwen2's q has a bias."""
    if storage is None:
        return compressed("qwen2", "all-linear", dtype=torch.bfloat16)[0]
    model = tiny_model("qwen2", torch.bfloat16)
    return swap_quantized_(model, storage, "gate_proj", "up_proj", "down_proj", "q_proj")


@pytest.fixture(scope="module", params=[None, *STORAGES], ids=str)
def saved(request, tmp_path_factory):
    """A storage, a model with low-rank layers in it, and the checkpoint of this."""
    model, directory = low_rank(request.param), tmp_path_factory.mktemp("saved") / "out"
    hf.save(model, directory, tokenizer=tiny_tokenizer())
    return request.param, model, directory


def factors_of(model):
    ends = (".u", ".v", ".u_scale", ".v_scale")
    return {name: t for name, t in model.state_dict().items() if name.endswith(ends)}


@pytest.mark.parametrize("load", LOADERS)
def test_round_trip(saved, load):
    storage, model, directory = saved
    restored = load(directory)
    assert_same_bits(restored.state_dict(), model.state_dict())
    assert torch.equal(restored(tiny_ids(1)).logits, model(tiny_ids(1)).logits)
    assert isinstance(restored.model.layers[0].mlp, SVDMLP)
    for layer in low_rank_layers(restored).values():
        assert layer.storage == storage
        assert layer.u.requires_grad == layer.v.requires_grad == (storage is None)
        assert layer.u.is_contiguous()
        assert layer.v.is_contiguous()
    assert restored.dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back(family, tmp_path):
    model, report = compressed(family, "all-linear", dtype=torch.bfloat16)
    hf.save(model, tmp_path / "out", report)
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_bits(restored.state_dict(), model.state_dict())
    assert torch.equal(model(tiny_ids(1)).logits, restored(tiny_ids(1)).logits)
    assert isinstance(restored.model.layers[0].mlp, SVDMLP)


FRESH_PROCESS = """
import hashlib, json, sys
import torch
from transformers import AutoModelForCausalLM
import neuronmm_ops
digest = lambda t: hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
for directory in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    state = {**model.state_dict(), "logits": model(torch.arange(24).view(1, 24)).logits}
    print(json.dumps({name: [str(t.dtype), digest(t)] for name, t in state.items()}))
"""


@pytest.mark.slow
def test_round_trip_in_a_fresh_process(tmp_path):
    models = [compressed("llama", "all-linear")[0], *map(low_rank, (None, *STORAGES))]
    for index, model in enumerate(models):
        hf.save(model, tmp_path / str(index))
    options = ("-W", "error::UserWarning", "-c", FRESH_PROCESS, *sorted(tmp_path.iterdir()))
    result = subprocess.run(
        [sys.executable, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()[-len(models) :]]
    for model, digests in zip(models, found, strict=True):
        state = {**model.state_dict(), "logits": model(torch.arange(24).view(1, 24)).logits}
        assert digests == {
            name: [str(t.dtype), hashlib.sha256(bits(t).numpy().tobytes()).hexdigest()]
            for name, t in state.items()
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_dtype_on_loading_is_of_all_that_is_not_in_one_byte(saved, dtype):
    storage, model, directory = saved
    restored = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    kept = {} if storage is None else factors_of(model)
    expected = {n: kept.get(n, t.to(dtype)) for n, t in model.state_dict().items()}
    assert_same_bits(restored.state_dict(), expected)
    assert restored(tiny_ids(1)).logits.dtype == dtype
    assert restored.model.layers[0].mlp.up_proj.weight.dtype == dtype


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
def test_device_maps_and_offload(saved, tmp_path):
    storage, model, directory = saved
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.1")
    on_disk = {**dict.fromkeys(parts, "cpu"), "model.layers.0": "disk"}
    expected = model(tiny_ids(1)).logits
    for device_map in ("cpu", "auto", on_disk):
        restored = AutoModelForCausalLM.from_pretrained(
            directory, device_map=device_map, offload_folder=tmp_path / "offload"
        )
        assert torch.equal(restored(tiny_ids(1)).logits, expected), device_map
    gate = restored.model.layers[0].mlp.gate_proj
    assert gate.u.is_meta
    assert gate.u.requires_grad == (storage is None)
    on_meta = AutoModelForCausalLM.from_pretrained(directory, device_map="meta").state_dict()
    for name, tensor in model.state_dict().items():
        found = on_meta[name]
        assert (found.is_meta, found.shape, found.dtype) == (True, tensor.shape, tensor.dtype)


def test_shards_and_saving_again(saved, tmp_path):
    _, model, directory = saved
    hf.load(directory).save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    hf.save(hf.load(tmp_path / "plain"), tmp_path / "saved", max_shard_size="20KB")
    for name in ("plain", "saved"):
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 3
        assert_same_bits(hf.load(tmp_path / name).state_dict(), model.state_dict())
        assert tensor_hashes(tmp_path / name) == tensor_hashes(directory)
    first, second = (config_of(path) for path in (directory, tmp_path / "saved"))
    assert first["quantization_config"] == second["quantization_config"]


def test_the_body_loads_without_the_head(saved):
    _, model, directory = saved
    body = AutoModel.from_pretrained(directory)
    assert isinstance(body.layers[0].mlp.up_proj, SVDLinear)
    assert_same_bits(body.state_dict(), model.model.state_dict())
    expected = model.model(tiny_ids(1)).last_hidden_state
    assert torch.equal(body(tiny_ids(1)).last_hidden_state, expected)


def test_generated_tokens_survive_the_round_trip(saved):
    _, model, directory = saved
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256}
    expected = model.generate(tiny_ids(1, 8), **arguments)
    assert torch.equal(expected, hf.load(directory).generate(tiny_ids(1, 8), **arguments))


# --- one storage


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A compressed Llama, and its checkpoint."""
    (model, report), directory = compressed(), tmp_path_factory.mktemp("small") / "out"
    hf.save(model, directory, report)
    return model, directory


def test_untied_head_and_tied_head_survive(tmp_path):
    for tied in (True, False):
        model, report = compressed(tied=tied)
        hf.save(model, tmp_path / str(tied), report)
        restored = AutoModelForCausalLM.from_pretrained(tmp_path / str(tied))
        head, embedding = restored.lm_head, restored.model.embed_tokens
        assert type(head) is nn.Linear
        assert (head.weight is embedding.weight) == tied
        assert torch.equal(head.weight, model.lm_head.weight)


def test_saving_a_sharded_model_again_as_one_file(small, tmp_path):
    model, _ = small
    model.save_pretrained(tmp_path / "out", max_shard_size="50KB")
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert inspect_checkpoint(tmp_path / "out").layers
    assert_same_bits(hf.load(tmp_path / "out").state_dict(), model.state_dict())


def test_gradients_flow_after_loading(small):
    restored, ids = AutoModelForCausalLM.from_pretrained(small[1]), tiny_ids(2)
    restored(ids, labels=ids).loss.backward()
    for name, parameter in restored.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_loading_reads_each_header_once(small, tmp_path, monkeypatch):
    many, dense = tmp_path / "many", tmp_path / "dense"
    hf.load(small[1]).save_pretrained(many, max_shard_size="50KB")
    tiny_model().save_pretrained(dense)
    opened = []

    def counting(file, framework):
        opened.append(file.name)
        return safe_open(file, framework=framework)

    monkeypatch.setattr(checkpoint, "safe_open", counting)
    for directory in (small[1], many, dense):
        hf.load(directory)
        assert sorted(opened) == sorted(p.name for p in directory.glob("*.safetensors"))
        opened.clear()


class Work(TorchDispatchMode):
    """Keep the name of each operator that touches a matrix's values, and the matrix's."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = args[0] if args else None
        is_value = isinstance(given, torch.Tensor) and not given.is_meta and given.dim() == 2
        if is_value and not func.is_view and given.numel():
            self.calls.append((func.overloadpacket.__name__, given.data_ptr()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("load", LOADERS)
def test_loading_reads_each_matrix_once_and_copies_none(small, load):
    with Work() as work:
        loaded = load(small[1])
    matrices = [p.data_ptr() for p in loaded.parameters() if p.dim() == 2]
    sums = [pointer for name, pointer in work.calls if name == "sum"]
    assert set(matrices) <= set(sums)
    assert len(sums) == len(set(sums)), "a matrix is read twice"
    assert {name for name, _ in work.calls} <= {"sum", "detach"}
