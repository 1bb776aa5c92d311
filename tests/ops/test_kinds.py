"""Operands of every kind on the whole road, in the ops of `kinds`."""

from dataclasses import replace

import pytest
import torch
from kinds import (
    ADD_NORM,
    APPEND,
    GATE_UP,
    KINDS,
    add_norm,
    append,
    gate_up_backward,
    install,
    operands,
)
from tolerances import assert_close_to_oracle
from torch.autograd import forward_ad
from torch.distributed.tensor import Replicate, Shard

import neuronmm_ops as nm
from neuronmm_ops.ops.backends.hlo import Array, CustomCall, module_of
from neuronmm_ops.ops.backends.launch import launch_of, launch_parts
from neuronmm_ops.ops.backends.simulated import _simulate
from neuronmm_ops.ops.spec import OpSpec
from neuronmm_ops.parallel.distributed_ops import shardings
from neuronmm_ops.plan import plan_op

OPS = torch.ops.neuronmm
# torch's own forward mode imports its deprecated TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@pytest.fixture
def folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    install(monkeypatch)


def appended(x, cache, position):
    """The cache with the new rows, which the op returns nowhere."""
    cache = cache.clone()
    assert OPS.append(x, cache, position) is None
    return cache


def test_the_schemas_say_what_is_changed_and_returned():
    assert [spec.schema for spec in KINDS] == [
        "add_norm(Tensor x, Tensor weight, Tensor residual, float eps=1e-06) -> (Tensor, Tensor)",
        "append(Tensor x, Tensor(a1!) cache, Tensor position) -> ()",
        "gate_up(Tensor x, Tensor w) -> Tensor",
    ]


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.name)
def test_opcheck(spec):
    torch.library.opcheck(getattr(OPS, spec.name).default, operands(spec))


def test_a_compiled_call_is_one_graph():
    for spec in (ADD_NORM, GATE_UP):
        op, tensors = getattr(OPS, spec.name), operands(spec, (2, 3))
        compiled = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*tensors), op(*tensors))
    compiled = torch.compile(appended, fullgraph=True, dynamic=True, backend="aot_eager")
    for position in (7, 11):  # read at run time
        x, cache, _ = operands(APPEND)
        y = compiled(x, cache, torch.tensor([position], dtype=torch.int32))
        assert torch.equal(y[position : position + 6], x)
        assert torch.equal(y[:position], cache[:position])


def test_derivatives_of_vectors_packed_weights_and_several_outputs():
    for spec in (ADD_NORM, GATE_UP):
        op, tensors = getattr(OPS, spec.name), operands(spec, (2, 2), torch.float64)
        tensors = [t.detach()[..., :5].contiguous().requires_grad_() for t in tensors]
        if spec is GATE_UP:
            tensors[1] = tensors[1].detach()[:5].requires_grad_()
        assert torch.autograd.gradcheck(op, tensors, check_forward_ad=True)
        batched = torch.func.vmap(op, in_dims=(0, *[None] * (len(tensors) - 1)))
        x, *rest = tensors
        rest = [t[0] if t.dim() == x.dim() and spec is ADD_NORM else t for t in rest]
        expected = [op(one, *rest) for one in x]
        if spec is ADD_NORM:
            expected = tuple(torch.stack(parts) for parts in zip(*expected, strict=True))
        else:
            expected = torch.stack(expected)
        torch.testing.assert_close(batched(x, *rest), expected)


def test_a_gradient_of_one_of_two_outputs():
    tensors = operands(ADD_NORM, dtype=torch.float64)
    torch.testing.assert_close(
        *[torch.autograd.grad(f(*tensors)[1].sum(), tensors[1]) for f in (OPS.add_norm, add_norm)]
    )


def test_what_is_changed_in_place_has_no_gradient_and_no_transform():
    x, cache, position = operands(APPEND)
    message = "^append: the op has no gradient, and no rule for torch.func; call it under torch.no_"
    with pytest.raises(NotImplementedError, match=message):
        OPS.append(x.requires_grad_(), cache, position)
    with torch.no_grad():
        OPS.append(x, cache, position)
    x = x.detach()
    with pytest.raises(NotImplementedError, match=message):
        torch.func.vmap(lambda x: OPS.append(x, cache, position))(x[None])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        OPS.append(forward_ad.make_dual(x, x), cache, position)


def test_a_change_is_seen_by_autograd():
    x, cache, position = operands(APPEND)
    w = torch.randn(64, 2, requires_grad=True)
    y = cache @ w
    OPS.append(x, cache, position)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_spec_with_a_state_has_neither_gradient_nor_cuts():
    for changes in ({"backward": gate_up_backward}, {"cuts": ("K",)}):
        with pytest.raises(ValueError, match=r"^op: an op with a state has neither"):
            OpSpec("op", APPEND.operands, append, **changes)


def test_autocast_leaves_a_state():
    x, cache, position = operands(APPEND)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match=r"^append: x and cache must have the same dtype"):
            OPS.append(x, cache, position)
        narrow = cache.bfloat16()
        OPS.append(x, narrow, position)
    assert torch.equal(narrow[7:13], x.bfloat16())


@pytest.mark.parametrize(
    ("op", "place", "tensor", "message"),
    [
        ("add_norm", 1, torch.ones(63), "weight must have shape [K] with K the columns of x"),
        ("add_norm", 1, torch.ones(1, 64), "weight must have shape [K], got shape [1, 64]"),
        ("append", 2, torch.tensor([7]), "position must be torch.int32, got torch.int64"),
        ("append", 2, torch.ones(2).int(), "position must have shape [1], got shape [2]"),
        ("append", 1, torch.ones(40), "cache must have shape [S, K], got shape [40]"),
        ("append", 1, torch.ones(40, 63), "x and cache must have the same number of columns"),
        ("gate_up", 1, torch.ones(64, 3, 8), "w must have shape [K, 2, I], got shape [64, 3, 8]"),
        ("gate_up", 1, torch.ones(64, 16), "w must have shape [K, 2, I], got shape [64, 16]"),
        ("gate_up", 1, torch.ones(63, 2, 8), "K must be the same size in x and w, got x"),
    ],
)
def test_refusals(op, place, tensor, message):
    spec = {spec.name: spec for spec in KINDS}[op]
    tensors = operands(spec)
    tensors[place] = tensor
    with pytest.raises((ValueError, TypeError)) as refused:
        getattr(OPS, op)(*tensors)
    assert str(refused.value).startswith(f"{op}: {message}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_simulated_kernels_match_the_fp64_oracle(folders, dtype):
    for spec in (ADD_NORM, GATE_UP):
        tensors = [t.detach() for t in operands(spec, (2, 3), dtype)]
        with nm.use_impl("simulated", target="trn2"):
            y = getattr(OPS, spec.name)(*tensors)
        oracle, plain = spec.reference(*[t.double() for t in tensors]), spec.reference(*tensors)
        magnitude = spec.reference(*[t.double().abs() for t in tensors])
        assert nm.ops.last_profile().hbm_bytes > 0
        if spec is GATE_UP:
            y, oracle, plain, magnitude = ([each] for each in (y, oracle, plain, magnitude))
        for found in zip(y, oracle, plain, magnitude, strict=True):
            assert_close_to_oracle(*found)


def test_a_simulated_kernel_changes_its_operand(folders):
    for position in (0, 7, 34):  # one plan, one kernel
        x, cache, _ = operands(APPEND)
        integer = torch.tensor([position], dtype=torch.int32)
        with nm.use_impl("simulated", target="trn2"):
            y = appended(x, cache, integer)
        assert torch.equal(y, appended(x, cache, integer))
        strided = torch.zeros(64, 40).T
        with nm.use_impl("simulated", target="trn2"):
            OPS.append(x, strided, integer)
        assert torch.equal(strided[position : position + 6], x)


def test_the_search_knows_every_operand(folders):
    problem = launch_of(APPEND, tuple(operands(APPEND)), (), "trn2").plan.problem
    assert {name: rest for name, *rest in problem.others} == {
        "x": [(-1, 64), ""],
        "cache": [(40, 64), ""],
        "position": [(1,), "int32"],
    }
    plan = launch_of(GATE_UP, tuple(operands(GATE_UP)), (), "trn2").plan
    assert plan == plan_op("gate_up", 6, ((64, 2, 300),), "float32", "trn2")
    assert plan.arguments == {"block": 256}
    assert plan.problem.weight_elements == 64 * 2 * 300
    launch = launch_of(ADD_NORM, tuple(operands(ADD_NORM, (2, 3))), (1e-3,), "trn2")
    assert launch.arguments["eps"] == 1e-3
    assert launch.shapes == ((2, 3, 64), (2, 3, 64))


def test_more_tokens_than_a_launch_takes_are_refused_before_a_change(folders):
    x, cache, position = torch.ones(129, 64), torch.zeros(200, 64), torch.tensor([7]).int()
    with nm.use_impl("simulated"), pytest.raises(ValueError, match=r"^no plan of .* fits"):
        OPS.append(x, cache, position)
    launch = launch_of(APPEND, (x[:6], cache, position), (), "trn2")
    plan = replace(launch.plan, launches=(4, 2))
    with pytest.raises(ValueError, match=r"^append: one launch takes 4 tokens, got 6; call it"):
        launch_parts(replace(launch, plan=plan), (x[:6], cache, position), _simulate)
    assert not cache.any()


def test_a_custom_call_returns_a_tuple_whose_last_is_an_operand():
    x, cache = Array((6, 64), "float32"), Array((40, 64), "float32")
    call = CustomCall("Target", "config", 2)
    module = module_of("name", call, [x, cache], [x, cache], [x, cache], [x, cache], {1: 1})
    assert module.count(b"get-tuple-element") == 4  # name and opcode of two
    # output_operand_aliasing 74: output_shape_index [1], operand_index 1
    assert b"\xd2\x04\x05\x0a\x01\x01\x10\x01" in module


def test_dtensors_are_divided_by_the_names_of_their_sizes():
    x, w = operands(GATE_UP)
    whole, lead, columns = shardings(GATE_UP)(x, w)
    assert whole == ([Replicate()], [Replicate(), Replicate()])
    assert lead == ([Shard(0)], [Shard(0), Replicate()])
    assert columns == ([Shard(1)], [Replicate(), Shard(2)]), "gate and up are cut alike"
    _, lead = shardings(ADD_NORM)(*operands(ADD_NORM))
    assert lead == ([Shard(0)] * 2, [Shard(0), Replicate(), Shard(0)])
