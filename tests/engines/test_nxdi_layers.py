"""Ranks with low-rank layers of NxD Inference equal one process, on stand-ins of its classes."""

import json
from pathlib import Path
from typing import Any

import nxdi_stand_ins as stand_ins
import pytest
import ranks
import torch
from nxdi_checkpoints import ATTENTION, RANKS, dense_weights, make
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from neuronmm_ops.engines.nxdi import causal_lm

MIXED = ("0.self_attn.k_proj", "1.mlp.up_proj", "0.mlp.down_proj", "1.self_attn.o_proj")


pytestmark = pytest.mark.usefixtures("nxd")
ranks.PRELOADED += ["nxdi_checkpoints", "nxdi_stand_ins", "neuronmm_ops.engines.nxdi"]


def config_of(directory: Path, options: dict[str, Any], **overrides: Any) -> Any:
    fields = json.loads((directory / "config.json").read_text())
    fields["rope_theta"] = fields["rope_parameters"]["rope_theta"]  # as an export has it
    neuron_config = stand_ins.NeuronConfig(**{"torch_dtype": torch.float32, **options})
    return stand_ins.InferenceConfig(neuron_config, **{**fields, **overrides})


def loaded(directory: Path, config: Any, rank: int = 0) -> Any:
    """The model of a rank, with its part of the weights."""
    family = causal_lm(config.model_type)
    family(str(directory), config)  # checks the options
    model, dtype = family._model_cls(config), config.neuron_config.torch_dtype
    state = family.get_state_dict(str(directory), config)
    # As the engines do: optimum-neuron casts one-byte floats, too.
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    model.to(dtype)
    stand_ins.shard(model, state, rank)
    return model


def on_rank(
    rank: int, directory: Path, xs: list[Tensor], options: dict[str, Any], overrides: dict[str, Any]
) -> tuple[list[Tensor], list[str]]:
    """Run the model on a rank; its results, and the collectives of the last."""
    stand_ins.install()
    model = loaded(directory, config_of(directory, options, **overrides), rank)
    found: list[Tensor] = []
    for x in xs:
        stand_ins.CALLS.clear()
        if options.get("sequence_parallel_enabled"):
            x = x.chunk(options["tp_degree"], 1)[rank].contiguous()
        with torch.no_grad():
            found.append(model(x))
    return found, stand_ins.CALLS


def expected(directory: Path, x: Tensor, act: Any = F.silu) -> Tensor:
    """What plain torch makes of the checkpoint, in double precision."""
    config = json.loads((directory / "config.json").read_text())
    state = dense_weights(load_file(directory / "model.safetensors"))
    weights = {name.removeprefix("model."): tensor.double() for name, tensor in state.items()}
    d = config["head_dim"]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = x.double()
    for index in range(config["num_hidden_layers"]):
        attention, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
        query, key, value = (
            linear(f"{attention}.{name}", x).unflatten(-1, (-1, d)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + linear(f"{attention}.o_proj", found.transpose(1, 2).flatten(2))
        inner = act(linear(f"{mlp}.gate_proj", x)) * linear(f"{mlp}.up_proj", x)
        x = x + linear(f"{mlp}.down_proj", inner)
    return x


def inputs() -> list[Tensor]:
    """A prompt of 8 tokens and a step of one, of two sequences."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, length, 64, generator=generator) for length in (8, 1)]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5 * float(wanted.std()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "made", "options", "overrides"),
    [
        (2, {}, {}, {}),
        (2, {}, {}, {"neuronmm_divide": "one"}),
        (2, {"dense": MIXED, "model_type": "qwen3"}, {}, {}),
        (2, {"dense": MIXED}, {}, {"neuronmm_divide": "one"}),
        (2, {"attention_bias": True, "mlp_bias": True}, {}, {}),
        (2, {}, {"fused_qkv": True}, {}),
        (4, {"num_key_value_heads": 4}, {}, {}),
        (3, {"num_attention_heads": 6, "num_key_value_heads": 3}, {}, {}),
        (2, {"dense": MIXED}, {"fused_qkv": True}, {}),
        (2, {"storage": "int8", "dense": MIXED, "attention_bias": True}, {}, {}),
        (2, {"storage": "fp8"}, {}, {"neuronmm_divide": "one"}),
        # 4 heads become 6, in one byte and with scales.
        (3, {"num_key_value_heads": 4, "storage": "fp8"}, {}, {}),
        # 6 heads become 8.
        (4, {"num_attention_heads": 6, "num_key_value_heads": 6}, {}, {}),
    ],
    ids=str,
)
def test_ranks_together_equal_one_process(tp, made, options, overrides, tmp_path):
    directory = make(tmp_path / "checkpoint", **made)
    options = {**options, "tp_degree": tp}
    results = ranks.run(on_rank, tp, directory, inputs(), options, overrides)
    for results_of_rank, _ in results:
        for found, x in zip(results_of_rank, inputs(), strict=True):
            close(found, expected(directory, x))


@pytest.mark.slow
def test_sequence_parallel_ranks_have_their_tokens(tmp_path):
    directory, x = make(tmp_path / "checkpoint", attention_bias=True, mlp_bias=True), inputs()[:1]
    options = {"tp_degree": 2, "sequence_parallel_enabled": True}
    results = ranks.run(on_rank, 2, directory, x, options, {"neuronmm_divide": "one"})
    close(torch.cat([found[0] for found, _ in results], 1), expected(directory, x[0]))


@pytest.mark.slow
@pytest.mark.parametrize("divide", ["both", "one"])
def test_ranks_exchange_the_narrow_products(divide, tmp_path):
    directory = make(tmp_path / "checkpoint", num_hidden_layers=1)
    overrides = {"neuronmm_divide": divide}
    results = ranks.run(on_rank, 2, directory, inputs()[1:], {"tp_degree": 2}, overrides)
    qkv, gate_up = 15 + 9 + 12, 19 + 13  # halves of the ranks
    sums = [f"all_reduce {RANKS['o_proj']}", f"all_reduce {RANKS['down_proj']}"]
    # One gather of the columns together, and of a half of each row's result.
    gathers = [f"all_gather {width}" for width in (qkv, 32, gate_up, 32)]
    whole = [gathers[0], sums[0], gathers[1], gathers[2], sums[1], gathers[3]]
    assert results[0][1] == (sums if divide == "one" else whole)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("made", [{}, {"dense": MIXED}, {"model_type": "qwen3"}], ids=str)
def test_one_rank_exchanges_nothing_but_what_nxd_always_calls(made, fused, tmp_path):
    directory = make(tmp_path / "checkpoint", **made)
    model = loaded(directory, config_of(directory, {"fused_qkv": fused}))
    for x in inputs():
        close(model(x), expected(directory, x))
    assert {call.split()[0] for call in stand_ins.CALLS} <= {"all_reduce"}


@pytest.mark.parametrize("storage", ["fp8", "int8"])
@pytest.mark.parametrize("dense", [(), MIXED])
def test_one_byte_stays_one_byte(storage, dense, tmp_path):
    directory = make(tmp_path / "checkpoint", storage=storage, dense=dense, dtype=torch.bfloat16)
    model = loaded(directory, config_of(directory, {"torch_dtype": torch.bfloat16}))
    stored = load_file(directory / "model.safetensors")
    kept = {name: p for name, p in model.named_parameters() if p.itemsize == 1}
    assert len(kept) == sum(tensor.itemsize == 1 for tensor in stored.values()) > 0
    assert {p.dtype for p in kept.values()} == {stored["model.layers.0.mlp.gate_proj.u"].dtype}
    for name in kept:
        assert model.get_parameter(f"{name}_scale").dtype == torch.float32
    found, wanted = model(inputs()[0].bfloat16()), expected(directory, inputs()[0].bfloat16())
    assert (found.double() - wanted).norm() < 0.02 * wanted.norm()


def test_an_activation_without_an_op_is_nxd_inferences_own(tmp_path):
    directory = make(tmp_path / "checkpoint", hidden_act="relu6")
    model = loaded(directory, config_of(directory, {}))
    close(model(inputs()[0]), expected(directory, inputs()[0], F.relu6))


def test_a_model_that_is_not_compressed_is_nxd_inferences_own(tmp_path):
    directory = make(tmp_path / "checkpoint", dense=tuple(RANKS)[:-1])
    config = config_of(directory, {}, quantization_config=None)
    model = causal_lm("llama")._model_cls(config)
    assert type(model.layers[0].mlp) is stand_ins.NeuronLlamaMLP


def test_adapters_reach_the_dense_members_alone(tmp_path):
    directory = make(tmp_path / "checkpoint", dense=("mlp.up_proj",))
    lora = type("Lora", (), {"target_modules": ["up_proj"]})()
    model = loaded(directory, config_of(directory, {"lora_config": lora}))
    mlp, x = model.layers[0].mlp, inputs()[1]
    plain = mlp(x)[0]
    mlp.up_proj = stand_ins.MultiLoraModule(mlp.up_proj)
    with_adapter, residual = mlp(x, None, None, torch.tensor(0.5))
    assert residual is None
    assert not torch.equal(plain, with_adapter)
    torch.testing.assert_close(mlp(x, adapter_ids=torch.tensor(0.0))[0], plain)


def test_two_models_in_one_process_keep_their_weights(tmp_path):
    first = make(tmp_path / "first")
    second = make(tmp_path / "second", rms_norm_eps=1e-5, dense=("q_proj",))
    paths, x = (first, second, first), inputs()[0]
    models = [loaded(path, config_of(path, {})) for path in paths]
    for model, path in zip(models, paths, strict=True):
        close(model(x), expected(path, x))


def test_a_dtype_of_two_bytes(tmp_path):
    directory = make(tmp_path / "checkpoint", dtype=torch.bfloat16, dense=ATTENTION)
    model = loaded(directory, config_of(directory, {"torch_dtype": torch.bfloat16}))
    found = model(inputs()[0].bfloat16())
    assert found.dtype == torch.bfloat16
    wanted = expected(directory, inputs()[0].bfloat16())
    assert (found.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("divide", ["both", "one"])
@pytest.mark.parametrize("dense", [(), MIXED])
def test_one_model_shards_the_weights_of_all_ranks(tmp_path, monkeypatch, divide, dense):
    """As NxD's ModelBuilder does, whose model is that of rank 0, without values."""
    tp = 4
    monkeypatch.setattr(type(stand_ins.GROUP), "size", lambda _: tp)
    directory = make(tmp_path / "checkpoint", dense=dense)
    config = config_of(directory, {"tp_degree": tp}, neuronmm_divide=divide)
    family = causal_lm(config.model_type)
    state = family.get_state_dict(str(directory), config)
    shards = stand_ins.shard_checkpoint(lambda: family._model_cls(config), state, tp)
    for rank, own in enumerate(shards):
        monkeypatch.setattr(type(stand_ins.GROUP), "rank", lambda _, rank=rank: rank)
        expected = loaded(directory, config, rank).state_dict()
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) for name in own)
    assert any(not torch.equal(shards[0][name], shards[1][name]) for name in shards[0])
