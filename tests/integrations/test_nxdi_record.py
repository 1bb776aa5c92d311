"""Options of NxD Inference that do not go with low-rank layers are refused, a line each."""

from types import SimpleNamespace
from typing import Any

import pytest
from nxdi_checkpoints import make
from nxdi_stand_ins import InferenceConfig, NeuronConfig

from neuronmm_ops.compress.record import record_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.integrations.nxdi.record import (
    OptionError,
    check_options,
    divide_of,
    low_rank_layers,
)

ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))


def config(*names: str, fields: dict[str, Any] | None = None, **options: Any) -> Any:
    """A config whose record lists those layers of layer 0."""
    layers = tuple(
        LayerReport(f"model.layers.0.{name}", 64, 64, 24, False, None, None, 1, 1)
        for name in names or (*ATTENTION, *MLP)
    )
    record = record_of(CompressionReport(None, layers, None, {}))
    known = {"quantization_config": record, "intermediate_size": 176, **(fields or {})}
    known = {"num_attention_heads": 6, "num_key_value_heads": 6, **known}
    return InferenceConfig(NeuronConfig(**options), **known)


@pytest.mark.parametrize(
    ("names", "option", "value"),
    [
        (ATTENTION, "qkv_kernel_enabled", True),
        (ATTENTION, "qkv_nki_kernel_enabled", True),
        (ATTENTION, "qkv_kernel_fuse_residual_add", True),
        (ATTENTION[3:], "out_proj_kernel_enabled", True),
        (ATTENTION[:1], "attn_block_tkg_nki_kernel_enabled", True),
        (MLP, "mlp_kernel_enabled", True),
        (MLP[2:], "quantized_mlp_kernel_enabled", True),
        (MLP, "quantized", True),
        (MLP, "activation_quantization_type", "dynamic"),
        (MLP, "cp_degree", 2),
        (MLP, "mlp_cp_degree", 2),
        (MLP, "attention_dp_degree", 2),
        (MLP, "is_eagle_draft", True),
        (MLP, "padded_hidden_size", 128),
        (ATTENTION[:2], "fused_qkv", True),
    ],
)
def test_an_option_is_refused_in_one_line(names, option, value):
    with pytest.raises(OptionError) as refused:
        check_options(config(*names, **{option: value}))
    message = str(refused.value)
    assert option in message
    assert "\n" not in message
    # The rule, what was seen, and the remedy.
    assert ", got " in message
    assert "; " in message
    check_options(config(*names))


def test_kernels_of_what_stays_dense_are_allowed():
    check_options(config(*MLP, qkv_kernel_enabled=True, out_proj_kernel_enabled=True))
    check_options(config(*ATTENTION, mlp_kernel_enabled=True))
    dense = config(fields={"quantization_config": None}, mlp_kernel_enabled=True, cp_degree=2)
    check_options(dense)


def test_sequence_parallelism_needs_whole_second_factors():
    options = {"sequence_parallel_enabled": True, "tp_degree": 8}
    with pytest.raises(OptionError, match=r"needs neuronmm_divide = one, got both; .*--divide one"):
        check_options(config(**options))
    check_options(config(fields={"neuronmm_divide": "one"}, **options))


def test_a_sliding_window_needs_a_longer_graph():
    window = {"sliding_window": 4096}
    with pytest.raises(OptionError, match=r"seq_len must be over 512 .* got 512 and sliding_windo"):
        check_options(config(fields=window, seq_len=512))
    check_options(config(fields=window, seq_len=1024))
    check_options(config(fields=window, on_cpu=True))
    check_options(config(fields={"sliding_window": None}))


def test_adapters_of_a_low_rank_layer_are_refused():
    lora = SimpleNamespace(target_modules=["q_proj", "down_proj"])
    with pytest.raises(OptionError, match="got target_modules with down_proj; "):
        check_options(config(*MLP, lora_config=lora))
    check_options(config(*ATTENTION[1:], lora_config=lora))
    check_options(config(*MLP, lora_config=SimpleNamespace(target_modules=None)))


def test_biases_on_a_side_that_tp_does_not_divide_are_refused():
    fields = {"mlp_bias": True}
    with pytest.raises(OptionError, match=r"must divide intermediate_size .* got 3 and 176; "):
        check_options(config(fields=fields, tp_degree=3))
    check_options(config(fields=fields, tp_degree=4))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "is_taken"),
    [(6, 3, 2, False), (6, 2, 4, True), (6, 6, 4, True), (8, 8, 3, True), (8, 4, 2, True)],
)
def test_key_value_heads_must_fit(heads, kv_heads, tp, is_taken):
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if is_taken:
        check_options(config(fields=fields, tp_degree=tp))
        return
    with pytest.raises(OptionError, match=r"or be a multiple of them, got 3 and tp = 2; use"):
        check_options(config(fields=fields, tp_degree=tp))


@pytest.mark.parametrize(
    ("theta", "scaling"), [(10000.0, "default"), (None, "default"), (5000.0, "llama3")]
)
def test_a_config_of_transformers_5_is_refused(theta, scaling):
    fields = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": scaling}}
    fields["rope_theta"] = theta
    with pytest.raises(OptionError, match="run: neuronmm export nxdi DIR -o OUT"):
        check_options(config(fields=fields))


def test_a_config_of_transformers_5_that_means_the_same_is_taken():
    rope = {"rope_theta": 5000.0, "rope_type": "default"}
    check_options(config(fields={"rope_parameters": rope, "rope_theta": 5000.0}))


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.fc1"])
def test_a_low_rank_layer_that_is_no_projection_is_refused(name):
    layer = LayerReport(name, 64, 260, 24, False, None, None, 1, 1)
    record = record_of(CompressionReport(None, (layer,), None, {}))
    with pytest.raises(CheckpointError, match=f"got {name}; compress again"):
        low_rank_layers(config(fields={"quantization_config": record}))


def test_a_newer_format_is_refused():
    record = {**config().quantization_config, "format_version": 2}
    with pytest.raises(CheckpointError, match="format_version must be 1, got 2"):
        check_options(config(fields={"quantization_config": record}))


def test_dense_entries_and_other_quantizers_are_no_low_rank_layers(tmp_path):
    assert low_rank_layers(config(fields={"quantization_config": {"quant_method": "fp8"}})) == {}
    assert low_rank_layers(SimpleNamespace()) == {}
    make(tmp_path / "made")
    assert set(low_rank_layers(config())) == {f"layers.0.{name}" for name in (*ATTENTION, *MLP)}


@pytest.mark.parametrize(
    ("fields", "tp", "divide"),
    [({}, 1, "one"), ({}, 2, "both"), ({"neuronmm_divide": "one"}, 2, "one")],
)
def test_what_is_divided(fields, tp, divide):
    assert divide_of(config(fields=fields, tp_degree=tp)) == divide
    with pytest.raises(ValueError, match="must be one or both, got 'two'"):
        divide_of(config(fields={"neuronmm_divide": "two"}, tp_degree=tp))
