"""Checkpoints with factors in one byte: every bit survives, and what does not fit is refused."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import swap_quantized_
from safetensors.torch import load_file, save_file
from tiny import tiny_ids, tiny_model, tiny_tokenizer
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from neuronmm_ops import (
    CalibrationWarning,
    CheckpointError,
    SVDConfig,
    SVDLinear,
    compress_,
    factorize,
    hf,
    set_compute_,
    swap_,
    token_perplexity,
)
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.compress.record import attached_report, low_rank_layers
from neuronmm_ops.hf import saving
from neuronmm_ops.hf.computing import cast_, computing_in
from neuronmm_ops.manifest import tensor_hashes
from neuronmm_ops.nn import SVDMLP
from neuronmm_ops.recover import RecoverConfig
from neuronmm_ops.storages import STORAGES, dtype_name

MLP = ("gate_proj", "up_proj", "down_proj")
NAME = "model.layers.0.mlp.gate_proj"
STORED = pytest.mark.parametrize("storage", ["fp8", "int8"])


def one_byte(
    storage: str,
    ends: tuple[str, ...] = (*MLP, "q_proj"),
    family: str = "qwen2",
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """Return a tiny model with low-rank layers in one byte; Qwen2's q has a bias."""
    model = tiny_model(family, dtype)
    swap_quantized_(model, storage, *ends)
    return model


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def assert_same_bits(model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def factors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    ends = (".u", ".v", ".u_scale", ".v_scale")
    return {name: t.clone() for name, t in model.state_dict().items() if name.endswith(ends)}


@pytest.fixture(scope="module", params=["fp8", "int8"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PreTrainedModel, Path]:
    model = one_byte(request.param)
    directory = tmp_path_factory.mktemp(request.param) / "out"
    hf.save(model, directory, tokenizer=tiny_tokenizer())
    return request.param, model, directory


# --- there and back


def test_round_trip(saved: tuple[str, PreTrainedModel, Path]) -> None:
    storage, model, directory = saved
    for load in (hf.load, AutoModelForCausalLM.from_pretrained):
        restored = load(directory)
        assert_same_bits(restored, model.state_dict())
        assert torch.equal(restored(tiny_ids(1)).logits, model(tiny_ids(1)).logits)
        assert isinstance(restored.model.layers[0].mlp, SVDMLP)
        for layer in low_rank_layers(restored).values():
            assert layer.storage == storage
            assert not layer.u.requires_grad
            assert not layer.v.requires_grad
            assert layer.u.is_contiguous()
            assert layer.v.is_contiguous()
    assert restored.dtype == torch.bfloat16
    assert restored.model.layers[0].self_attn.q_proj.bias.dtype == torch.bfloat16


FRESH_PROCESS = """
import hashlib, json, sys
import torch
from transformers import AutoModelForCausalLM
import neuronmm_ops.hf
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
state = {**model.state_dict(), "logits": model(torch.arange(24).view(1, 24)).logits}
digest = lambda t: hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
print(json.dumps({name: [str(t.dtype), digest(t)] for name, t in state.items()}))
"""


@pytest.mark.slow
def test_round_trip_in_a_fresh_process(saved: tuple[str, PreTrainedModel, Path]) -> None:
    _, model, directory = saved
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", FRESH_PROCESS, directory],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    state = {**model.state_dict(), "logits": model(torch.arange(24).view(1, 24)).logits}
    expected = {
        name: [str(t.dtype), hashlib.sha256(bits(t).numpy().tobytes()).hexdigest()]
        for name, t in state.items()
    }
    assert json.loads(result.stdout.splitlines()[-1]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_dtype_on_loading_is_of_the_rest(
    saved: tuple[str, PreTrainedModel, Path], dtype: torch.dtype
) -> None:
    _, model, directory = saved
    restored = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    before = factors_of(model)
    for name, tensor in restored.state_dict().items():
        if name in before:
            assert tensor.dtype == before[name].dtype
            assert torch.equal(bits(tensor), bits(before[name])), name
        else:
            assert tensor.dtype == dtype, name
    assert restored(tiny_ids(1)).logits.dtype == dtype
    assert restored.model.layers[0].mlp.up_proj.weight.dtype == dtype


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
def test_device_maps_and_offload(saved: tuple[str, PreTrainedModel, Path], tmp_path: Path) -> None:
    _, model, directory = saved
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
    assert not gate.u.requires_grad
    on_meta = AutoModelForCausalLM.from_pretrained(directory, device_map="meta")
    for name, tensor in model.state_dict().items():
        found = on_meta.state_dict()[name]
        assert (found.is_meta, found.shape, found.dtype) == (True, tensor.shape, tensor.dtype)


def test_shards_and_saving_again(saved: tuple[str, PreTrainedModel, Path], tmp_path: Path) -> None:
    _, model, directory = saved
    hf.load(directory).save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    hf.save(hf.load(tmp_path / "plain"), tmp_path / "saved", max_shard_size="20KB")
    for name in ("plain", "saved"):
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 3
        assert_same_bits(hf.load(tmp_path / name), model.state_dict())
        assert tensor_hashes(tmp_path / name) == tensor_hashes(directory)
    body = AutoModel.from_pretrained(directory)
    assert torch.equal(
        bits(body.layers[1].mlp.up_proj.u), bits(factors_of(model)["model.layers.1.mlp.up_proj.u"])
    )


@pytest.mark.parametrize("name", ["u", "u_scale"])
def test_the_hash_of_the_weights_sees_every_tensor(
    saved: tuple[str, PreTrainedModel, Path], tmp_path: Path, name: str
) -> None:
    _, _, directory = saved
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    tensors[f"{NAME}.{name}"].view(torch.uint8)[0] ^= 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert tensor_hashes(copy) != tensor_hashes(directory)


def test_verifying_sees_a_bit_of_a_scale(
    saved: tuple[str, PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, _ = saved
    write = saving._save_pretrained

    def broken(self: PreTrainedModel, directory: Path, **options: Any) -> None:
        write(self, directory, **options)
        tensors = load_file(directory / "model.safetensors")
        tensors[f"{NAME}.v_scale"].view(torch.uint8)[0] ^= 1
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(saving, "_save_pretrained", broken)
    with pytest.raises(CheckpointError, match=rf"removed: {NAME}\.v_scale differs"):
        hf.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the record


def test_what_the_record_says(saved: tuple[str, PreTrainedModel, Path]) -> None:
    storage, model, directory = saved
    config = json.loads((directory / "config.json").read_text())
    layer = next(x for x in config["quantization_config"]["layers"] if x["name"] == NAME)
    assert layer["storage"] == dtype_name(storage)
    assert layer["bytes"] == 8 * (64 + 176) + 4 * (8 + 176)
    assert layer["dense_bytes"] == 64 * 176 * 2
    report = inspect_checkpoint(directory)
    assert {layer.storage for layer in report.layers} == {storage}
    module = low_rank_layers(model)[NAME]
    tensors = (module.u, module.v, module.u_scale, module.v_scale)
    found = next(x for x in report.layers if x.name == NAME)
    assert found.bytes == sum(t.nbytes for t in tensors if t is not None)
    assert found.bits_per_weight == 8 * found.bytes / (64 * 176)


def test_storages_may_differ(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    swap_quantized_(model, "fp8", "gate_proj", "up_proj")
    swap_quantized_(model, "int8", "down_proj")
    hf.save(model, tmp_path / "out")
    restored = hf.load(tmp_path / "out")
    assert_same_bits(restored, model.state_dict())
    mlp = restored.model.layers[0].mlp
    assert [p.storage for p in (mlp.gate_proj, mlp.down_proj)] == ["fp8", "int8"]
    assert torch.equal(restored(tiny_ids(1)).logits, model(tiny_ids(1)).logits)


def test_records_without_storage_are_read(tmp_path: Path) -> None:
    model = tiny_model()
    name = "model.layers.1.self_attn.q_proj"
    swap_(model, {name: factorize(model.get_submodule(name).weight, "plain").truncate(8)})
    hf.save(model, tmp_path / "out")
    edit_layers(tmp_path / "out", lambda layer: [layer.pop(key) for key in ("storage", "compute")])
    assert hf.load(tmp_path / "out").model.layers[1].self_attn.q_proj.storage is None
    assert inspect_checkpoint(tmp_path / "out").layers[0].storage is None


def test_compute_survives_saving(tmp_path: Path) -> None:
    model = one_byte("fp8")
    x = model(tiny_ids(1)).logits
    set_compute_(model, "fp8")
    rounded = model(tiny_ids(1)).logits
    assert not torch.equal(x, rounded)
    torch.testing.assert_close(x, rounded, rtol=0.1, atol=0.1)
    model.save_pretrained(tmp_path / "plain")
    hf.save(model, tmp_path / "saved")
    for name in ("plain", "saved"):
        restored = hf.load(tmp_path / name)
        assert torch.equal(restored(tiny_ids(1)).logits, rounded)
        assert {layer.compute for layer in inspect_checkpoint(tmp_path / name).layers} == {"fp8"}
    set_compute_(restored, "x")
    assert torch.equal(restored(tiny_ids(1)).logits, x)
    hf.save(restored, tmp_path / "back")
    assert torch.equal(hf.load(tmp_path / "back")(tiny_ids(1)).logits, x)


def test_compute_needs_fp8() -> None:
    for model in (one_byte("int8"), tiny_model()):
        with pytest.raises(ValueError, match="compute fp8 needs layers with factors in float8_e4"):
            set_compute_(model, "fp8")
        set_compute_(model, "x")
    with pytest.raises(ValueError, match="compute must be one of x, fp8; got 'int8'"):
        set_compute_(tiny_model(), "int8")


# --- what is refused


def edit_layers(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for layer in config["quantization_config"]["layers"]:
        edit(layer)
    path.write_text(json.dumps(config))


def edit_tensor(directory: Path, name: str, edit: Callable[[Tensor], Tensor | None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensor = edit(tensors.pop(f"{NAME}.{name}"))
    if tensor is not None:
        tensors[f"{NAME}.{name}"] = tensor.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def checkpoint(saved: tuple[str, PreTrainedModel, Path], tmp_path: Path) -> tuple[str, Path]:
    storage, _, directory = saved
    return storage, Path(shutil.copytree(directory, tmp_path / "copy"))


def refused_by_headers(directory: Path, *words: str) -> None:
    for read in (hf.load, AutoModelForCausalLM.from_pretrained, inspect_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            read(directory)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


def refused_by_values(directory: Path, *words: str) -> None:
    for read in (hf.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError) as caught:
            read(directory)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)


def test_another_dtype_than_the_config_s(checkpoint: tuple[str, Path]) -> None:
    storage, directory = checkpoint
    written = {"fp8": "F8_E4M3", "int8": "I8"}[storage]
    edit_tensor(directory, "u", lambda u: u.bfloat16())
    refused_by_headers(directory, f"{NAME}.u: config.json asks for {written}, the file has BF16")


def test_the_other_one_byte(checkpoint: tuple[str, Path]) -> None:
    storage, directory = checkpoint
    other = {"fp8": "int8", "int8": "fp8"}[storage]
    edit_layers(directory, lambda layer: layer.update(storage=dtype_name(other)))
    refused_by_headers(directory, "u: config.json asks for", "config and weights are not of")


def test_a_config_that_says_nothing_of_storage(checkpoint: tuple[str, Path]) -> None:
    _, directory = checkpoint
    edit_layers(directory, lambda layer: layer.pop("storage"))
    refused_by_headers(directory, ".u: config.json asks for F64 or F32 or F16 or BF16, the file")


def test_a_config_that_speaks_of_storage_that_is_not_there(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    layer = SVDLinear.from_linear(model.get_submodule(NAME), 8)
    swap_(model, {NAME: (layer.u.detach(), layer.v.detach())})
    hf.save(model, tmp_path / "out")
    edit_layers(tmp_path / "out", lambda layer: layer.update(storage="int8"))
    refused_by_headers(tmp_path / "out", f"{NAME}.u: config.json asks for I8, the file has BF16")


@pytest.mark.parametrize("name", ["u_scale", "v_scale"])
def test_scales_that_are_missing_or_of_another_size(
    checkpoint: tuple[str, Path], name: str
) -> None:
    _, directory = checkpoint
    size = {"u_scale": 8, "v_scale": 176}[name]
    edit_tensor(directory, name, lambda scale: scale[:-1])
    refused_by_headers(directory, f"{NAME}.{name}: config.json asks for [{size}], the file has [")
    edit_tensor(directory, name, lambda scale: torch.ones(size).bfloat16())
    refused_by_headers(directory, f"{NAME}.{name}: config.json asks for F32, the file has BF16")
    edit_tensor(directory, name, lambda scale: None)
    refused_by_headers(directory, f"{NAME}.{name}: config.json asks for [{size}], the file has no")


def test_scales_of_floats(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    layer = SVDLinear.from_linear(model.get_submodule(NAME), 8)
    swap_(model, {NAME: (layer.u.detach(), layer.v.detach())})
    hf.save(model, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file) | {f"{NAME}.u_scale": torch.ones(8)}
    save_file(tensors, file, metadata={"format": "pt"})
    refused_by_headers(tmp_path / "out", f"{NAME}.u_scale: the file has scales, config.json says")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be(checkpoint: tuple[str, Path], value: float) -> None:
    _, directory = checkpoint

    def edit(scale: Tensor) -> Tensor:
        scale[3] = value
        return scale

    edit_tensor(directory, "u_scale", edit)
    refused_by_values(directory, f"{NAME}: u_scale must be [8]", f"got {value} at 3", "copy the")


def test_values_that_cannot_be(checkpoint: tuple[str, Path]) -> None:
    storage, directory = checkpoint
    code, words = {"fp8": (0x7F, "magnitude of nan"), "int8": (0x80, "got -128")}[storage]

    def edit(v: Tensor) -> Tensor:
        v.view(torch.uint8)[1, 1] = code
        return v

    edit_tensor(directory, "v", edit)
    refused_by_values(directory, f"{NAME}: v must be in", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"storage": "fp8"}, "storage must be float8_e4m3fn or int8, or null; got 'fp8'"),
        ({"storage": 3}, "storage must be float8_e4m3fn or int8, or null; got 3"),
        ({"storage": ["int8"]}, "storage must be float8_e4m3fn or int8, or null; got ['int8']"),
        ({"compute": "int8"}, "compute must be x, or fp8 with factors in float8_e4m3fn"),
        ({"storage": "int8", "compute": "fp8"}, "compute must be x, or fp8 with factors in flo"),
        ({"compute": None}, "compute must be x, or fp8 with"),
        ({"r": None, "dense": True}, "storage is of factors, and must be null for a dense layer"),
    ],
)
def test_malformed_storage(
    checkpoint: tuple[str, Path], change: dict[str, Any], words: str
) -> None:
    _, directory = checkpoint
    edit_layers(directory, lambda layer: layer.update(change))
    refused_by_headers(directory, "quantization_config is malformed: ", words)


@STORED
def test_foreign_weights_in_one_byte_are_still_refused(storage: str, tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].to(STORAGES[storage].torch_dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{NAME}\.weight is .* no quantization_config"):
        hf.load(tmp_path / "dense")


def test_a_dense_weight_in_one_byte(checkpoint: tuple[str, Path]) -> None:
    _, directory = checkpoint
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, file, metadata={"format": "pt"})
    refused_by_headers(directory, f"{name} is I8 in", "has no quantization_config for it")


def test_saving_bad_values_is_refused(tmp_path: Path) -> None:
    model = one_byte("int8")
    low_rank_layers(model)[NAME].u_scale.fill_(-1)
    with pytest.raises(CheckpointError, match=rf"{NAME}: u_scale must be .* got -1.0 at 0"):
        hf.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_saving_a_layer_that_was_quantized_by_hand(tmp_path: Path) -> None:
    """The record is of the factors before; saving makes it anew from the layers, or refuses."""
    model = one_byte("int8")
    report = attached_report(model)
    with pytest.raises(ValueError, match="report must list exactly the model's SVDLinears"):
        hf.save(one_byte("fp8"), tmp_path / "out", report)


# --- what is done with them


@STORED
def test_casting_a_model_for_computing(storage: str) -> None:
    model = one_byte(storage)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with computing_in(model, torch.float32):
        assert model(tiny_ids(1)).logits.dtype == torch.float32
        assert all(torch.equal(bits(state[n]), bits(t)) for n, t in factors_of(model).items())
    assert_same_bits(model, state)
    cast_(model, torch.float16)
    assert model(tiny_ids(1)).logits.dtype == torch.float16
    assert all(torch.equal(bits(state[n]), bits(t)) for n, t in factors_of(model).items())


def test_computing_dtypes_of_a_checkpoint(saved: tuple[str, PreTrainedModel, Path]) -> None:
    _, model, directory = saved
    loaded = hf.load_computing(directory, "float32")
    assert loaded(tiny_ids(1)).logits.dtype == torch.float32
    before = factors_of(model)
    assert all(torch.equal(bits(before[n]), bits(t)) for n, t in factors_of(loaded).items())
    ids = tiny_ids(4)
    found = [token_perplexity(m, ids.flatten(), seqlen=24).ppl_token for m in (model, loaded)]
    assert found[1] == pytest.approx(found[0], rel=0.05)


def test_generating(saved: tuple[str, PreTrainedModel, Path]) -> None:
    _, model, directory = saved
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256}
    expected = model.generate(tiny_ids(1, 8), **arguments)
    assert torch.equal(expected, hf.load(directory).generate(tiny_ids(1, 8), **arguments))


@STORED
@pytest.mark.parametrize("method", ["kfac", "drift"])
def test_other_layers_are_compressed_around_them(storage: str, method: str, tmp_path: Path) -> None:
    model = one_byte(storage, MLP, dtype=torch.float32)
    before = factors_of(model)
    config = SVDConfig(ratio=0.3, block=8, targets="attention", method=method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        report = compress_(model, config, [tiny_ids()])
    assert all(layer.storage is None for layer in report.layers)
    hf.save(model, tmp_path / "out")
    found = {layer.storage for layer in inspect_checkpoint(tmp_path / "out").layers if layer.r}
    assert found == {None, storage}
    restored = hf.load(tmp_path / "out")
    assert_same_bits(restored, model.state_dict())
    assert all(torch.equal(bits(tensor), bits(before[n])) for n, tensor in before.items())


def test_casting_a_loaded_model(saved: tuple[str, PreTrainedModel, Path]) -> None:
    _, model, directory = saved
    restored = hf.load(directory).half()
    assert restored(tiny_ids(1)).logits.dtype == torch.float16
    before = factors_of(model)
    assert all(torch.equal(bits(before[n]), bits(t)) for n, t in factors_of(restored).items())


@pytest.mark.slow
@STORED
def test_a_model_compiles_to_one_node_an_op(storage: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = one_byte(storage, dtype=torch.float32)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for length in (12, 31):
            ids = tiny_ids(2, length)
            logits = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(logits, model(ids, use_cache=False).logits)
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    ops = [str(n.target) for n in counter.graphs[0].graph.nodes if "neuronmm" in str(n.target)]
    assert ops == ["neuronmm.xuv.default", "neuronmm.svd_mlp.default"] * 2


# --- adapters


def randomize_adapters(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)


@STORED
def test_lora_beside_the_factors(storage: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = one_byte(storage, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = list(low_rank_layers(model))
    config = hf.lora_config(model, r=4)
    assert config.target_parameters is None
    assert {*names, "model.layers.0.self_attn.k_proj"} < set(config.target_modules)
    adapted = peft.get_peft_model(model, config)
    randomize_adapters(adapted)
    adapted(tiny_ids(2), labels=tiny_ids(2)).loss.backward()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().sum()) > 0, name
        else:
            assert parameter.grad is None, name
    logits = adapted(tiny_ids(1)).logits
    with pytest.raises(ValueError, match=r"cannot be merged into factors in one byte.*to_pairs"):
        adapted.merge_adapter()
    torch.testing.assert_close(adapted(tiny_ids(1)).logits, logits)  # dense layers may be merged
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already unmerged", UserWarning)
        adapted.unmerge_adapter()

    adapted.save_pretrained(tmp_path / "adapter")
    again = tiny_model("qwen2", torch.float32)
    swap_quantized_(again, storage, *MLP, "q_proj")
    loaded = peft.PeftModel.from_pretrained(
        again, tmp_path / "adapter", config=hf.lora_config(again, r=4)
    )
    assert torch.equal(loaded(tiny_ids(1)).logits, adapted(tiny_ids(1)).logits)
    assert_same_bits(loaded.unload(), before)


@STORED
def test_gradients_pass_frozen_factors(storage: str) -> None:
    peft = pytest.importorskip("peft")
    model = one_byte(storage, dtype=torch.float32)
    config = peft.LoraConfig(target_modules=[r"model.layers.0.self_attn.k_proj"], r=4)
    adapted = peft.get_peft_model(model, config)
    adapted(tiny_ids(2), labels=tiny_ids(2)).loss.backward()
    grads = [p.grad for n, p in adapted.named_parameters() if "lora_B" in n]
    assert grads
    assert all(g is not None and float(g.abs().sum()) > 0 for g in grads)


@STORED
def test_pairs_are_in_the_models_dtype(storage: str, tmp_path: Path) -> None:
    model = one_byte(storage, dtype=torch.float32)
    logits = model(tiny_ids(1)).logits
    hf.to_pairs(model)
    torch.testing.assert_close(model(tiny_ids(1)).logits, logits, rtol=1e-3, atol=1e-4)
    model.save_pretrained(tmp_path / "pairs")
    hf.from_pairs(model)
    hf.save(model, tmp_path / "out")
    for name in ("pairs", "out"):
        restored = hf.load(tmp_path / name)
        torch.testing.assert_close(restored(tiny_ids(1)).logits, logits, rtol=1e-3, atol=1e-4)
        layer = inspect_checkpoint(tmp_path / name).layers[0]
        assert (layer.storage, layer.compute) == (None, "x")
        assert layer.bytes == layer.parameters * 4
    assert all(p.requires_grad for p in restored.parameters())


@pytest.mark.parametrize("method", ["distill", "lora"])
def test_recovery_is_refused(
    saved: tuple[str, PreTrainedModel, Path], method: str, tmp_path: Path
) -> None:
    found, _, directory = saved
    config = RecoverConfig(method=method, minutes=0.01)
    with pytest.raises(ValueError, match=rf"its factors are in one byte .*{dtype_name(found)}"):
        hf.recover(directory, "some text " * 99, tmp_path / "out", config)
    assert list(tmp_path.iterdir()) == []
