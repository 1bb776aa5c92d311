"""Factors of one byte an element: values, gradients, fakes and refusals of every op."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operands import DTYPES, PLAIN, generators, leading, magnitude_of, one_byte_call, widths
from tolerances import assert_close_to_oracle
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from neuronmm_ops import ops
from neuronmm_ops.nn.nearest import nearest
from neuronmm_ops.ops.backends import cpu_one_byte
from neuronmm_ops.ops.backends.launch import DTYPE_NAMES
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.products import rounded_to_fp8
from neuronmm_ops.storages import STORAGES, dequantized

FP8 = torch.float8_e4m3fn
ONE_BYTE = (torch.int8, FP8)
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OPS = tuple(op for op, spec in SPECS.items() if spec.is_scaled and not spec.states)


def plain_call(op: str, tensors: dict[str, Tensor], dtype: torch.dtype) -> list[Any]:
    """Arguments of the op written out in plain torch, factors dequantized in a dtype."""
    arguments: list[Any] = []
    for operand in SPECS[op].operands:
        tensor = tensors.get(operand.name)
        if operand.role == "factor" and tensor is not None:
            tensor = dequantized(tensor, tensors[f"{operand.name}_scale"], torch.float64)
        arguments.append(None if tensor is None else tensor.to(dtype))
    return arguments


def assert_right(op: str, tensors: dict[str, Tensor]) -> None:
    x_dtype = tensors["x"].dtype
    exact = plain_call(op, tensors, torch.float64)
    low = PLAIN[op](*plain_call(op, tensors, x_dtype))
    actual = getattr(ops, op)(**tensors)
    assert_close_to_oracle(actual, PLAIN[op](*exact), low, magnitude_of(op, *exact))


@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
@settings(max_examples=60)
def test_values_are_those_of_the_oracle(op, data):
    sizes = {size for operand in SPECS[op].operands for size in operand.sizes}
    chosen = {size: data.draw(widths) for size in sorted(sizes)}
    tensors = one_byte_call(
        op,
        data.draw(st.sampled_from(ONE_BYTE)),
        data.draw(st.sampled_from(DTYPES)),
        tuple(data.draw(leading)),
        data.draw(generators),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        **chosen,
    )
    assert_right(op, tensors)


@pytest.mark.parametrize("op", OPS)
@given(data=st.data(), target=st.sampled_from(["trn1", "trn2", "trn3"]))
@settings(max_examples=25)
def test_the_simulated_op_has_the_values_of_the_oracle(op, data, target):
    sizes = {size for operand in SPECS[op].operands for size in operand.sizes}
    chosen = {size: data.draw(st.integers(1, 200)) for size in sorted(sizes)}
    x_dtype = data.draw(st.sampled_from(tuple(DTYPE_NAMES)))
    lead = (data.draw(st.sampled_from([1, 7, 130])),)
    tensors = one_byte_call(op, data.draw(st.sampled_from(ONE_BYTE)), x_dtype, lead, **chosen)
    with ops.use_impl("simulated", target=target):
        assert_right(op, tensors)


@pytest.mark.parametrize("M", [1, 4, 5, 33])
@pytest.mark.parametrize("K", [32, 64, 77, 96])
@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
def test_every_path_of_the_cpu(M, K, dtype, monkeypatch):
    """torch's int8 kernel, which reads past rows of other lengths, and strips of any width."""
    monkeypatch.setattr(cpu_one_byte, "_STRIP_BYTES", 2**11)
    monkeypatch.setattr(cpu_one_byte, "_MIN_STRIP", 16)
    for x_dtype in DTYPES:
        for by_column in (True, False):
            assert_right(
                "xuv", one_byte_call("xuv", dtype, x_dtype, (M,), by_column=by_column, K=K)
            )


def test_every_code_of_fp8_is_widened_exactly():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(FP8).float().isfinite()].unsqueeze(1).view(FP8)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        wide, factor = STORAGES["fp8"].widened(codes, torch.ones(1), dtype)
        assert torch.equal(wide.double() * factor, codes.double())


class Made(TorchDispatchMode):
    """Dtypes of the matrices of a size that are made below it."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.dtypes = numel, set[torch.dtype]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.numel() == self.numel:
            self.dtypes.add(made.dtype)
        return made


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("dtype", "multiplied_in"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_other_devices_widen_no_further_than_they_must(storage, dtype, multiplied_in):
    of_w, of_scale = STORAGES[storage].shapes(64, 48)
    x, scale = torch.empty(3, 64, dtype=dtype, device="meta"), torch.empty(of_scale, device="meta")
    w = torch.empty(of_w, dtype=STORAGES[storage].torch_dtype, device="meta")
    with Made(64 * 48) as made:
        assert cpu_one_byte.scaled_mm(x, w, scale).dtype == dtype
    assert made.dtypes == {multiplied_in}


def test_float16_does_not_overflow_between_the_products():
    tensors = one_byte_call("xuv", torch.int8, torch.float16, K=2048)
    tensors["x"].fill_(10)
    tensors["u"].fill_(127)
    assert_right("xuv", tensors)


def test_rows_are_rounded_to_e4m3_times_a_power_of_two():
    x = torch.randn(50, 300) * torch.logspace(-20, 15, 50).unsqueeze(1)
    x[7] = 0
    rounded = rounded_to_fp8(x)
    assert torch.equal(rounded[7], x[7])
    assert torch.equal(rounded_to_fp8(rounded.double()[8:9] * 4), rounded.double()[8:9] * 4)
    # half a unit in the last of 4 bits, or half the least subnormal, of the row's mean square
    rms = x.square().mean(1, keepdim=True).sqrt()
    assert ((rounded - x).abs() <= (x.abs() / 16).clamp_min(rms * 2**-9)).all()
    for dtype in (torch.bfloat16, torch.float16):
        same = rounded_to_fp8(x[20:28].to(dtype))
        assert same.dtype == dtype
        assert same.isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_products_in_fp8_round_every_operand(op):
    tensors = one_byte_call(op, FP8, torch.float32, (9,))
    exact, loose = (getattr(ops, op)(**tensors, compute=compute) for compute in ("x", "fp8"))
    error = (loose - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.1
    if op == "xw":
        given = rounded_to_fp8(tensors["x"])
        assert torch.equal(loose, ops.xw(**{**tensors, "x": given}))


@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_x_and_the_bias_have_the_gradients_of_dequantized_factors(op, dtype):
    tensors = one_byte_call(op, dtype, torch.float64)
    exact = plain_call(op, tensors, torch.float64)
    places = [n for n, o in enumerate(SPECS[op].operands) if o.role in ("activation", "bias")]
    leaves = [tensors[SPECS[op].operands[n].name].requires_grad_() for n in places]
    plain = [exact[n].detach().requires_grad_() for n in places]
    for n, leaf in zip(places, plain, strict=True):
        exact[n] = leaf
    expected = torch.autograd.grad(PLAIN[op](*exact).square().sum(), plain)
    actual = torch.autograd.grad(getattr(ops, op)(**tensors).square().sum(), leaves)
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other)
    torch.autograd.gradcheck(lambda x: getattr(ops, op)(**{**tensors, "x": x}), leaves[:1])


@pytest.mark.parametrize("name", ["u", "u_scale"])
def test_a_gradient_of_what_has_none_is_refused(name):
    tensors = one_byte_call("xuv", FP8, torch.float32)
    tensors[name].requires_grad_()
    with pytest.raises(TypeError, match=rf"^xuv: one-byte .* got {name} that requires one; use"):
        ops.xuv(**tensors)
    with torch.no_grad():
        assert ops.xuv(**tensors).isfinite().all()


@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, dtype):
    tensors = one_byte_call(op, dtype, torch.float32)
    overload = getattr(torch.ops.neuronmm, op).default
    given = tensors | {"x": tensors["x"].requires_grad_()}
    # its schema check computes with copies of all tensors, and torch has no arithmetic in fp8
    checks = [*CHECKS, *(["test_schema"] if dtype != FP8 else [])]
    torch.library.opcheck(overload, (), given, test_utils=checks)


@pytest.mark.parametrize("op", OPS)
def test_fakes_compilers_and_export(op):
    tensors = one_byte_call(op, torch.int8, torch.bfloat16)
    expected = getattr(ops, op)(**tensors)
    mode = FakeTensorMode()
    fake = getattr(ops, op)(**{name: mode.from_tensor(t) for name, t in tensors.items()})
    assert (fake.shape, fake.dtype) == (expected.shape, expected.dtype)

    class Module(torch.nn.Module):
        def forward(self, tensors):
            return getattr(ops, op)(**tensors)

    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tensors), expected)
    program = torch.export.export(Module(), (tensors,))
    assert torch.equal(program.module()(tensors), expected)


def test_autocast_casts_x_and_the_bias_alone():
    tensors = one_byte_call("xuv", FP8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.xuv(**tensors)
    cast = {n: tensors[n].bfloat16() for n in ("x", "bias")}
    assert torch.equal(y, ops.xuv(**{**tensors, **cast}))


REFUSALS = {
    "no scale": ({"v_scale": None}, ValueError, "factors in .* no v_scale; pass it"),
    "scales of others": (
        {"u": torch.ones(64, 24), "v": torch.ones(24, 40)},
        *(ValueError, "others have none, got factors in torch.float32 and u_scale; leave it out"),
    ),
    "two dtypes": (
        {"v": torch.ones(24, 40).to(FP8)},
        *(TypeError, f"u and v must have the same dtype, got torch.int8 and {FP8}; cast one"),
    ),
    "scale in another dtype": (
        {"u_scale": torch.ones(24).double()},
        *(TypeError, "u_scale must be torch.float32, got torch.float64; cast it"),
    ),
    "scale of another size": (
        {"u_scale": torch.ones(23)},
        ValueError,
        r"u_scale must have shape \[r\] with r the columns of u, got u_scale \[23\] and u",
    ),
    "scale elsewhere": (
        {"v_scale": torch.ones(40, device="meta")},
        *(TypeError, "x and v_scale must be on the same device"),
    ),
    "a matrix of scales": (
        {"v_scale": torch.ones(1, 40)},
        *(ValueError, r"v_scale must have shape \[N\]"),
    ),
    "fp8 products of int8": (
        {"compute": "fp8"},
        *(TypeError, f"compute='fp8' needs factors in {FP8}, got torch.int8; use compute='x'"),
    ),
    "unknown products": ({"compute": "fp4"}, ValueError, "compute must be one of x, fp8; got"),
    "bias in one byte": (
        {"bias": torch.ones(40, dtype=torch.int8)},
        *(TypeError, "x and bias must have the same dtype"),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_line(name):
    change, error, says = REFUSALS[name]
    call = {**one_byte_call("xuv", torch.int8, torch.float32), **change}
    with pytest.raises(error, match=rf"^xuv: .*{says}") as refusal:
        ops.xuv(**call)
    assert "\n" not in str(refusal.value)


def test_one_scale_of_several_that_is_missing_is_named():
    call = one_byte_call("svd_qkv", FP8, torch.float32)
    call.pop("v_key_scale")
    with pytest.raises(ValueError, match=r"^svd_qkv: factors in .* no v_key_scale; pass it$"):
        ops.svd_qkv(**call)


def int4_call(op: str) -> dict[str, Tensor]:
    """Operands of 3 tokens with factors in int4, of even sizes; one has more rows than a group."""
    spec = SPECS[op]
    names = {name for operand in spec.operands for name in operand.sizes if not name.isdigit()}
    sizes = {name: 6 + 2 * n for n, name in enumerate(sorted(names))} | {"K": 140}
    tensors: dict[str, Tensor] = {}
    for operand, shape in zip(spec.operands, spec.shapes(sizes, (3,)), strict=True):
        tensors[operand.name] = torch.randn(shape) / 8
        if operand.role == "factor":
            stored = nearest(tensors[operand.name], STORAGES["int4"])
            tensors[operand.name], tensors[f"{operand.name}_scale"] = stored
    return tensors


@pytest.mark.parametrize("op", OPS)
def test_int4(op):
    tensors = int4_call(op)
    if op in PLAIN:
        assert_right(op, tensors)
    overload = getattr(torch.ops.neuronmm, op).default
    torch.library.opcheck(overload, (), tensors, test_utils=CHECKS)
    scale = next(name for name in tensors if name.endswith("_scale"))
    with pytest.raises(ValueError, match=f"{scale} must have shape"):
        overload(**tensors | {scale: tensors[scale][0]})


def test_int4_packs_two_rows():
    with pytest.raises(ValueError, match=r"int4 packs two rows in a byte: .* got 5; use another"):
        nearest(torch.ones(5, 4), STORAGES["int4"])
