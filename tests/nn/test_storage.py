"""Low-rank layers with factors in one byte: what they hold, compute, refuse and survive."""

import copy
import io

import pytest
import torch
from nn.layers import is_contiguous
from quantized import random_factors
from safetensors.torch import load, save
from stored import assert_same_bits
from torch import Tensor, nn

from neuronmm_ops import SVDMLP, SVDLinear, storages, swap_
from neuronmm_ops.nn import relayout_
from neuronmm_ops.nn.factors import check_factors
from neuronmm_ops.storages import STORAGES, dequantized

STORED = pytest.mark.parametrize("storage", STORAGES)
BIASED = pytest.mark.parametrize("bias", [True, False])


def make_layer(storage: str, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> SVDLinear:
    u, v, u_scale, v_scale = random_factors(12, 4, 8, storage)
    given = torch.randn(8).to(dtype) if bias else None
    return SVDLinear.from_factors(u, v, given, u_scale, v_scale, dtype=dtype)


def tensors_of(layer: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    state = layer.state_dict(prefix=prefix)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def widened(layer: SVDLinear) -> tuple[Tensor, Tensor]:
    pairs = (layer.u, layer.u_scale), (layer.v, layer.v_scale)
    u, v = (dequantized(*pair, torch.float32) for pair in pairs)
    return u, v


@STORED
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_constructor(storage, device):
    layer = SVDLinear(12, 8, 4, device=device, dtype=torch.bfloat16, storage=storage)
    assert layer.storage == storage
    assert layer.u.dtype == layer.v.dtype == STORAGES[storage].torch_dtype
    trainable = [name for name, p in layer.named_parameters() if p.requires_grad]
    assert trainable == ["bias"]
    assert (layer.u_scale.shape, layer.v_scale.shape) == tuple(
        STORAGES[storage].shapes(*s)[1] for s in ((12, 4), (4, 8))
    )
    assert layer.u_scale.dtype == layer.v_scale.dtype == torch.float32
    assert layer.weight.dtype == layer.bias.dtype == layer.dtype == torch.bfloat16
    assert is_contiguous(layer)
    if device == "cpu":
        check_factors(layer.u, layer.v, layer.u_scale, layer.v_scale)


@STORED
@pytest.mark.parametrize("K", [2, 128, 300])
def test_every_number_survives_its_tensor(storage, K):
    stored = STORAGES[storage]
    numbers = stored.nearest((torch.rand(K, 5).double() * 2 - 1) * stored.largest)
    tensor, scale = stored.encode(numbers), stored.magnitudes(numbers) / 7
    assert tensor.dtype == stored.torch_dtype
    assert (tensor.shape, scale.shape) == stored.shapes(K, 5)
    assert stored.size(*tensor.shape) == (K, 5)
    assert torch.equal(stored.decode(tensor, torch.float64), numbers)
    assert stored.why_not(tensor) is None
    wide = numbers * stored.spread(scale, K)
    assert torch.equal(stored.dequantize(tensor, scale, torch.float64), wide)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": torch.int8}, "dtype must be a float .* give storage='int8'"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be a float .* give storage='fp8'"),
        ({"storage": "fp4"}, "storage must be fp8 or int8 or int4, got 'fp4'"),
    ],
    ids=str,
)
def test_the_constructor_refuses(options, error):
    with pytest.raises(ValueError, match=error):
        SVDLinear(12, 8, 4, **options)


def test_names_and_bytes():
    dtypes = [storages.dtype_name(name) for name in (*STORAGES, None)]
    assert dtypes == ["float8_e4m3fn", "int8", "int4", None]
    assert [storages.storage_named(name) for name in dtypes[:3]] == list(STORAGES)
    of_dtypes = [storages.storage_of(d) for d in (torch.int8, torch.bfloat16)]
    assert of_dtypes == [STORAGES["int8"], None]
    with pytest.raises(
        ValueError, match=r"must be float8_e4m3fn or int8 or int4, or null; got 'fp8'"
    ):
        storages.storage_named("fp8")
    assert storages.factor_bytes(12, 8, 4, 2) == 4 * 20 * 2
    assert storages.factor_bytes(12, 8, 4, 2, "int8") == 4 * 20 + 4 * (4 + 8)


@STORED
def test_from_factors_copies_and_keeps_a_bias_parameter(storage):
    u, v, u_scale, v_scale = random_factors(12, 4, 8, storage)
    bias = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    layer = SVDLinear.from_factors(u, v, bias, u_scale, v_scale)
    assert layer.bias is bias
    assert layer.weight.dtype == torch.float16  # the bias's, where nothing else is said
    u_scale.fill_(0)
    assert float(layer.u_scale.min()) > 0
    assert SVDLinear.from_factors(u, v, None, layer.u_scale, v_scale).dtype == torch.float32


@STORED
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.float16),
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.double(),
        lambda m: m.type(torch.float16),
        lambda m: m.to("cpu", torch.float32),
        lambda m: m.to(torch.empty(0, dtype=torch.float16)),
    ],
)
def test_a_cast_leaves_factors_and_scales_alone(storage, cast):
    layer, other = make_layer(storage), nn.Linear(12, 12, dtype=torch.bfloat16)
    before = tensors_of(layer)
    cast(nn.Sequential(other, layer))
    dtype = layer.weight.dtype
    assert dtype == layer.bias.dtype == other.weight.dtype != torch.bfloat16
    for name in ("weight", "bias"):
        before[name] = before[name].to(dtype)
    assert_same_bits(layer.state_dict(), before)
    assert is_contiguous(layer)
    assert layer(torch.zeros(2, 12, dtype=dtype)).dtype == dtype


@STORED
def test_a_move_moves_all_of_it(storage):
    layer = make_layer(storage).to("meta", torch.float16)
    assert all(t.is_meta for t in layer.state_dict().values())
    assert (layer.u.dtype, layer.u_scale.dtype) == (STORAGES[storage].torch_dtype, torch.float32)
    source = make_layer(storage)
    layer = SVDLinear(12, 8, 4, device="meta", storage=storage).to_empty(device="cpu").bfloat16()
    layer.load_state_dict(source.state_dict())
    assert_same_bits(layer.state_dict(), tensors_of(source))
    assert is_contiguous(layer)


def through_file(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=isinstance(value, dict))


@STORED
def test_copies_and_state_dict_round_trips(storage):
    layer = make_layer(storage)
    before = tensors_of(layer)
    for clone in (through_file(layer), copy.deepcopy(layer)):
        assert_same_bits(clone.state_dict(), before)
        assert is_contiguous(clone)
        assert not clone.u.requires_grad
    with torch.no_grad():
        clone.u_scale.fill_(7)
    assert_same_bits(layer.state_dict(), before)

    contiguous = {name: t.contiguous() for name, t in layer.state_dict().items()}
    for state in (through_file(layer.state_dict()), load(save(contiguous))):
        for assign in (False, True):
            fresh = SVDLinear(12, 8, 4, dtype=torch.bfloat16, storage=storage)
            fresh.load_state_dict(state, assign=assign)
            assert is_contiguous(fresh)
            assert_same_bits(relayout_(fresh).state_dict(), before)
            assert (fresh.u.stride(), fresh.v.stride()) == ((1, len(fresh.u)), (1, len(fresh.v)))


def assert_not_loaded(layer: nn.Module, state: dict[str, Tensor], error: str) -> None:
    """Refused, under the layer's name in a model, and nothing changed."""
    before = tensors_of(layer)
    with pytest.raises(RuntimeError, match=error):
        nn.Sequential(layer).load_state_dict(state)
    assert_same_bits(layer.state_dict(), before)


def test_loading_another_dtype_is_refused():
    layers = {stored.tensor_dtype: make_layer(name) for name, stored in STORAGES.items()}
    layers["bfloat16"] = SVDLinear(12, 8, 4, dtype=torch.bfloat16)
    for own, layer in layers.items():
        for other in layers.keys() - {own}:
            error = rf"0\.u must be {own}, got {other}; give the layer the storage"
            assert_not_loaded(layer, layers[other].state_dict(prefix="0."), error)


def test_floats_are_loaded_as_before():
    layer, source = SVDLinear(12, 8, 4), SVDLinear(12, 8, 4, dtype=torch.bfloat16)
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer.u, source.u.float())


@STORED
def test_loading_bad_values_is_refused(storage):
    layer = make_layer(storage)
    state = tensors_of(layer, "0.")
    for key, value, error in (
        (
            "u_scale",
            -torch.ones(STORAGES[storage].shapes(12, 4)[1]),
            r"0: u_scale must be .* got -1.0 at 0",
        ),
        ("v_scale", state["0.v_scale"].bfloat16(), r"0: v_scale must be .* in bfloat16"),
        ("v_scale", torch.ones(7), r"size mismatch for 0.v_scale"),
    ):
        assert_not_loaded(layer, state | {f"0.{key}": value}, error)
    del state["0.v_scale"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"0.v_scale"'):
        nn.Sequential(layer).load_state_dict(state)


@STORED
def test_a_pair_loads_no_factors_in_one_byte(storage):
    pair = SVDLinear(12, 8, 4).to_pair()
    before = tensors_of(pair)
    state = make_layer(storage).state_dict(prefix="0.")
    with pytest.raises(RuntimeError, match=r"0\.u is .*, which a pair of nn.Linear cannot hold"):
        nn.Sequential(pair).load_state_dict(state, strict=False)
    assert_same_bits(pair.state_dict(), before)


@STORED
@BIASED
def test_to_linear_is_in_the_models_dtype(storage, bias):
    layer = make_layer(storage, bias)
    linear = layer.to_linear()
    assert (linear.weight.dtype, linear.weight.requires_grad) == (torch.bfloat16, True)
    u, v = widened(layer)
    torch.testing.assert_close(linear.weight, (u @ v).t().bfloat16())
    assert (linear.bias is not None) == bias


@STORED
def test_a_pair_has_the_values_in_the_models_dtype(storage):
    layer = make_layer(storage, dtype=torch.float32)
    pair = layer.to_pair()
    assert all(p.requires_grad and p.dtype == torch.float32 for p in pair.parameters())
    x = torch.randn(4, 12)
    torch.testing.assert_close(pair(x), layer(x), rtol=1e-4, atol=1e-5)
    back = SVDLinear.from_pair(pair)
    assert (back.storage, back.u_scale, back.u.dtype) == (None, None, torch.float32)
    assert torch.equal(back.u, dequantized(layer.u, layer.u_scale, torch.float32))
    assert "u_scale" not in back.state_dict()


@STORED
def test_it_says_what_it_is(storage):
    layer = make_layer(storage)
    assert repr(layer).endswith(f"effective_ratio={1 - 80 / 96:.3f}, storage={storage})")
    assert list(layer.state_dict()) == ["u", "v", "bias", "u_scale", "v_scale", "weight"]
    assert layer.effective_ratio == SVDLinear(12, 8, 4).effective_ratio
    layer.compute = "fp8"
    assert repr(layer).endswith(f"storage={storage}, compute=fp8)")


@STORED
def test_gradients_of_the_factors_are_refused(storage):
    layer = make_layer(storage)
    error = rf"in {storages.dtype_name(storage)} have no gradient; add LoRA"
    with pytest.raises(ValueError, match=error):
        layer.requires_grad_()
    assert layer.requires_grad_(False) is layer
    assert not layer.bias.requires_grad
    if storage != "fp8":  # torch itself gives integers none
        return
    layer.u.requires_grad = True
    with pytest.raises(TypeError, match=r"one-byte factors and their scales have no gradient"):
        layer(torch.zeros(2, 12, dtype=torch.bfloat16))


@STORED
def test_an_optimizer_leaves_the_factors_alone(storage):
    model = nn.Sequential(nn.Linear(12, 12), make_layer(storage, dtype=torch.float32))
    before = tensors_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(torch.randn(4, 12)).square().sum().backward()
    optimizer.step()
    changed = {n for n, tensor in model.state_dict().items() if not tensor.equal(before[n])}
    assert changed == {"0.weight", "0.bias", "1.bias"}


def bad_factors() -> list[tuple[tuple[Tensor | None, ...], str]]:
    def with_scale(index: int, value: float) -> tuple[Tensor, ...]:
        factors = [tensor.clone() for tensor in random_factors(12, 4, 8, "int8")]
        factors[index][1] = value
        return tuple(factors)

    u, v, s, t = random_factors(12, 4, 8, "int8")
    a, b, _, _ = random_factors(12, 4, 8, "fp8")
    nan, big = (b.view(torch.uint8).clone() for _ in range(2))
    nan[0, 0], big[0, 0] = 0xFF, 0xF8
    low = u.clone()
    low[2, 1] = -128
    rule = r"in float32, positive and finite"
    u_rule, v_rule = (rf"{n}_scale must be \[{size}\] {rule}" for n, size in (("u", 4), ("v", 8)))
    return [
        (with_scale(2, 0.0), rf"{u_rule}; got 0.0 at 1"),
        (with_scale(3, -2.0), rf"{v_rule}; got -2.0 at 1"),
        (with_scale(3, float("nan")), rf"{v_rule}; got nan at 1"),
        (with_scale(2, float("inf")), rf"{u_rule}; got inf at 1"),
        ((u, v, s[:2], t), rf"{u_rule}; got \[2\] in float32"),
        ((u, v, s, t[None]), rf"{v_rule}; got \[1, 8\] in float32"),
        ((u, v, s, t.double()), rf"{v_rule}; got \[8\] in float64"),
        ((u, v), rf"{u_rule}, got none; numbers in int8 need scales"),
        ((a, b, s, None), rf"{v_rule}, got none; numbers in float8_e4m3fn"),
        ((u, b, s, t), r"u and v must have one dtype, got int8 and float8_e4m3fn; quantize"),
        ((u.float(), v, s, t), r"u and v must have one dtype, got float32 and int8; quantize"),
        ((u.float(), v.float(), s, t), r"scales belong to factors in .*, got .* in float32"),
        (
            (u.int(), v.int(), s, t),
            r"u must be bfloat16, .* float8_e4m3fn or int8 or uint8; got int32",
        ),
        ((low, v, s, t), r"u must be in -127..127 .*, got -128"),
        ((a, nan.view(b.dtype), s, t), r"v must be in -240..240.*; got a magnitude of nan"),
        ((a, big.view(b.dtype), s, t), r"v must be in -240..240.*; got a magnitude of 256"),
        ((u, v, s), r"factors must be \(u, v\) or \(u, v, u_scale, v_scale\), got 3"),
    ]


@pytest.mark.parametrize(("factors", "error"), bad_factors())
def test_bad_factors_are_refused_in_one_line(factors, error):
    model = nn.Sequential(nn.Linear(12, 8))
    with pytest.raises(ValueError, match=f"0: {error}") as caught:
        swap_(model, {"0": factors})
    assert "\n" not in str(caught.value)
    assert type(model[0]) is nn.Linear


@STORED
def test_swap_takes_scales(storage):
    linear = nn.Linear(12, 8, dtype=torch.bfloat16)
    model = nn.Sequential(linear)
    factors = random_factors(12, 4, 8, storage)
    swap_(model, {"0": factors})
    layer = model[0]
    assert (type(layer), layer.storage, layer.dtype) == (SVDLinear, storage, torch.bfloat16)
    assert layer.bias is linear.bias
    assert torch.equal(layer.u.float(), factors[0].float())
    assert not layer.u.requires_grad
    with pytest.raises(RuntimeError):
        layer.weight @ torch.randn(8)


@STORED
def test_the_largest_values_are_taken(storage):
    stored, sizes = STORAGES[storage], ((12, 4), (4, 8))
    u, v = (stored.encode(torch.full(size, -float(stored.largest))) for size in sizes)
    scales = [torch.full(stored.shapes(*size)[1], 1e-3) for size in sizes]
    layer = SVDLinear.from_factors(u, v, None, *scales)
    assert float(stored.decode(layer.u, torch.float32).min()) == -stored.largest


@pytest.mark.parametrize(
    "stored",
    [("fp8",) * 3, ("int8",) * 3, (None,) * 3, ("fp8", "fp8", "int8"), ("int8", None, "int8")],
)
def test_an_mlp_of_any_storages_computes_its_projections(stored):
    torch.manual_seed(0)
    sizes = zip(((12, 16), (12, 16), (16, 12)), stored, strict=True)
    mlp = SVDMLP.from_projections(*[SVDLinear(*s, 3, False, storage=n) for s, n in sizes], "silu")
    x = torch.randn(5, 12)
    dense = [layer.to_linear() for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    expected = dense[2](nn.functional.silu(dense[0](x)) * dense[1](x))
    torch.testing.assert_close(mlp(x), expected, rtol=1e-3, atol=1e-5)


def test_the_constructor_of_an_mlp_has_a_storage():
    mlp = SVDMLP(12, 16, (3, 3, 3), storage="int8", dtype=torch.bfloat16)
    assert all(layer.storage == "int8" for layer in mlp.children())
    assert mlp(torch.zeros(2, 12, dtype=torch.bfloat16)).shape == (2, 12)
