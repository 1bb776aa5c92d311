"""Checkpoints with factors in one byte: what is done with them, and what does not fit is refused.

That every bit survives is tested in test_round_trip.
"""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from quantized import swap_quantized_
from stored import assert_same_bits, config_of, edit_record, edit_tensors, refused
from tiny import tiny_ids, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

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
)
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.compress.record import low_rank_layers
from neuronmm_ops.hf import saving
from neuronmm_ops.hf.computing import cast_, computing_in
from neuronmm_ops.storages import STORAGES, dtype_name, factor_bytes

MLP = ("gate_proj", "up_proj", "down_proj")
NAME = "model.layers.0.mlp.gate_proj"
LOADERS = (hf.load, AutoModelForCausalLM.from_pretrained)
READERS = (*LOADERS, inspect_checkpoint)
STORED = pytest.mark.parametrize("storage", STORAGES)


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


def factors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    ends = (".u", ".v", ".u_scale", ".v_scale")
    return {name: t.clone() for name, t in model.state_dict().items() if name.endswith(ends)}


@pytest.fixture(scope="module", params=STORAGES)
def saved(request, tmp_path_factory):
    """A storage, a model with factors in it, and the checkpoint of this."""
    model = one_byte(request.param)
    directory = tmp_path_factory.mktemp(request.param) / "out"
    hf.save(model, directory)
    return request.param, model, directory


@pytest.fixture
def checkpoint(saved, tmp_path):
    storage, _, directory = saved
    return storage, Path(shutil.copytree(directory, tmp_path / "copy"))


def flip(name: str):
    """The edit that changes one bit of a tensor of the layer."""
    return lambda tensors: tensors[f"{NAME}.{name}"].view(torch.uint8)[0].bitwise_xor_(1)


def test_verifying_sees_a_bit_of_a_scale(saved, tmp_path, monkeypatch):
    write = saving._save_pretrained

    def broken(self, directory, **options):
        write(self, directory, **options)
        edit_tensors(directory, flip("v_scale"))

    monkeypatch.setattr(saving, "_save_pretrained", broken)
    with pytest.raises(CheckpointError, match=rf"removed: {NAME}\.v_scale differs"):
        hf.save(saved[1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the record


def test_what_the_record_says(saved):
    storage, model, directory = saved
    layers = config_of(directory)["quantization_config"]["layers"]
    layer = next(x for x in layers if x["name"] == NAME)
    assert layer["storage"] == dtype_name(storage)
    assert layer["bytes"] == factor_bytes(64, 176, 8, 2, storage)
    assert layer["dense_bytes"] == 64 * 176 * 2
    report = inspect_checkpoint(directory)
    assert {layer.storage for layer in report.layers} == {storage}
    module = low_rank_layers(model)[NAME]
    tensors = (module.u, module.v, module.u_scale, module.v_scale)
    found = next(x for x in report.layers if x.name == NAME)
    assert found.bytes == sum(t.nbytes for t in tensors)
    assert found.bits_per_weight == 8 * found.bytes / (64 * 176)


def test_records_without_storage_are_read(tmp_path):
    model = tiny_model()
    name = "model.layers.1.self_attn.q_proj"
    swap_(model, {name: factorize(model.get_submodule(name).weight, "plain").truncate(8)})
    model.save_pretrained(tmp_path)
    edit_record(tmp_path, lambda r: [r["layers"][0].pop(key) for key in ("storage", "compute")])
    assert hf.load(tmp_path).model.layers[1].self_attn.q_proj.storage is None
    assert inspect_checkpoint(tmp_path).layers[0].storage is None


def test_compute_survives_saving(tmp_path):
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
    hf.save(restored, tmp_path / "back")
    assert torch.equal(hf.load(tmp_path / "back")(tiny_ids(1)).logits, x)


def test_compute_needs_fp8():
    for model in (one_byte("int8"), tiny_model()):
        with pytest.raises(ValueError, match="compute fp8 needs layers stored in float8_e4"):
            set_compute_(model, "fp8")
        set_compute_(model, "x")
    with pytest.raises(ValueError, match="compute must be one of x, fp8; got 'int8'"):
        set_compute_(tiny_model(), "int8")


# --- what is refused


def tensor(name: str, change):
    """The edit of one tensor of the layer; None takes it away."""

    def edit(tensors):
        found = change(tensors.pop(f"{NAME}.{name}"))
        if found is not None:
            tensors[f"{NAME}.{name}"] = found

    return edit


def entries(**fields: object):
    """The edit of every layer's entry of the record."""
    return lambda record: [layer.update(fields) for layer in record["layers"]]


ASKS = f"{NAME}.{{}}: config.json asks for {{}}, the file has {{}}"
STORAGE = "storage must be float8_e4m3fn or int8 or int4, or null; got "
COMPUTE = "compute must be x, or fp8 with numbers in float8_e4m3fn"
# What is changed, and what is said; {} is how a header names the storage.
IN_TENSORS = {
    "dtype": (tensor("u", Tensor.bfloat16), ASKS.format("u", "{}", "BF16")),
    **{
        f"{name}, {what}": (tensor(name, change), f"{NAME}.{name}: config.json asks for", *said)
        for name, size in (("u_scale", 8), ("v_scale", 176))
        for what, change, said in (
            ("short", lambda scale: scale[..., :-1], (f"{size}], the file has", f"{size - 1}]")),
            ("dtype", Tensor.bfloat16, ("F32, the file has BF16",)),
            ("none", lambda scale: None, (f"{size}], the file has none",)),
        )
    },
}
IN_RECORD = [
    ({"storage": "fp8"}, f"{STORAGE}'fp8'"),
    ({"storage": 3}, f"{STORAGE}3"),
    ({"storage": ["int8"]}, f"{STORAGE}['int8']"),
    ({"compute": "int8"}, COMPUTE),
    ({"storage": "int8", "compute": "fp8"}, COMPUTE),
    ({"compute": None}, COMPUTE),
]


@pytest.mark.parametrize("case", IN_TENSORS)
def test_tensors_that_do_not_fit_the_record(checkpoint, case):
    (storage, directory), (edit, *words) = checkpoint, IN_TENSORS[case]
    edit_tensors(directory, edit)
    written = STORAGES[storage].header
    refused(directory, *[word.replace("{}", written) for word in words], by=READERS)


@pytest.mark.parametrize(("fields", "words"), IN_RECORD)
def test_malformed_storage(checkpoint, fields, words):
    edit_record(checkpoint[1], entries(**fields))
    words = "quantization_config is malformed: ", words
    refused(checkpoint[1], *words, by=READERS)


def test_a_record_of_another_storage_or_of_none(checkpoint):
    storage, directory = checkpoint
    other = "fp8" if storage == "int8" else "int8"
    edit_record(directory, entries(storage=dtype_name(other)))
    words = ": config.json asks for", "config and weights are not of"
    refused(directory, *words, by=READERS)
    edit_record(directory, lambda record: [layer.pop("storage") for layer in record["layers"]])
    wanted = "[64, 8]" if storage == "int4" else "F64 or F32 or F16 or BF16"
    refused(directory, f".u: config.json asks for {wanted}, the file", by=READERS)


def test_a_record_of_dense_layers_in_one_byte(checkpoint):
    edit_record(checkpoint[1], entries(r=None, dense=True))
    refused(checkpoint[1], "w: config.json asks for [", "the file has none", by=READERS)


def test_floats_where_the_record_or_the_scales_are_of_one_byte(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    layer = SVDLinear.from_linear(model.get_submodule(NAME), 8)
    swap_(model, {NAME: (layer.u.detach(), layer.v.detach())})
    for name in ("record", "scales"):
        hf.save(model, tmp_path / name)
    edit_record(tmp_path / "record", entries(storage="int8"))
    edit_tensors(tmp_path / "scales", lambda t: t.update({f"{NAME}.u_scale": torch.ones(8)}))
    refused(tmp_path / "record", ASKS.format("u", "I8", "BF16"), by=READERS)
    words = f"{NAME}.u_scale: the file has scales, config.json says"
    refused(tmp_path / "scales", words, by=READERS)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be(checkpoint, value):
    edit_tensors(checkpoint[1], lambda tensors: tensors[f"{NAME}.u_scale"][..., 3].fill_(value))
    words = f"{NAME}: u_scale must be [", f"got {value} at 3", "copy the"
    refused(checkpoint[1], *words, by=LOADERS)


def test_values_that_cannot_be(checkpoint):
    storage, directory = checkpoint
    code, words = {
        "fp8": (0x7F, "magnitude of nan"),
        "int8": (0x80, "got -128"),
        "int4": (0x0F, "got -8"),
    }[storage]
    v = f"{NAME}.v"
    edit_tensors(directory, lambda tensors: tensors[v].view(torch.uint8)[1, 1].fill_(code))
    refused(directory, f"{NAME}: v must be in", words, by=LOADERS)


def test_saving_bad_values_is_refused(tmp_path):
    model = one_byte("int8")
    low_rank_layers(model)[NAME].u_scale.fill_(-1)
    with pytest.raises(CheckpointError, match=rf"{NAME}: u_scale must be .* got -1.0 at 0"):
        hf.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what is done with them


@STORED
def test_casting_a_model_for_computing(storage):
    model = one_byte(storage)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = factors_of(model)
    with computing_in(model, torch.float32):
        assert model(tiny_ids(1)).logits.dtype == torch.float32
        assert_same_bits(factors_of(model), before)
    assert_same_bits(model.state_dict(), state)
    cast_(model, torch.float16)
    assert model(tiny_ids(1)).logits.dtype == torch.float16
    assert_same_bits(factors_of(model), before)


@STORED
@pytest.mark.parametrize("method", ["kfac", "drift"])
def test_other_layers_are_compressed_around_them(storage, method, tmp_path):
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
    assert_same_bits(restored.state_dict(), model.state_dict())
    after = model.state_dict()
    assert_same_bits({name: after[name] for name in before}, before)


# --- adapters


@STORED
def test_lora_beside_the_factors(storage, tmp_path):
    peft = pytest.importorskip("peft")
    model = one_byte(storage, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = list(low_rank_layers(model))
    config = hf.lora_config(model, r=4)
    assert config.target_parameters is None
    assert {*names, "model.layers.0.self_attn.k_proj"} < set(config.target_modules)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted(tiny_ids(2), labels=tiny_ids(2)).loss.backward()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().sum()) > 0, name
        else:
            assert parameter.grad is None, name
    logits = adapted(tiny_ids(1)).logits
    with pytest.raises(ValueError, match=r"cannot be merged into numbers in one byte.*to_pairs"):
        adapted.merge_adapter()
    torch.testing.assert_close(adapted(tiny_ids(1)).logits, logits)  # dense layers may be merged
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already unmerged", UserWarning)
        adapted.unmerge_adapter()

    adapted.save_pretrained(tmp_path / "adapter")
    again = one_byte(storage, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(
        again, tmp_path / "adapter", config=hf.lora_config(again, r=4)
    )
    assert torch.equal(loaded(tiny_ids(1)).logits, adapted(tiny_ids(1)).logits)
    assert_same_bits(loaded.unload().state_dict(), before)


@STORED
def test_pairs_are_in_the_models_dtype(storage, tmp_path):
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
