"""StoredLinear: a dense weight in one byte, what it holds, computes, refuses and survives."""

import copy

import pytest
import torch
from quantized import nearest
from stored import assert_same_bits
from torch import Tensor, nn

from neuronmm_ops import SVDMLP, StoredLinear, SVDLinear, swap_
from neuronmm_ops.nn import relayout_
from neuronmm_ops.storages import STORAGES, dequantized

STORED = pytest.mark.parametrize("storage", STORAGES)
CASTS = (torch.float16, torch.float32, torch.float64)


def make(storage: str, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> StoredLinear:
    torch.manual_seed(0)
    w, scale = nearest(torch.randn(12, 8) / 12**0.5, storage)
    return StoredLinear.from_matrix(
        w, scale, torch.randn(8).to(dtype) if bias else None, dtype=dtype
    )


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@STORED
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_constructor(storage, device):
    shapes = STORAGES[storage].shapes(12, 8)
    layer = StoredLinear(12, 8, storage, device=device, dtype=torch.bfloat16)
    assert (layer.w.shape, layer.w.dtype) == (shapes[0], STORAGES[storage].torch_dtype)
    assert (layer.w_scale.shape, layer.w_scale.dtype) == (shapes[1], torch.float32)
    assert layer.weight.dtype == layer.bias.dtype == layer.dtype == torch.bfloat16
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["bias"]
    assert list(layer.state_dict()) == ["w", "bias", "w_scale", "weight"]
    assert repr(layer).endswith(f"(in_features=12, out_features=8, bias=True, storage={storage})")
    if device == "cpu":
        layer.check_values()
        assert layer(torch.zeros(2, 12, dtype=torch.bfloat16)).shape == (2, 8)


@STORED
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_the_scaled_product(storage, bias, dtype):
    layer, x = make(storage, dtype, bias), torch.randn(2, 5, 12).to(dtype)
    expected = x.float() @ dequantized(layer.w, layer.w_scale, torch.float32)
    expected = expected + layer.bias.float() if bias else expected
    for each in (layer, relayout_(copy.deepcopy(layer))):
        assert each(x).dtype == dtype
        torch.testing.assert_close(each(x).float(), expected, rtol=2e-2, atol=2e-2)
    linear = layer.to_linear()
    assert linear.weight.dtype == dtype
    torch.testing.assert_close(linear(x).float(), expected, rtol=2e-2, atol=2e-2)


@STORED
def test_from_linear_rounds_to_nearest(storage):
    linear = nn.Linear(12, 8)
    layer = StoredLinear.from_linear(linear, storage)
    step = layer.w_scale.view(-1, 8)[0][:, None] * (8 if storage == "fp8" else 0.5)
    assert ((layer.to_linear().weight - linear.weight).abs() <= step).all()
    assert torch.equal(layer.bias, linear.bias)
    assert layer.bias is not linear.bias


@STORED
def test_casts_moves_and_copies_keep_every_bit(storage):
    layer = make(storage)
    before = copied(layer)
    for dtype in CASTS:
        layer = copy.deepcopy(layer).to(dtype)
        assert layer.weight.dtype == layer.bias.dtype == dtype
        fresh = StoredLinear(12, 8, storage, dtype=dtype)
        fresh.load_state_dict(layer.state_dict())
        layer = fresh
        kept = {name: layer.state_dict()[name] for name in ("w", "w_scale")}
        assert_same_bits(kept, {name: before[name] for name in kept})
    moved = make(storage).to("meta", torch.float16)
    assert all(t.is_meta for t in moved.state_dict().values())
    assert (moved.w.dtype, moved.w_scale.dtype) == (layer.w.dtype, torch.float32)


@STORED
def test_gradients(storage):
    layer, x = make(storage, torch.float32), torch.randn(4, 12, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 8) @ layer.to_linear().weight)
    with pytest.raises(ValueError, match="have no gradient; add LoRA"):
        layer.requires_grad_()


@STORED
def test_compiled_and_exported(storage):
    layer, x = make(storage, torch.float32), torch.randn(4, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


def bad() -> list[tuple[Tensor, Tensor, str]]:
    w, s = nearest(torch.randn(12, 8), "int8")
    a, t = nearest(torch.randn(12, 8), "fp8")
    low, nan, zero = w.clone(), a.view(torch.uint8).clone(), s.clone()
    low[1, 1], nan[0, 0], zero[3] = -128, 0xFF, 0
    rule = r"w_scale must be \[8\] in float32, positive and finite; got "
    return [
        (w, zero, rule + "0.0 at 3"),
        (w, s * torch.nan, rule + "nan at 0"),
        (w, s[:7], rule + r"\[7\] in float32"),
        (low, s, r"w must be in -127..127 .*, got -128; quantize"),
        (nan.view(a.dtype), t, r"w must be in -240..240.*; got a magnitude of nan"),
        (w.t().contiguous(), s.new_ones(12), r"w must be \[12, 8\], got \[8, 12\]"),
    ]


@pytest.mark.parametrize(("w", "scale", "error"), bad())
def test_bad_matrices_are_refused_in_one_line(w, scale, error):
    model = nn.Sequential(nn.Linear(12, 8))
    with pytest.raises(ValueError, match=f"0: {error}") as caught:
        swap_(model, {"0": (w, scale)})
    assert "\n" not in str(caught.value)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("make_it", "error"),
    [
        (lambda: StoredLinear(0, 8, "fp8"), "must be at least 1, got 0 and 8"),
        (lambda: StoredLinear(12, 8, "fp4"), "storage must be fp8 or int8 or int4, got 'fp4'"),
        (
            lambda: StoredLinear(12, 8, "fp8", dtype=torch.int8),
            "dtype must be a float of two bytes",
        ),
        (lambda: StoredLinear.from_linear(nn.Linear(3, 2, device="meta"), "fp8"), "meta device"),
        (
            lambda: StoredLinear.from_matrix(torch.ones(3, 2), torch.ones(2)),
            r"w must be \[K, N\] in",
        ),
        (
            lambda: StoredLinear.from_matrix(*nearest(torch.ones(3, 2), "int8"), torch.ones(3)),
            r"bias must be \[2\]",
        ),
    ],
)
def test_bad_arguments_are_refused(make_it, error):
    with pytest.raises(ValueError, match=error):
        make_it()


@STORED
def test_not_finite_weights_are_refused(storage):
    linear = nn.Linear(12, 8)
    linear.weight.data[1, 2] = float("inf")
    with pytest.raises(ValueError, match="weight must be finite, got NaN or Inf"):
        StoredLinear.from_linear(linear, storage)


@STORED
def test_loading_what_does_not_fit_is_refused(storage):
    layer = make(storage)
    before = copied(layer)
    other = make(next(name for name in STORAGES if name != storage))
    state = layer.state_dict(prefix="0.")
    for change, error in (
        (
            {"0.w": other.w},
            r"0\.w must be .*; give the layer the storage of the state dict \(Stored",
        ),
        ({"0.w": layer.w.float()}, r"0\.w must be .*, got float32"),
        ({"0.w_scale": -layer.w_scale}, r"0: w_scale must be .* positive and finite; got -"),
        ({"0.w_scale": layer.w_scale[..., :7]}, "size mismatch for 0.w_scale"),
    ):
        with pytest.raises(RuntimeError, match=error):
            nn.Sequential(layer).load_state_dict(state | change)
        assert_same_bits(layer.state_dict(), before)


@STORED
def test_swap_keeps_the_bias_and_the_hooks(storage):
    linear = nn.Linear(12, 8, dtype=torch.bfloat16)
    calls: list[int] = []
    linear.register_forward_hook(lambda *_: calls.append(1))
    model = nn.Sequential(linear)
    swap_(model, {"0": nearest(torch.randn(12, 8), storage)})
    layer = model[0]
    assert (type(layer), layer.storage, layer.dtype) == (StoredLinear, storage, torch.bfloat16)
    assert layer.bias is linear.bias
    model(torch.zeros(2, 12, dtype=torch.bfloat16))
    assert calls == [1]


@pytest.mark.parametrize(
    "kinds", [("fp8",) * 3, ("int8",) * 3, ("fp8", "int8", "fp8"), (2, "fp8", "fp8")]
)
def test_an_mlp_computes_its_projections(kinds):
    torch.manual_seed(0)
    layers = [
        StoredLinear(*size, kind, False) if isinstance(kind, str) else SVDLinear(*size, kind, False)
        for size, kind in zip(((12, 16), (12, 16), (16, 12)), kinds, strict=True)
    ]
    mlp, x = SVDMLP.from_projections(*layers, "silu"), torch.randn(5, 12)
    gate, up, down = (layer.to_linear() for layer in layers)
    expected = down(nn.functional.silu(gate(x)) * up(x))
    torch.testing.assert_close(mlp(x), expected, rtol=1e-3, atol=1e-5)
