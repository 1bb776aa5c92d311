"""Derivatives of every op in both modes and under torch.func, beside those of plain torch."""

import sys
from functools import partial
from types import FrameType

import pytest
import torch
from operands import OPS
from quantized import random_factors
from torch import Tensor
from torch.autograd import forward_ad

from neuronmm_ops import SVDLinear
from neuronmm_ops.ops.definitions import SPECS

SIZES = {"K": 7, "K_up": 6, "N": 5, "I": 9, "N_query": 5, "N_key": 4, "N_value": 3} | {
    f"r{end}": n
    for n, end in enumerate(("", "_gate", "_up", "_down", "_query", "_key", "_value"), 2)
}
# torch's own forward mode imports its deprecated TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
NAMES = pytest.mark.parametrize("name", OPS)


def op(name: str):
    return getattr(torch.ops.neuronmm, name)


def arguments(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).double() for shape in SPECS[name].shapes(SIZES, (2, 3))]


def plain(name: str, *args: Tensor) -> Tensor:
    """Return the op as torch's own formulas differentiate it."""
    if name == "xw":
        return args[0] @ args[1] + args[2]
    if name == "xuv":
        return args[0] @ args[1] @ args[2] + args[3]
    silu = torch.nn.functional.silu
    if name == "mlp":
        return silu(args[0] @ args[1]) * (args[4] @ args[2]) @ args[3]
    if name == "svd_mlp":
        gate, up = (args[0] @ args[n] @ args[n + 1] for n in (1, 3))
        return silu(gate) * up @ args[5] @ args[6]
    pairs = [args[0] @ args[n] @ args[n + 1] + args[7 + n // 2] for n in (1, 3, 5)]
    return torch.cat(pairs, -1)


@NAMES
def test_forward_mode(name):
    args = arguments(name)
    tangents = [torch.randn_like(t) for t in args]
    functions = op(name), partial(plain, name)
    results = [torch.func.jvp(f, tuple(args), tuple(tangents)) for f in functions]
    torch.testing.assert_close(*results)
    with forward_ad.dual_level(), torch.no_grad():
        dual = op(name)(forward_ad.make_dual(args[0], tangents[0]), *args[1:])
        found = forward_ad.unpack_dual(dual).tangent
    _, expected = torch.func.jvp(lambda x: plain(name, x, *args[1:]), (args[0],), (tangents[0],))
    torch.testing.assert_close(found, expected)


@NAMES
def test_transforms(name):
    args = arguments(name)
    places = tuple(range(len(args)))

    def gradients(f):
        return torch.func.grad(lambda *a: f(*a).square().sum(), places)

    ours, theirs = op(name), partial(plain, name)
    torch.testing.assert_close(gradients(ours)(*args), gradients(theirs)(*args))
    for dims in ((0, *[None] * (len(args) - 1)), (0,) * len(args)):
        batches = [
            torch.stack([t, 2 * t, -t]) if dim == 0 else t
            for t, dim in zip(args, dims, strict=True)
        ]
        for make in (lambda f: f, gradients, lambda f: torch.func.jacfwd(f)):
            found, expected = (torch.func.vmap(make(f), dims)(*batches) for f in (ours, theirs))
            torch.testing.assert_close(found, expected)


@NAMES
def test_second_derivatives(name):
    x, *rest = arguments(name)

    def loss(x, function):
        return function(x, *rest).square().sum()

    found, expected = (torch.func.hessian(loss)(x, f) for f in (op(name), partial(plain, name)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_scaled_factors(storage):
    u, v, u_scale, v_scale = random_factors(7, 3, 5, storage)
    x, tangent = torch.randn(4, 7).double(), torch.randn(4, 7).double()
    wide_u, wide_v = u.double() * u_scale, v.double() * v_scale

    def ours(x):
        return torch.ops.neuronmm.xuv(x, u, v, None, u_scale, v_scale)

    found, expected = (
        torch.func.jvp(f, (x,), (tangent,)) for f in (ours, lambda x: x @ wide_u @ wide_v)
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.vmap(ours)(x), ours(x))
    with pytest.raises(TypeError, match="one-byte factors and their scales have no gradient"):
        torch.func.jvp(
            lambda s: torch.ops.neuronmm.xuv(x, u, v, None, s, v_scale), (u_scale,), (u_scale,)
        )


def test_a_compiled_tangent():
    layer, x = SVDLinear(7, 5, 3).double(), torch.randn(4, 7).double()

    def tangent(x):
        return torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]

    compiled = torch.compile(tangent, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), torch.ones_like(x) @ layer.u @ layer.v)


@pytest.mark.parametrize(("is_differentiated", "most"), [(False, 6), (True, 20)])
def test_a_call_runs_few_functions_of_python(is_differentiated, most):
    x, u, v = (torch.randn(*s, requires_grad=is_differentiated) for s in ((1, 8), (8, 4), (4, 8)))
    called: list[str] = []

    def told(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    torch.ops.neuronmm.xuv(x, u, v)  # the first call builds what the others share
    sys.setprofile(told)
    try:
        torch.ops.neuronmm.xuv(x, u, v)
    finally:
        sys.setprofile(None)
    assert 1 <= len(called) <= most, called
