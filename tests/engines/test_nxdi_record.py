"""Options of NxD Inference that do not go with low-rank layers are refused, a line each."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nxdi_checkpoints import make
from nxdi_stand_ins import InferenceConfig, NeuronConfig

from neuronmm_ops.compress.record import record_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.engines.members import member_of
from neuronmm_ops.engines.nxdi.record import (
    OptionError,
    check_options,
    divide_of,
    named_layers,
    served_layers,
)
from neuronmm_ops.engines.places import ColumnSection, Shard
from neuronmm_ops.errors import CheckpointError

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


def heads(heads: int, kv_heads: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


def rope(theta: float | None, scaling: str) -> dict[str, Any]:
    parameters = {"rope_theta": 5000.0, "rope_type": scaling}
    return {"rope_parameters": parameters, "rope_theta": theta}


def lora(*modules: str) -> dict[str, Any]:
    return {"lora_config": SimpleNamespace(target_modules=list(modules) or None)}


WINDOW, BIAS = {"sliding_window": 4096}, {"mlp_bias": True}
SEQUENCE = {"sequence_parallel_enabled": True, "tp_degree": 8}
OPTIONS = [
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
]


@pytest.mark.parametrize(
    ("names", "fields", "options", "words"),
    [
        # The rule, what was seen, and the remedy.
        *(
            (names, {}, {option: value}, f"{option}.*, got .*; ")
            for names, option, value in OPTIONS
        ),
        ((), {}, SEQUENCE, r"needs neuronmm_divide = one, got both; .*--divide one"),
        ((), WINDOW, {"seq_len": 512}, r"must be over 512 .* got 512 and sliding_windo"),
        (MLP, {}, lora("q_proj", "down_proj"), "got target_modules with down_proj; "),
        ((), BIAS, {"tp_degree": 3}, r"must divide intermediate_size .* got 3 and 176; "),
        ((), heads(6, 3), {"tp_degree": 2}, r"or be a multiple of them, got 3 and tp = 2; use"),
        *(
            ((), rope(*given), {}, "run: neuronmm export nxdi DIR -o OUT")
            for given in ((10000.0, "default"), (None, "default"), (5000.0, "llama3"))
        ),
    ],
)
def test_what_does_not_go_with_served_layers_is_refused(names, fields, options, words):
    with pytest.raises(OptionError, match=words) as refused:
        check_options(config(*names, fields=fields, **options))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("names", "fields", "options"),
    [
        *((names, {}, {}) for names in {names: None for names, _, _ in OPTIONS}),
        # Kernels of what stays dense, and of dense models.
        (MLP, {}, {"qkv_kernel_enabled": True, "out_proj_kernel_enabled": True}),
        (ATTENTION, {}, {"mlp_kernel_enabled": True}),
        ((), {"quantization_config": None}, {"mlp_kernel_enabled": True, "cp_degree": 2}),
        ((), {"neuronmm_divide": "one"}, SEQUENCE),
        ((), WINDOW, {"seq_len": 1024}),
        ((), WINDOW, {"on_cpu": True}),
        ((), {"sliding_window": None}, {}),
        (ATTENTION[1:], {}, lora("q_proj", "down_proj")),
        (MLP, {}, lora()),
        ((), BIAS, {"tp_degree": 4}),
        *(
            ((), heads(*sizes), {"tp_degree": tp})
            for *sizes, tp in ((6, 2, 4), (6, 6, 4), (8, 8, 3), (8, 4, 2))
        ),
        # A config of Transformers 5 that means the same.
        ((), rope(5000.0, "default"), {}),
    ],
)
def test_what_goes_with_served_layers_is_taken(names, fields, options):
    check_options(config(*names, fields=fields, **options))


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "model.layers.0.mlp.fc1"])
def test_a_low_rank_layer_that_is_no_projection_is_refused(name):
    layer = LayerReport(name, 64, 260, 24, False, None, None, 1, 1)
    record = record_of(CompressionReport(None, (layer,), None, {}))
    with pytest.raises(CheckpointError, match=f"got {name}; compress again"):
        served_layers(config(fields={"quantization_config": record}))


def test_a_newer_format_is_refused():
    record = {**config().quantization_config, "format_version": 2}
    with pytest.raises(CheckpointError, match="format_version must be 1, got 2"):
        check_options(config(fields={"quantization_config": record}))


def test_dense_entries_and_other_quantizers_are_no_served_layers(tmp_path):
    assert served_layers(config(fields={"quantization_config": {"quant_method": "fp8"}})) == {}
    assert served_layers(SimpleNamespace()) == {}
    make(tmp_path / "made")
    assert set(served_layers(config())) == {f"layers.0.{name}" for name in (*ATTENTION, *MLP)}


@pytest.mark.parametrize(
    ("fields", "tp", "divide"),
    [({}, 1, "one"), ({}, 2, "both"), ({"neuronmm_divide": "one"}, 2, "one")],
)
def test_what_is_divided(fields, tp, divide):
    assert divide_of(config(fields=fields, tp_degree=tp)) == divide
    with pytest.raises(ValueError, match="must be one or both, got 'two'"):
        divide_of(config(fields={"neuronmm_divide": "two"}, tp_degree=tp))


@pytest.mark.parametrize(("r", "tp", "storage"), [(8, 1, "int4"), (None, 1, "int4"), (8, 2, None)])
def test_int4_is_kept_on_one_rank(r, tp, storage):
    """Its groups of rows share scales, which ranks do not divide."""
    name = "model.layers.0.mlp.up_proj"
    layer = LayerReport(name, 256, 128, r, r is None, None, None, 1, 1, "int4")
    (served,) = named_layers([layer], tp).values()
    assert served.storage == storage
    sections = [ColumnSection(128, tp)]
    made = member_of(served, Shard("column", "both", 0, tp), sections, torch.float32)
    assert {p.dtype for n, p in made.named_parameters() if n in "uvw"} == {
        torch.float32 if storage is None else torch.uint8
    }
