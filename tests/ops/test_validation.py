"""Every rule on the arguments: its exception, its text, on real, fake and meta tensors."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from operands import OPS, make, names_of, shapes_of, weight_shapes_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from neuronmm_ops import ops
from neuronmm_ops.ops.definitions import SPECS

OPERANDS = {op: names_of(op) for op in OPS}
GOOD = {"K": 8, "K_up": 5, "I": 7, "N": 6, "r": 4, "N_query": 3, "N_key": 2, "N_value": 1}
SHAPES = {op: shapes_of(op, **GOOD) for op in OPS}
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One broken call: what differs from a good one, and what the error must say."""

    op: str
    change: dict[str, Any]  # operand -> shape or dtype; "*" -> dtype of all; activation -> str
    error: type[Exception]
    says: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op}-" + ",".join(f"{k}={v}" for k, v in self.change.items())

    def arguments(self, device: str) -> tuple[list[Tensor | None], list[str]]:
        tensors = []
        for name, shape in zip(OPERANDS[self.op], SHAPES[self.op], strict=True):
            change = self.change.get(name, self.change.get("*"))
            wanted = change if isinstance(change, tuple) else shape
            dtype = change if isinstance(change, torch.dtype) else torch.float32
            tensors.append(make(wanted, torch.float32, device="cpu").to(dtype).to(device))
        activation = self.change.get("activation")
        return tensors, [] if activation is None else [activation]


def _mixed(op: str, name: str, dtype: torch.dtype) -> Case:
    says = (f"x and {name} must have the same dtype", "torch.float32", str(dtype), ".to(dtype)")
    return Case(op, {name: dtype}, TypeError, says)


def _contraction(op: str, a: str, b: str, change: dict[str, Any], *shapes: list[int]) -> Case:
    says = (f"last dimension of {a} must equal first dimension of {b}", *map(str, shapes))
    return Case(op, change, ValueError, says)


def _value(op: str, name: str, value: Any, *says: str) -> Case:
    return Case(op, {name: value}, ValueError, says)


UNSUPPORTED = (torch.int64, torch.int8, torch.bool, torch.complex64, FLOAT8)
CASES = [
    *[
        Case(op, {changed: dtype}, TypeError, (*words, str(dtype)))
        for op in OPERANDS
        for dtype in UNSUPPORTED
        for changed, words in (("*", ["bfloat16, float16, float32 or float64"]), ("x", ["dtype"]))
    ],
    *[
        _mixed(op, name, dtype)
        for op, names in OPERANDS.items()
        for name in names[1:]
        for dtype in (torch.bfloat16, torch.float64, torch.int64)
    ],
    *[_value(op, "x", (), "x must have at least one dimension", "0-D") for op in OPERANDS],
    *[
        _value(
            op, OPERANDS[op][place], shape, f"{OPERANDS[op][place]} must be a matrix", str([*shape])
        )
        for op in OPS
        for place in SPECS[op].factors
        for shape in ((8,), (3, 8, 6), *([()] if op in ("xuv", "xw") else []))
    ],
    _contraction("xuv", "x", "u", {"x": (2, 3, 7)}, [2, 3, 7], [8, 4]),
    _contraction("xuv", "x", "u", {"x": (7,)}, [7], [8, 4]),
    _contraction("xuv", "x", "u", {"x": (3, 1)}, [3, 1], [8, 4]),
    _contraction("xuv", "x", "u", {"x": (0, 7)}, [0, 7], [8, 4]),
    _contraction("xuv", "x", "u", {"u": (1, 4)}, [2, 3, 8], [1, 4]),
    _contraction("xuv", "u", "v", {"v": (5, 6)}, [8, 4], [5, 6]),
    _contraction("xuv", "u", "v", {"u": (8, 1)}, [8, 1], [4, 6]),
    _contraction("xw", "x", "w", {"x": (3, 7)}, [3, 7], [8, 6]),
    _contraction("xw", "x", "w", {"x": (7,)}, [7], [8, 6]),
    _contraction("svd_mlp", "x", "u_gate", {"u_gate": (9, 3)}, [2, 3, 8], [9, 3]),
    _contraction("svd_mlp", "x", "u_up", {"u_up": (9, 4)}, [2, 3, 8], [9, 4]),
    _contraction("svd_mlp", "u_gate", "v_gate", {"v_gate": (9, 7)}, [8, 3], [9, 7]),
    _contraction("svd_mlp", "u_up", "v_up", {"v_up": (9, 7)}, [8, 4], [9, 7]),
    _contraction("svd_mlp", "u_down", "v_down", {"v_down": (9, 6)}, [7, 5], [9, 6]),
    _contraction("svd_mlp", "v_gate", "u_down", {"u_down": (9, 5)}, [3, 7], [9, 5]),
    _contraction("mlp", "x", "w_gate", {"w_gate": (9, 7)}, [2, 3, 8], [9, 7]),
    _contraction("mlp", "x_up", "w_up", {"w_up": (8, 7)}, [2, 3, 5], [8, 7]),
    _contraction("mlp", "x_up", "w_up", {"x_up": (2, 3, 1)}, [2, 3, 1], [5, 7]),
    _contraction("mlp", "w_gate", "w_down", {"w_down": (9, 6)}, [8, 7], [9, 6]),
    *[
        _value(
            *("mlp", "x_up", shape),
            *("x and x_up must have the same leading dimensions", "x [2, 3, 8]", str(list(shape))),
        )
        for shape in ((), (5,), (6, 5), (2, 1, 5), (1, 3, 5))  # one row would broadcast
    ],
    _value("mlp", "w_up", (5, 1), "w_gate and w_up", "same number of columns"),
    _contraction("svd_qkv", "x", "u_query", {"u_query": (9, 3)}, [2, 3, 8], [9, 3]),
    _contraction("svd_qkv", "x", "u_value", {"u_value": (1, 5)}, [2, 3, 8], [1, 5]),
    _contraction("svd_qkv", "u_key", "v_key", {"v_key": (9, 2)}, [8, 4], [9, 2]),
    *[
        _value(
            *("svd_qkv", f"bias_{name}", shape, f"bias_{name} must have shape [N_{name}]"),
            *(f"columns of v_{name}", str(list(shape))),
        )
        for name, shape in (("query", (1,)), ("key", (3,)), ("value", (1, 1)), ("key", ()))
    ],
    *[
        _value(
            *("svd_mlp", "v_up", shape, "v_gate and v_up must have the same number of columns"),
            *("[3, 7]", str(list(shape))),
        )
        for shape in ((4, 9), (4, 1))  # one column would broadcast over the other projection
    ],
    *[
        _value(
            *(op, "bias", shape, "bias must have shape [N]", f"columns of {name}"),
            *(f"bias {list(shape)}", "6]"),
        )
        for op, name in (("xuv", "v"), ("xw", "w"))
        for shape in [(1,), (1, 6), (7,), (6, 1), (6, 6), (), (0,)]
    ],
    *[
        _value(op, "activation", name, "activation must be one of", repr(name))
        for op in ("mlp", "svd_mlp")
        for name in ("tanh", "", "SiLU")
    ],
]


def check(case: Case, arguments: list[Tensor], extra: list[str]) -> None:
    with pytest.raises(case.error) as caught:
        getattr(ops, case.op)(*arguments, *extra)
    text = str(caught.value)
    assert caught.type is case.error
    assert text.startswith(f"{case.op}: ")
    assert "\n" not in text
    for fragment in case.says:
        assert fragment in text


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_broken_call_raises_on_tensors_of_every_kind(case):
    tensors, extra = case.arguments("cpu")
    check(case, tensors, extra)
    with torch.no_grad():
        check(case, tensors, extra)
    check(case, *case.arguments("meta"))
    mode = FakeTensorMode()
    check(case, [mode.from_tensor(t) for t in tensors], extra)
    if "*" not in case.change:
        check(case, [t.requires_grad_(t.is_floating_point()) for t in tensors], extra)


# Without a bias xuv lets the matmuls look for mistakes; these must see all of them, whichever
# matmul runs: for a batch, for rows, for one row, for none.
VIEWS = {
    "batch": lambda x: x,
    "rows": lambda x: x.flatten(0, -2),
    "row": lambda x: x.flatten(0, -2)[0],
    "no rows": lambda x: x.flatten(0, -2)[:0],
    "no batch": lambda x: x.unflatten(0, (-1, 1))[:0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.op[0] == "x" and "bias" not in c.change and c.change.get("x") != ()],
    ids=str,
)
def test_a_broken_call_without_bias_raises(case, view):
    tensors, _ = case.arguments("cpu")
    x = tensors[0]
    # A changed shape stays as it is.
    tensors[0] = x if isinstance(case.change.get("x"), tuple) else VIEWS[view](x)
    for guard in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with guard(), pytest.raises(case.error, match=f"^{case.op}: ") as caught:
            getattr(ops, case.op)(*tensors[:-1])
        assert caught.type is case.error


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, names in OPERANDS.items() for name in names[1:]]
)
def test_tensors_on_two_devices_raise(op, name):
    good = dict(zip(OPERANDS[op], (make(shape) for shape in SHAPES[op]), strict=True))
    with pytest.raises(TypeError, match=f"^{op}: .*same device, got .*(cpu|meta) and .*(cpu|meta)"):
        getattr(ops, op)(**{**good, name: good[name].to("meta")})


# torch's own words on nested tensors of layout strided.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_nested_tensor_is_refused(op, layout, guard):
    weights = [make(shape) for shape in weight_shapes_of(op, **GOOD)]
    x = torch.nested.nested_tensor([make((3, 8)), make((5, 8))], layout=layout)
    with guard(), pytest.raises(TypeError) as caught:
        getattr(ops, op)(x, *weights)
    assert str(caught.value) == (
        f"neuronmm ops take no nested tensor, got one of layout {layout}; "
        "unbind() it, or pad it with to_padded_tensor(0.0)"
    )
    padded = x.to_padded_tensor(0.0)
    for given in (padded, *x.unbind()):
        assert getattr(ops, op)(given, *weights).shape == (*given.shape[:-1], 6)


def test_x_stands_for_an_x_up_that_is_missing():
    x, w_gate, w_up, w_down, _ = (make(shape) for shape in SHAPES["mlp"])
    says = (
        r"^mlp: last dimension of x must equal first dimension of w_up, got x \[2, 3, 8\] and w_up"
    )
    with pytest.raises(ValueError, match=says):
        ops.mlp(x, w_gate, w_up, w_down)


@pytest.mark.parametrize("op", OPERANDS)
def test_the_good_call_is_good(op):
    tensors = [make(shape) for shape in SHAPES[op]]
    assert getattr(ops, op)(*tensors).shape == (2, 3, 6)
    keywords = dict(zip(OPERANDS[op], tensors, strict=True))
    assert torch.equal(getattr(ops, op)(**keywords), getattr(ops, op)(*tensors))
