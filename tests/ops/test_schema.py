"""The registration: what `opcheck` checks, and the autograd formulas."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from operands import ACTIVATIONS, OPS, PLAIN, doubled, make, names_of, shapes_of
from tolerances import assert_close_to_oracle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuronmm_ops import ops
from neuronmm_ops.ops.backends import xla
from neuronmm_ops.ops.definitions import SPECS

OPCHECK_UTILS = (
    *("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
)
LOW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("contiguous", "transposed", "sliced")
OVERLOADS = {op: getattr(torch.ops.neuronmm, op).default for op in OPS}
BIASED = tuple(op for op in OPS if SPECS[op].operands[-1].role == "bias")
CASES = (*OPS, *(f"{op}+bias" for op in BIASED), "mlp+x_up")


def operands_of(
    case: str,
    lead: Sequence[int] = (2, 3),
    dtype: torch.dtype = torch.float64,
    layout: str = "contiguous",
) -> list[Tensor]:
    """Return the tensors of a case: x, the factors, then a bias or an x_up if it has one."""
    op, _, optional = case.partition("+")
    generator = torch.Generator().manual_seed(1)
    shapes = shapes_of(op, lead, optional=bool(optional))
    return [make(shape, dtype, layout, generator) for shape in shapes]


def name_of(case: str) -> str:
    return case.partition("+")[0]


def public(case: str) -> Callable[..., Tensor]:
    return getattr(ops, name_of(case))


def test_schemas_are_the_documented_ones():
    assert {name: str(overload._schema) for name, overload in OVERLOADS.items()} == {
        "xuv": (
            "neuronmm::xuv(Tensor x, Tensor u, Tensor v, Tensor? bias=None, "
            'Tensor? u_scale=None, Tensor? v_scale=None, str compute="x") -> Tensor'
        ),
        "xw": (
            "neuronmm::xw(Tensor x, Tensor w, Tensor? bias=None, Tensor? w_scale=None, "
            'str compute="x") -> Tensor'
        ),
        "mlp": (
            "neuronmm::mlp(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, "
            'Tensor? x_up=None, str activation="silu", Tensor? w_gate_scale=None, '
            'Tensor? w_up_scale=None, Tensor? w_down_scale=None, str compute="x") -> Tensor'
        ),
        "svd_mlp": (
            "neuronmm::svd_mlp(Tensor x, Tensor u_gate, Tensor v_gate, Tensor u_up, Tensor v_up, "
            'Tensor u_down, Tensor v_down, str activation="silu", Tensor? u_gate_scale=None, '
            "Tensor? v_gate_scale=None, Tensor? u_up_scale=None, Tensor? v_up_scale=None, "
            'Tensor? u_down_scale=None, Tensor? v_down_scale=None, str compute="x") -> Tensor'
        ),
        "svd_qkv": (
            "neuronmm::svd_qkv(Tensor x, Tensor u_query, Tensor v_query, Tensor u_key, "
            "Tensor v_key, Tensor u_value, Tensor v_value, Tensor? bias_query=None, "
            "Tensor? bias_key=None, Tensor? bias_value=None, Tensor? u_query_scale=None, "
            "Tensor? v_query_scale=None, Tensor? u_key_scale=None, Tensor? v_key_scale=None, "
            "Tensor? u_value_scale=None, Tensor? v_value_scale=None, "
            'str compute="x") -> Tensor'
        ),
    }
    assert all(torch.Tag.pt2_compliant_tag in overload.tags for overload in OVERLOADS.values())


@pytest.mark.parametrize("op", OPS)
def test_a_schema_read_from_a_signature_is_the_ops(op):
    """torch_neuronx makes ops of the dispatch implementations, by their signatures."""
    for function in (SPECS[op].reference, xla.IMPLEMENTATIONS[op], getattr(ops, op)):
        schema = torch.library.infer_schema(function, mutates_args=())
        assert f"neuronmm::{op}{schema}" == str(OVERLOADS[op]._schema)


@pytest.mark.parametrize("op", OPS)
def test_an_implementation_takes_keywords_and_defaults(op):
    spec, tensors = SPECS[op], operands_of(op)
    keywords = dict(zip(names_of(op), tensors, strict=False))
    missing = [None] * (len(spec.operands) - len(tensors))
    choices = [values[0] for values in spec.choices.values()]
    scales = [*[None] * len(spec.scales), "x"] if spec.is_scaled else []
    expected = [*tensors, *missing, *choices, *scales]
    for found in (spec.complete(tuple(tensors), {}), spec.complete((), keywords)):
        assert len(found) == len(expected)
        assert all(a is b or a == b for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("case", ["xuv+bias", "xw", "mlp+x_up", "svd_mlp", "svd_qkv+bias"])
def test_opcheck(case, grad, dtype, layout):
    inputs = [
        t.detach().requires_grad_(grad) for t in operands_of(case, dtype=dtype, layout=layout)
    ]
    torch.library.opcheck(OVERLOADS[name_of(case)], tuple(inputs), test_utils=OPCHECK_UTILS)


@pytest.mark.parametrize("lead", [(), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize(
    "case", ["xuv", "xw+bias", "mlp", "mlp+x_up", "svd_mlp", "svd_qkv", "svd_qkv+bias"]
)
def test_opcheck_at_the_edges(case, lead):
    inputs = [t.requires_grad_() for t in operands_of(case, lead, torch.float32)]
    torch.library.opcheck(OVERLOADS[name_of(case)], tuple(inputs), test_utils=OPCHECK_UTILS)


ACTIVATED = [("svd_mlp", name) for name in ACTIVATIONS]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("case", "lead", "options"),
    [
        *[(case, lead, ()) for case in CASES for lead in ((), (3,), (2, 3), (0,))],
        *[(case, (2,), (name,)) for case, name in ACTIVATED],
    ],
    ids=str,
)
def test_first_and_second_derivatives(case, lead, options):
    inputs = [t.requires_grad_() for t in operands_of(case, lead)]
    torch.autograd.gradcheck(public(case), (*inputs, *options), check_forward_ad=True)
    torch.autograd.gradgradcheck(public(case), (*inputs, *options))


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], seed: Tensor, *options: str
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves, *options), leaves, seed.to(leaves[0].dtype))


@pytest.mark.parametrize(
    ("case", "dtype", "layout", "options"),
    [
        *itertools.product(CASES, [*LOW_DTYPES, torch.float64], LAYOUTS, [()]),
        *[(case, torch.float32, "contiguous", (name,)) for case, name in ACTIVATED],
    ],
    ids=str,
)
def test_gradients_match_composite_autograd_in_fp64(case, dtype, layout, options):
    inputs = operands_of(case, (4, 5), dtype, layout)
    plain = PLAIN[name_of(case)]
    plain = partial(plain, activation=options[0]) if options else plain
    seed = make(public(case)(*inputs).shape, dtype, layout)
    actual = gradients(public(case), inputs, seed, *options)
    oracle = gradients(plain, doubled(*inputs), seed)
    low = gradients(plain, inputs, seed)
    for a, o, p in zip(actual, oracle, low, strict=True):
        assert_close_to_oracle(a, o, p)


class CountMatmuls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


# Matmuls that the backward needs when only this one operand wants a gradient.
NEEDED = {
    "xuv+bias": [2, 2, 2, 0],
    "xw+bias": [1, 1, 0],
    "svd_qkv+bias": [6, *[2] * 6, 0, 0, 0],
    # 4 to recompute gate and up, then 2 down to the hidden gradient and what lies below it.
    # 2 to recompute gate and up, then 1 down to the hidden gradient.
    "mlp": [2 + 1 + 2, 2 + 1 + 1, 2 + 1 + 1, 2 + 1],
    "mlp+x_up": [2 + 1 + 1, 2 + 1 + 1, 2 + 1 + 1, 2 + 1, 2 + 1 + 1],
    "svd_mlp": [4 + 2 + 4, 4 + 2 + 2, 4 + 2 + 2, 4 + 2 + 2, 4 + 2 + 2, 4 + 2, 4 + 2],
}


@pytest.mark.parametrize(
    ("case", "index"), [(case, i) for case, counts in NEEDED.items() for i in range(len(counts))]
)
def test_only_wanted_gradients_are_computed(case, index):
    inputs = operands_of(case)
    inputs[index].requires_grad_()
    output = public(case)(*inputs)
    with CountMatmuls() as matmuls:
        output.backward(torch.ones_like(output))
    assert [t.grad is not None for t in inputs] == [i == index for i in range(len(inputs))]
    assert matmuls.count == NEEDED[case][index]


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_each_bias_of_several_has_its_own_gradient(given):
    inputs = operands_of("svd_qkv+bias")
    mixed = [t if n < 7 or n - 7 in given else None for n, t in enumerate(inputs)]
    leaves = [mixed[7 + n].requires_grad_() for n in given]
    expected = torch.autograd.grad(PLAIN["svd_qkv"](*mixed).square().sum(), leaves)
    actual = torch.autograd.grad(ops.svd_qkv(*mixed).square().sum(), leaves)
    for own, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_recorded_without_gradients(case, guard):
    inputs = [t.requires_grad_() for t in operands_of(case)]
    saved = []
    with guard(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        direct = OVERLOADS[name_of(case)](*inputs)
        output = public(case)(*inputs)
    assert torch.equal(direct, output)
    assert not saved
    for y in (direct, output):
        assert not y.requires_grad
        assert y.grad_fn is None


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_recorded_where_they_are_wanted(case):
    inputs = operands_of(case)
    assert not public(case)(*inputs).requires_grad
    for wanted in inputs:
        wanted.requires_grad_()
        assert public(case)(*inputs).requires_grad
        assert OVERLOADS[name_of(case)](*inputs).requires_grad
        wanted.requires_grad_(False)
