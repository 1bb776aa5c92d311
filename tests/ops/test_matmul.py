"""Products on a CPU without units for the dtype: values, layouts, and who may ask for them."""

import pytest
import torch
from operands import LAYOUTS, doubled, make, mlp_shapes, plain_svd_mlp, plain_xuv
from slow_cpu import NarrowProducts, make_slow
from tolerances import assert_close_to_oracle
from torch import Tensor
from torch.profiler import profile

from neuronmm_ops import SVDLinear, ops
from neuronmm_ops.nn import relayout_
from neuronmm_ops.ops.backends import cpu
from neuronmm_ops.ops.definitions import xuv

SLOW = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make_slow(monkeypatch)
    # Small tensors in many strips.
    monkeypatch.setattr(cpu, "_STRIP", 64)
    monkeypatch.setattr(cpu, "_MIN_STRIP", 3)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(40, 20, 7), (7, 20, 40), (1, 20, 40), (9, 1, 9), (0, 5, 6)])
@pytest.mark.parametrize("dtype", SLOW, ids=str)
def test_products_match_the_fp64_oracle(dtype, sizes, layout, bias):
    M, K, N = sizes
    a, b = make((M, K), dtype, layout), make((K, N), dtype, layout)
    c = make((N,), dtype) if bias else None
    with torch.no_grad():
        y = cpu.mm(a, b, c)
    operands = [a, b, torch.zeros(N, dtype=dtype) if c is None else c]
    oracle, low = (torch.addmm(z, x, y) for x, y, z in (doubled(*operands), operands))
    assert_close_to_oracle(y, oracle, low)
    assert y.is_contiguous()


@pytest.mark.parametrize("rows", [1, 4, 5, 64])
@pytest.mark.parametrize("dtype", SLOW, ids=str)
def test_only_a_few_dot_products_are_narrow(dtype, rows):
    layer = relayout_(SVDLinear(600, 520, 512, dtype=dtype))
    x = make((rows, 600), dtype)
    with torch.no_grad(), NarrowProducts() as products:
        xuv.reference(x, layer.u, layer.v)  # past the dispatcher, which the counter cannot see into
    assert len(products.shapes) == (2 if 1 < rows < 5 else 0)  # one row is a vector


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("dtype", SLOW, ids=str)
def test_no_gradient_is_a_narrow_product(dtype, rows):
    layer = relayout_(SVDLinear(40, 30, 8, dtype=dtype))
    x = make((rows, 40), dtype).requires_grad_()
    y = layer(x)
    with NarrowProducts() as products:
        y.backward(make((rows, 30), dtype))
    # Of x @ u, which is formed again, a few dot products.
    assert len(products.shapes) <= 1
    assert all(shape[0] <= 4 for shape in products.shapes)


def gradients(leaves: list[Tensor], seed: Tensor, plain: bool) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    function = (plain_xuv if plain else ops.xuv) if len(leaves) == 3 else None
    function = function or (plain_svd_mlp if plain else ops.svd_mlp)
    return list(torch.autograd.grad(function(*leaves), leaves, seed.to(leaves[0].dtype)))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("shapes", [[(12, 9), (9, 14)], mlp_shapes(12, 21, 14)], ids=["xuv", "mlp"])
@pytest.mark.parametrize("dtype", SLOW, ids=str)
def test_gradients_match_the_fp64_oracle(dtype, shapes, layout):
    leaves = [make((11, 12), dtype), *(make(shape, dtype, layout) for shape in shapes)]
    seed = make((11, 14), dtype)
    actual, low = gradients(leaves, seed, False), gradients(leaves, seed, True)
    for a, o, p in zip(actual, gradients(doubled(*leaves), seed, True), low, strict=True):
        assert_close_to_oracle(a, o, p)


def test_second_derivatives_of_a_slow_dtype():
    def second(x: Tensor, u: Tensor, v: Tensor, function) -> Tensor:
        x, u, v = (t.detach().clone().requires_grad_() for t in (x, u, v))
        (first,) = torch.autograd.grad(function(x, u, v).square().sum(), u, create_graph=True)
        return torch.autograd.grad(first.square().sum(), v)[0]

    operands = [make(shape, torch.bfloat16) for shape in ((9, 12), (12, 5), (5, 7))]
    actual, low = second(*operands, ops.xuv), second(*operands, plain_xuv)
    assert_close_to_oracle(actual, second(*doubled(*operands), plain_xuv), low)


@pytest.mark.parametrize("op", ["xuv", "xw", "svd_mlp"])
def test_opcheck_on_a_slow_cpu(op):
    factors = {"xuv": [(6, 3), (3, 5)], "xw": [(6, 5)], "svd_mlp": mlp_shapes(6, 7, 5)}[op]
    inputs = [make(s, torch.bfloat16).requires_grad_() for s in ((5, 6), *factors)]
    overload = getattr(torch.ops.neuronmm, op).default
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(overload, tuple(inputs), test_utils=utils)


def test_a_traced_training_step_is_the_eager_one():
    layer = SVDLinear(12, 7, 5, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (9, 11):
        x = make((rows, 12), torch.bfloat16)
        grads = [
            torch.autograd.grad(run(x).square().sum(), layer.parameters())
            for run in (layer, compiled)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relaid", [False, True])
def test_gradients_lie_in_memory_as_their_factors_do(dtype, relaid):
    layer = SVDLinear(12, 7, 5, bias=False, dtype=dtype)
    if relaid:
        relayout_(layer)
    grads = torch.autograd.grad(layer(make((9, 12), dtype)).sum(), (layer.u, layer.v))
    assert [g.stride() for g in grads] == [layer.u.stride(), layer.v.stride()]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", SLOW, ids=str)
def test_one_thread_sums_the_rows_of_a_contiguous_matrix(dtype, threads, monkeypatch):
    monkeypatch.setattr(cpu, "_MIN_SUMMED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    a, b = make((1, 40), dtype), make((40, 24), dtype)
    with torch.no_grad():
        with profile() as calls:
            y = cpu.mm(a, b)
        assert y.shape == (1, 24)
        assert_close_to_oracle(y, a.double() @ b.double(), a @ b)
        summed = any("embedding_bag" in event.key for event in calls.key_averages())
        assert summed == (threads == 1)
