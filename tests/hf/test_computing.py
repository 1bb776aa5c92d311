"""The compute dtype: a model is cast for a block and has its old values afterwards."""

import pytest
import torch
from tiny import tiny_directory, tiny_model
from torch import nn

from neuronmm_ops import CheckpointError, SVDLinear, hf
from neuronmm_ops.hf.computing import check_device, computing_in


class Mixed(nn.Module):
    """Parameters and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(5))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.register_buffer("saved", torch.randn(3, dtype=torch.float16))
        self.register_buffer("angles", torch.randn(3), persistent=False)
        self.register_buffer("count", torch.arange(3))
        self.up = nn.Linear(8, 16, bias=False, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_back_bit_for_bit(dtype):
    model = Mixed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    angles = model.angles
    with computing_in(model, dtype):
        assert {p.dtype for p in model.parameters()} == {model.saved.dtype} == {dtype}
        assert model.angles is angles
        assert model.count.dtype == torch.int64
        model.up = SVDLinear.from_factors(
            torch.ones(8, 2, dtype=dtype), torch.ones(2, 16, dtype=dtype)
        )
    assert model.up.u.dtype == model.up.v.dtype == torch.float16
    for name, value in model.state_dict().items():
        if not name.startswith("up."):
            assert value.dtype == before[name].dtype
            assert torch.equal(value, before[name]), name


def test_a_buffer_of_two_modules_comes_back():
    model = nn.ModuleList([Mixed(), nn.Module()])
    model[1].register_buffer("again", model[0].saved)
    before = model[0].saved.clone()
    with computing_in(model, torch.float32):
        assert model[0].saved.dtype == torch.float32
    assert model[1].again is model[0].saved
    assert model[0].saved.dtype == torch.float16
    assert torch.equal(model[0].saved, before)


def test_an_error_leaves_the_dtypes_as_they_were():
    model = tiny_model(dtype=torch.bfloat16)
    with pytest.raises(KeyError), computing_in(model, torch.float32):
        raise KeyError
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("is_fast", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_cpu_multiplies_fast(is_fast, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("neuronmm_ops.ops.backends.cpu.multiplies_fast", lambda dtype: is_fast)
    directory = tiny_directory(tmp_path / "model", dtype=torch.bfloat16)
    model = hf.load_computing(directory)
    assert model.dtype == getattr(torch, expected)
    assert model.config.dtype == torch.bfloat16
    assert hf.load_computing(directory, "float16").dtype == torch.float16


def test_more_devices_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert check_device("cuda:0").index == 0
    with pytest.raises(ValueError, match="device cuda:1 is not available: there are 1"):
        check_device("cuda:1")


def test_many_processes_take_the_cpu_where_a_cuda_build_has_no_gpu(monkeypatch, tmp_path):
    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    with pytest.raises(CheckpointError, match="initialize torch"):  # the next step
        hf.load_computing(tiny_directory(tmp_path), tp=2)
