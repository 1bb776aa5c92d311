"""What a checkpoint holds comes back out of NxD Inference's state dict, value by value."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nxdi_checkpoints import make
from safetensors.torch import load_file
from torch import Tensor

from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.nxdi.convert import padded, put_pairs, take_pairs
from neuronmm_ops.engines.nxdi.record import named_layers
from neuronmm_ops.errors import CheckpointError


def state_of(directory: Path) -> dict[str, Tensor]:
    found = load_file(directory / "model.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def layers_of(directory: Path) -> dict[str, LayerReport]:
    return named_layers(inspect_checkpoint(directory).layers)


def converted(directory: Path, tp: int, divide: Any) -> dict[str, Tensor]:
    state, layers = state_of(directory), layers_of(directory)
    pairs = take_pairs(state, layers, torch.float32)
    put_pairs(state, pairs, layers, tp, divide)
    return state


def returned(state: dict[str, Tensor], prefix: str, ranks: dict[str, int], divide: str) -> Any:
    """The pairs of a layer, read back from NxD Inference's names."""
    found: dict[str, Tensor] = {}
    for block, module, columns, row in (
        ("self_attn", "self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), "o_proj"),
        ("mlp", "mlp", ("gate_proj", "up_proj"), "down_proj"),
    ):
        us = state.get(f"{prefix}.{module}.low_rank_u.weight")
        for name in columns:
            layer = f"{prefix}.{block}.{name}"
            found[f"{layer}.v"] = state[f"{layer}.weight"].t()
            if us is None:
                found[f"{layer}.u"] = state[f"{prefix}.{module}.low_rank_u.{name}"]
            else:
                found[f"{layer}.u"], us = us[: ranks[layer]].t(), us[ranks[layer] :]
        assert us is None or not us.any()  # padding
        layer = f"{prefix}.{block}.{row}"
        inner = f"{prefix}.mlp" if block == "mlp" else f"{prefix}.self_attn.o_proj"
        v = state[f"{inner}.low_rank_v.weight"]
        found[f"{layer}.u"] = state[f"{layer}.weight"].t()
        if divide == "both":
            assert not v[64:].any()
            v = v[:64].t()
        found[f"{layer}.v"] = v
    return found


@pytest.mark.parametrize("divide", ["both", "one"])
@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_every_value_comes_back(tp, divide, tmp_path):
    directory = make(tmp_path / "checkpoint", attention_bias=True)
    state, layers = converted(directory, tp, divide), layers_of(directory)
    ranks = {name: layer.r or 0 for name, layer in layers.items()}
    original = state_of(directory)
    for index in range(2):
        found = returned(state, f"layers.{index}", ranks, divide)
        assert set(found) == {n for n in original if n[-2:] in (".u", ".v") and f".{index}." in n}
        for name, tensor in found.items():
            assert torch.equal(tensor, original[name]), name
    # Every tensor that a rank divides, it divides.
    for name, tensor in state.items():
        if divide == "both" and "low_rank_" in name:
            assert tensor.shape[0] % tp == 0
        assert tensor.is_contiguous()
    kept = {n for n in original if "norm" in n or "embed" in n or "lm_head" in n}
    assert all(torch.equal(state[name], original[name]) for name in kept)


def test_no_two_tensors_share_memory(tmp_path):
    state = converted(make(tmp_path / "checkpoint"), 2, "both")
    # NxD removes one of two such tensors.
    places = [t.data_ptr() for t in state.values() if t.numel()]
    assert len(set(places)) == len(places)


def test_dense_members_stay(tmp_path):
    dense = ("k_proj", "down_proj")
    directory = make(tmp_path / "checkpoint", dense=dense)
    state, original = converted(directory, 2, "both"), state_of(directory)
    for name in [n for n in original if n.endswith(tuple(f"{d}.weight" for d in dense))]:
        assert torch.equal(state[name], original[name])
    assert "layers.0.mlp.low_rank_v.weight" not in state
    assert state["layers.0.self_attn.qkv_proj.low_rank_u.weight"].shape == (29 + 23, 64)


@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_factors_in_one_byte_are_multiplied_out(storage, tmp_path):
    directory = make(tmp_path / "checkpoint", storage=storage)
    state, original = converted(directory, 1, "one"), state_of(directory)
    name = "layers.0.mlp.down_proj"
    wanted = original[f"{name}.u"].double() * original[f"{name}.u_scale"].double()
    torch.testing.assert_close(state[f"{name}.weight"].double().t(), wanted, rtol=1e-6, atol=0)
    assert not [key for key in state if key.endswith("_scale")]


@pytest.mark.parametrize("leaf", ["u", "v", "v_scale"])
def test_a_missing_tensor_is_refused(leaf, tmp_path):
    directory = make(tmp_path / "checkpoint", storage="int8")
    layers, state = layers_of(directory), state_of(directory)
    name = f"layers.0.mlp.up_proj.{leaf}"
    del state[name]
    with pytest.raises(
        CheckpointError, match=f"{name}: config.json asks for it, the file has none"
    ):
        take_pairs(state, layers, torch.float32)


@given(size=st.integers(1, 10**6), tp=st.integers(1, 128))
def test_padding_is_the_least(size, tp):
    found = padded(size, tp)
    assert found % tp == 0
    assert size <= found < size + tp
