"""The Triton kernels: on a GPU, and where there is none in Triton's interpreter, on a CPU."""

import sys
from pathlib import Path

import pytest
import torch
from commands import run
from operands import PLAIN, magnitude_of
from tolerances import assert_close_to_oracle
from torch import Tensor

from neuronmm_ops.nn.nearest import nearest
from neuronmm_ops.ops import cuda
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.products import batched
from neuronmm_ops.storages import STORAGES, dequantized

ON_GPU = torch.cuda.is_available()
# The interpreter's dot takes the bits of bfloat16 for integers.
DTYPES = (torch.float16, torch.bfloat16) if ON_GPU else (torch.float16,)
DEVICE = "cuda" if ON_GPU else "cpu"
# more than a step along each contraction, and none a multiple of a tile
SIZES = {"K": 330, "N": 150, "I": 210, "r": 140, "r_gate": 36, "r_up": 140, "r_down": 20}


def operands(
    op: str, lead: tuple[int, ...], dtype: torch.dtype, storage: str | None, by_column: bool
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for operand in SPECS[op].operands:
        shape = tuple(SIZES[name] for name in operand.sizes)
        is_factor = operand.role == "factor"
        value = torch.randn((*lead, *shape) if operand.name == "x" else shape, generator=generator)
        value = value / shape[0] ** 0.5 if is_factor else value
        if is_factor and storage is not None:
            value, found[f"{operand.name}_scale"] = nearest(value, STORAGES[storage])
        else:
            value = value.to(dtype)
        found[operand.name] = value.t().contiguous().t() if is_factor and by_column else value
    return {name: value.to(DEVICE) for name, value in found.items()}


def assert_right(op: str, tensors: dict[str, Tensor], **choices: str) -> None:
    dtype, low, exact = tensors["x"].dtype, list[Tensor](), list[Tensor]()
    for operand in SPECS[op].operands:
        value = tensors[operand.name]
        scale = tensors.get(f"{operand.name}_scale")
        exact.append(dequantized(value, scale, torch.float64).double())
        low.append(exact[-1].to(dtype))
    oracle = PLAIN[op](*exact, **choices)
    call = SPECS[op].complete((), {**tensors, **choices})
    SPECS[op].check(*call)
    given, (*options, compute) = SPECS[op].split(call)
    assert cuda.takes(given[0], compute)
    actual = batched(cuda.KERNELS[op](given, *options), tensors["x"])
    magnitude = magnitude_of(op, *exact)
    assert_close_to_oracle(actual, oracle, PLAIN[op](*low, **choices), magnitude)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("storage", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", cuda.KERNELS)
def test_values_are_those_of_the_oracle(op, dtype, storage, by_column):
    for lead in ((), (1,), (2, 3), (33,)):
        assert_right(op, operands(op, lead, dtype, storage, by_column))


@pytest.mark.slow
def test_they_compile_without_a_gpu(tmp_path):
    program = Path(__file__).with_name("compiled.py")
    output = run(sys.executable, program, TRITON_INTERPRET=0, TRITON_CACHE_DIR=tmp_path)
    assert output == "compiled\n"


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_activations(activation):
    tensors = operands("svd_mlp", (5,), torch.float16, None, by_column=True)
    assert_right("svd_mlp", tensors, activation=activation)


@pytest.mark.parametrize("storage", [None, "int8", "int4"])
def test_operands_may_be_windows_of_others(storage):
    tensors = operands("xuv", (3,), torch.float16, storage, by_column=False)
    for name, value in tensors.items():
        wide = torch.zeros([2 * size + 7 for size in value.shape], dtype=value.dtype)
        tensors[name] = wide.to(DEVICE)[tuple(slice(3, 3 + 2 * n, 2) for n in value.shape)]
        tensors[name].copy_(value)
        assert not tensors[name].is_contiguous()
    assert_right("xuv", tensors)


@pytest.mark.parametrize("storage", [None, "fp8", "int4"])
def test_the_smallest_sizes(storage, monkeypatch):
    for name in SIZES:
        monkeypatch.setitem(SIZES, name, 2)
    assert_right("svd_mlp", operands("svd_mlp", (1,), torch.float16, storage, by_column=True))
    monkeypatch.setitem(SIZES, "N", 1)
    assert_right("xuv", operands("xuv", (64,), torch.float16, storage, by_column=True))


def test_a_call_compiles_and_a_graph_has_the_kernels(monkeypatch):
    """On any machine: a device and a capture that are said to be there."""
    launched: list[str] = []
    kernels = cuda.KERNELS["xuv"]
    monkeypatch.setitem(cuda.KERNELS, "xuv", lambda *given: launched.append("") or kernels(*given))
    tensors = operands("xuv", (3,), torch.float16, None, by_column=False)
    monkeypatch.setattr("torch.cuda.current_device", lambda: tensors["x"].device.index)
    call, spec = SPECS["xuv"].complete((), tensors), SPECS["xuv"]
    op, reference = cuda.implementation(spec), spec.reference(*call)
    for is_captured, expected in ((True, 0), (False, 1), (False, 1), (True, 2)):
        captured = is_captured
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: captured)  # noqa: B023
        y = op(*call)
        assert len(launched) == expected
        if is_captured and expected:
            assert_close_to_oracle(y, spec.reference(*map(Tensor.double, call[:4])), reference)
        else:
            assert torch.equal(y, reference)
    with pytest.raises(ValueError, match="last dimension of u must equal first dimension of v"):
        op(*call[:2], call[2][1:], *call[3:])
    assert len(launched) == 2


@pytest.mark.parametrize(
    ("lead", "dtype", "compute"),
    [
        ((65,), torch.float16, "x"),
        ((2,), torch.float32, "x"),
        ((0,), torch.float16, "x"),
        ((2,), torch.float16, "fp8"),
    ],
)
def test_other_calls_are_not_taken(lead, dtype, compute):
    assert not cuda.takes(torch.zeros(*lead, 8, dtype=dtype), compute)
