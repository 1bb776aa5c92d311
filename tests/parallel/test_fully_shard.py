"""Compressed models under FSDP2: training, distributed checkpoints, factors in one byte."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from quantized import swap_quantized_
from ranks import run
from tiny import tiny_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from neuronmm_ops import SVDLinear, hf, swap_

pytestmark = pytest.mark.slow
ENDS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


def make_model(storage: str | None) -> nn.Module:
    model = tiny_model()
    if storage is not None:
        return swap_quantized_(model, storage, *ENDS)
    linears = {n: m for n, m in model.named_modules() if n.endswith(ENDS)}
    layers = {n: SVDLinear.from_linear(m, 8) for n, m in linears.items()}
    swap_(model, {n: (layer.u.detach(), layer.v.detach()) for n, layer in layers.items()})
    return model


def restored(directory: Path) -> nn.Module:
    return hf.load(directory).float().train()


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def shards(model: nn.Module) -> dict[str, Tensor]:
    """Return a rank's parts, those in one byte as bytes."""
    parts = {name: getattr(t, "_local_tensor", t) for name, t in model.state_dict().items()}
    return {n: t.view(torch.uint8) if t.itemsize == 1 else t.clone() for n, t in parts.items()}


def trained_and_restored(rank: int, directory: Path, files: Path) -> tuple[bool, float]:
    """Train, save, load into a fresh model, go on; return whether equal, and the largest error."""
    ids = torch.arange(2 * 16).view(2, 16) % 64  # each rank has the same tokens
    single = restored(directory)
    before = copy.deepcopy(single.state_dict())
    steps(single, optimizer_of(single), ids, 2)

    model = sharded(restored(directory))
    optimizer = optimizer_of(model)
    steps(model, optimizer, ids, 2)
    found, expected = model.state_dict(), single.state_dict()
    moved = {name for name in expected if not torch.equal(before[name], expected[name])}
    is_float = all(m.storage is None for m in model.modules() if isinstance(m, SVDLinear))
    assert is_float == any(name.endswith(".u") for name in moved)
    error = max(float((found[name].full_tensor() - expected[name]).abs().max()) for name in moved)

    names = ("model", "optimizer")
    dcp.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=files)
    fresh = sharded(restored(directory))
    fresh_optimizer = optimizer_of(fresh)
    state = dict(zip(names, get_state_dict(fresh, fresh_optimizer), strict=True))
    dcp.load(state, checkpoint_id=files)
    set_state_dict(
        fresh, fresh_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    for each, its in ((model, optimizer), (fresh, fresh_optimizer)):
        steps(each, its, ids, 1)
    ours, theirs = shards(fresh), shards(model)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs), error


@pytest.mark.parametrize("storage", [None, "fp8", "int8"])
def test_a_compressed_model_trains_saves_and_loads(storage, tmp_path):
    hf.save(make_model(storage), tmp_path / "model")
    for is_equal, error in run(trained_and_restored, 2, tmp_path / "model", tmp_path / "state"):
        assert is_equal
        assert error < 1e-4
