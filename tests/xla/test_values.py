"""The custom call, executed by the host handler, equals the CPU ops; so do gradients."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch_xla
from graphs import lowered
from hypothesis import given, settings
from hypothesis import strategies as st
from operands import ACTIVATIONS
from splits import split_plans
from tolerances import assert_close_to_oracle
from torch import nn
from torch_xla import _XLAC

import neuronmm_ops as nm
from neuronmm_ops import ops
from neuronmm_ops.ops.backends import xla

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]
# opcheck's test_autograd_registration knows no XLA tensors.
XLA_CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
PAIR = ((200, 40), (40, 64))
GATED = ((64, 100), (64, 100), (100, 32))
FACTORS = ((2, 3, 64), (64, 24), (24, 100), (64, 16), (16, 100), (100, 32), (32, 64))
QKV = ((2, 3, 64), (64, 24), (24, 100), (64, 16), (16, 40), (64, 32), (32, 50))
CALLS = {
    "xuv": (ops.xuv, ((5, 200), *PAIR)),
    "xuv with a bias": (ops.xuv, ((5, 200), *PAIR, (64,))),
    "one token": (ops.xuv, ((1, 200), *PAIR)),
    "a vector": (ops.xuv, ((200,), *PAIR)),
    "batches": (ops.xuv, ((2, 3, 4, 200), *PAIR, (64,))),
    "no token": (ops.xuv, ((2, 0, 200), *PAIR, (64,))),
    "xw": (ops.xw, ((2, 3, 200), (200, 64))),
    "xw with a bias": (ops.xw, ((7, 200), (200, 64), (64,))),
    "mlp": (ops.mlp, ((2, 3, 64), *GATED)),
    "mlp with x_up": (ops.mlp, ((2, 3, 64), (64, 100), (48, 100), (100, 32), (2, 3, 48))),
    "svd_mlp": (ops.svd_mlp, FACTORS),
    "svd_qkv": (ops.svd_qkv, QKV),
    "svd_qkv with biases": (ops.svd_qkv, (*QKV, (100,), (40,), (50,))),
}


def make(shape, dtype):
    scale = shape[0] ** -0.5 if len(shape) == 2 and shape[0] > 20 else 1.0
    return (torch.randn(shape) * scale).to(dtype)


def assert_right(actual, op, *tensors, **options):
    """Compare with the op in fp64, as tightly as the CPU op's own rounding allows."""
    doubles = [tensor.detach().double() for tensor in tensors]
    oracle, low = op(*doubles, **options), op(*[t.detach() for t in tensors], **options)
    magnitude = op(*[tensor.abs() for tensor in doubles], **options)
    assert_close_to_oracle(actual.detach(), oracle, low, magnitude)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_lazy(name, dtype, mode, device, handler):
    op, shapes = CALLS[name]
    tensors = [make(shape, dtype) for shape in shapes]
    with mode():
        on_device = [tensor.to(device) for tensor in tensors]
        before = handler.count
        actual = op(*on_device).cpu()
        assert handler.count - before == (1 if actual.numel() else 0)
        assert not [n for n in _XLAC._get_executed_fallback_ops() if n.startswith("neuronmm")]
        assert_right(actual, op, *tensors)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["xuv with a bias", "one token", "xw", "mlp with x_up", "svd_mlp"])
def test_openxla(name, dtype, mode, device, handler):
    op, shapes = CALLS[name]
    tensors = [make(shape, dtype) for shape in shapes]
    compiled = torch.compile(lambda *given: 2 * op(*given), backend="openxla", fullgraph=True)
    with mode():
        on_device = [tensor.to(device) for tensor in tensors]
        before = handler.count
        for _ in range(2):
            assert_right(compiled(*on_device).cpu() / 2, op, *tensors)
    assert handler.count - before == 2


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, device):
    tensors = [make(shape, torch.float32) for shape in CALLS["svd_mlp"][1]]
    with torch.no_grad():
        actual = ops.svd_mlp(*[t.to(device) for t in tensors], activation=activation)
    assert_right(actual.cpu(), ops.svd_mlp, *tensors, activation=activation)


# Two kernels whose operands have the same shapes: an activation is no operand.
ONE_SIGNATURE = [partial(ops.svd_mlp, activation=name) for name in ("silu", "relu")]


def test_two_kernels_in_one_graph_or_in_two_give_two_results(device, handler):
    tensors = [make(shape, torch.float32) for shape in CALLS["svd_mlp"][1]]
    on_device = [tensor.to(device) for tensor in tensors]
    before = handler.count
    with torch.no_grad():
        both = torch.stack([op(*on_device) for op in ONE_SIGNATURE]).cpu()
        assert handler.count - before == 2
        each = [op(*on_device).cpu() for op in ONE_SIGNATURE]
    for actual, alone, op in zip(both, each, ONE_SIGNATURE, strict=True):
        assert_right(actual, op, *tensors)
        assert_right(alone, op, *tensors)
    assert not torch.allclose(both[0], both[1], atol=0.01)


@pytest.mark.parametrize("name", ["batches", "xw with a bias", "svd_mlp"])
def test_a_split_op_is_one_call_for_each_part(name, device, handler, monkeypatch):
    monkeypatch.setattr(xla, "_computations", {})
    split_plans(monkeypatch, 4)
    op, shapes = CALLS[name]
    tensors = [make(shape, torch.float32) for shape in shapes]
    tokens = tensors[0].shape[:-1].numel()
    on_device = [tensor.to(device) for tensor in tensors]
    with torch.no_grad():
        for _ in range(2):
            y = op(*on_device)
            sizes = [call.config["neuronmm"]["M"] for call in lowered(y).calls]
            assert sorted(sizes, reverse=True) == [4] * (tokens // 4) + [tokens % 4] * bool(
                tokens % 4
            )
            before = handler.count
            assert_right(y.cpu(), op, *tensors)
            assert handler.count - before == len(sizes)


@pytest.mark.parametrize("backend", ["lazy", "openxla"])
def test_gradients_equal_those_of_the_cpu(backend, device):
    torch.manual_seed(1)
    linear = nm.SVDLinear.from_linear(nn.Linear(96, 80), rank=32)
    mlp = nm.SVDMLP(80, 120, (16, 24, 32))
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(std=0.2)
    model = nn.Sequential(linear, mlp)
    x = torch.randn(2, 3, 96)

    def gradients(model, x):
        def step(given):
            return model(given).square().sum()

        compiled = backend == "openxla" and x.device.type == "xla"
        (torch.compile(step, backend="openxla") if compiled else step)(x).backward()
        return [parameter.grad.cpu() for parameter in model.parameters()]

    oracles = gradients(copy.deepcopy(model).double(), x.double())
    lows = gradients(copy.deepcopy(model), x)
    for actual, oracle, low in zip(
        gradients(model.to(device), x.to(device)), oracles, lows, strict=True
    ):
        assert_close_to_oracle(actual, oracle, low)


def test_a_refusal_of_the_handler_is_an_error(device, monkeypatch):
    monkeypatch.setattr(xla, "_computations", {})
    monkeypatch.setattr(xla, "config_of", lambda launch: "bm90IGpzb24=")
    y = ops.xw(*[make(shape, torch.float32).to(device) for shape in ((2, 11), (11, 13))])
    with pytest.raises(RuntimeError, match="JSONDecodeError"):
        y.cpu()
    with contextlib.suppress(RuntimeError):  # torch_xla raises it again at its next barrier
        torch_xla.sync(wait=True)


@settings(max_examples=30)
@given(
    lead=st.lists(st.integers(0, 5), max_size=3),
    sizes=st.tuples(*[st.integers(1, 140)] * 3),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
def test_any_shape(lead, sizes, dtype, bias):
    K, r, N = sizes
    shapes = [(*lead, K), (K, r), (r, N), *([(N,)] if bias else [])]
    tensors = [make(shape, dtype) for shape in shapes]
    with torch.no_grad():
        actual = ops.xuv(*[tensor.to("xla") for tensor in tensors])
        assert_right(actual.cpu(), ops.xuv, *tensors)


@pytest.mark.parametrize(
    ("name", "requires_grad"),
    [*[(name, True) for name in ("xuv", "xuv with a bias", "xw", "svd_mlp")], ("xuv", False)],
)
def test_opcheck(name, requires_grad, device):
    op, shapes = CALLS[name]
    tensors = [make(shape, torch.float32).to(device) for shape in shapes]
    tensors = [tensor.requires_grad_(requires_grad) for tensor in tensors]
    overload = getattr(torch.ops.neuronmm, op.__name__).default
    torch.library.opcheck(overload, tuple(tensors), test_utils=XLA_CHECKS)


def test_autocast_casts_as_a_linear_does(device):
    layer, linear = nm.SVDLinear(256, 24, 8).to(device), nn.Linear(256, 24).to(device)
    x = torch.randn(3, 256, device=device)
    with torch.no_grad(), torch.autocast("xla", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == linear(x).dtype == torch.bfloat16
    (call,) = lowered(y).calls
    assert call.config["neuronmm"]["dtype"] == "bfloat16"
