"""An op's arguments, checked and planned; a kernel called on device tensors."""

import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
import stand_ins
import torch
from decoder_layers import operands
from operands import OPS, make, mlp_shapes, names_of, shapes_of, split_call
from splits import split_plans
from stand_ins import NeuronMachine
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from neuronmm_ops import kernels, ops, plan, use_impl
from neuronmm_ops.kernels import nki_kernel, source_fingerprint
from neuronmm_ops.ops.backends.launch import call_kernel, launch_here, launch_of, static_shape
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.plan import plan_op, plan_xuv, qkv_matrices

XUV = SPECS["xuv"]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[NeuronMachine]:
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:
        yield found


FP8 = {"weight_dtype": "float8_e4m3fn", "compute": "fp8"}
GATED = ((256, 96), (40, 96), (96, 24))
X_UP = (("x_up", (-1, 40), ""),)


def test_layers_are_no_more_than_a_launch_has_instructions_for(monkeypatch):
    spec = SPECS["decoder_layer"]
    args = spec.complete((), operands(torch.float32, layers=3))
    given = spec.of(args), *spec.of(args).split(args), "trn2"
    found = launch_of(*given)
    assert found is not None
    for most in (3, 2):
        monkeypatch.setattr(plan, "MAX_INSTRUCTIONS", most * found.plan.instructions)
        if most == 3:
            assert launch_of(*given) == found
    with pytest.raises(ValueError, match="takes at most 2 layers of these sizes, got 3; pass few"):
        launch_of(*given)


@pytest.mark.parametrize(
    ("op", "shapes", "core", "choices", "others"),
    [
        ("xuv", ((2, 3, 256), (256, 24), (24, 40), (40,)), ("trn2", 2), {}, ()),
        ("xuv", ((6, 256), (256, 24), (24, 40)), ("trn1", 1), {}, ()),
        ("xw", ((2, 3, 256), (256, 24)), ("trn3", 1), {}, ()),
        ("mlp", ((2, 5, 256), *GATED, (2, 5, 40)), ("trn2", 2), {"activation": "gelu"}, X_UP),
        ("svd_mlp", ((5, 256), *mlp_shapes(256, 96, 40)), ("trn1", 1), {"activation": "relu"}, ()),
        (
            "svd_qkv",
            ((2, 5, 256), *qkv_matrices(256, (8, 16, 24), (96, 32, 40))),
            ("trn2", 2),
            {},
            (),
        ),
    ],
)
def test_each_op_has_its_plan(op, shapes, core, choices, others):
    launch = launch_of(SPECS[op], *split_call(op, *map(make, shapes), *choices.values()), *core)
    matrices = shapes[1 : 1 + len(SPECS[op].factors)]
    M = prod(shapes[0][:-1])
    assert launch.plan == plan_op(op, M, matrices, "float32", *core, others=others)
    assert launch.operands == tuple(names_of(op)[: len(shapes)])
    own = {**choices, "fingerprint": source_fingerprint()}
    assert launch.arguments == {**launch.plan.arguments, **own}
    outputs = 168 if op == "svd_qkv" else matrices[-1][1]  # its results lie side by side
    assert launch.shapes == ((*shapes[0][:-1], outputs),)


def test_an_mlp_with_and_without_an_x_up():
    tensors = [*map(make, ((2, 5, 256), *GATED, (2, 5, 40)))]
    dense = [tensors[0], tensors[1], tensors[1], tensors[3]]
    assert launch_of(SPECS["mlp"], *split_call("mlp", *dense), "trn2").plan.problem.inputs == 1
    empty = [*tensors[:2], make((0, 96)), tensors[3], make((2, 5, 0))]
    assert launch_of(SPECS["mlp"], *split_call("mlp", *empty), "trn2") is None
    with use_impl("simulated", target="trn2"):
        y = ops.mlp(*empty)
    assert torch.equal(ops.mlp(*empty), y)


def test_one_byte_factors_are_planned_and_launched_as_such():
    fp8 = torch.float8_e4m3fn
    x, u, v = make((6, 256)), make((256, 24)).to(fp8), make((24, 40)).to(fp8)
    call = split_call("xuv", x, u, v, None, torch.ones(24), torch.ones(40), "fp8")
    launch = launch_of(XUV, *call, "trn2")
    assert launch.plan == plan_xuv(6, 256, 24, 40, "float32", "trn2", **FP8)
    assert launch.operands == ("x", "u", "v", "u_scale", "v_scale")
    assert "compute" not in launch.arguments, "the plan has a block for it"


@pytest.mark.parametrize("shapes", [((2, 0), (0, 8), (8, 4)), ((2, 6), (6, 0), (0, 4))])
def test_without_products_the_bias_is_left(shapes):
    x, *weights = (make(shape) for shape in shapes)
    bias = make((4,))
    assert launch_of(XUV, *split_call("xuv", x, *weights, bias), "trn1") is None
    with use_impl("simulated", target="trn1"):
        assert torch.equal(ops.xuv(x, *weights, bias), bias.expand(2, 4))
        assert torch.equal(ops.xuv(x, *weights), torch.zeros(2, 4))


def test_without_products_of_an_mlp():
    with use_impl("simulated", target="trn1"):
        assert ops.svd_mlp(*map(make, shapes_of("svd_mlp", (0,)))).shape == (0, 5)


def test_an_empty_projection_leaves_the_others():
    shapes = ((3, 16), (16, 0), (0, 4), (16, 2), (2, 5), (16, 3), (3, 6))
    tensors = [*map(make, shapes), None, None, make((6,))]
    assert launch_of(SPECS["svd_qkv"], *split_call("svd_qkv", *tensors), "trn2") is None
    with use_impl("simulated", target="trn2"):
        y = ops.svd_qkv(*tensors)
    assert torch.equal(y, ops.svd_qkv(*tensors))
    assert not y[:, :4].any()
    assert y[:, 4:].all()


def symbolic(shape_env: ShapeEnv, hint: int) -> torch.SymInt:
    symbol = shape_env.create_symbol(hint, ConstantSource("tokens"))
    return shape_env.create_symintnode(symbol, hint=hint)


def test_a_symbolic_size_is_planned_as_the_size_that_is_traced():
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        tokens = symbolic(shape_env, 6)
        tensors = torch.empty(2, tokens, 256), torch.empty(256, 24), torch.empty(24, 40)
        launch = launch_of(XUV, *split_call("xuv", *tensors), "trn1")
    assert launch.plan == plan_xuv(12, 256, 24, 40, "float32", "trn1")
    assert launch.shapes == ((2, 6, 40),)
    assert tokens.node.maybe_as_int() == 6, "the compiler guards on it"


@pytest.mark.parametrize(
    ("size", "device", "words"),
    [
        (lambda env: env.create_unbacked_symint(), "cpu", r"must be static, got \[u0, 256\]"),
        # its number would be a bound
        (lambda env: symbolic(env, 6), "xla", r".* a fixed size, or set NEURONMM_XLA=composite$"),
    ],
    ids=["only the data tells", "on XLA"],
)
def test_a_size_that_is_not_static_is_refused(size, device, words):
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        x = torch.empty(size(shape_env), 256, device=device)
    with pytest.raises(ValueError, match=rf"^xw: a kernel's shapes {words}"):
        static_shape("xw", x)


@pytest.mark.parametrize(("target", "lnc"), [("trn1", 1), ("trn2", 2), ("trn3", 1)])
def test_a_launch_is_planned_for_this_machine(machine, target, lnc):
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE=target, NEURON_LOGICAL_NC_CONFIG=str(lnc))
    tensors = make((2, 3, 40)), make((40, 8)), make((8, 24))
    launch = launch_here(XUV, *split_call("xuv", *tensors))
    assert (launch.plan.problem.target, launch.plan.problem.lnc) == (target, lnc)


def direct(plan):
    return stand_ins.DirectKernel(nki_kernel(plan))


@pytest.mark.parametrize("op", OPS)
def test_a_split_kernel_is_called_once_for_each_part(op, machine, monkeypatch):
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn1")
    tensors = tuple(make(shape) for shape in shapes_of(op, (3, 50)))
    call = split_call(op, *tensors)
    whole = call_kernel(SPECS[op], *call, direct)
    stand_ins.record.calls.clear()
    split_plans(monkeypatch, 64)
    assert torch.equal(call_kernel(SPECS[op], *call, direct), whole)
    assert len(stand_ins.record.calls) == 3


def test_a_changed_helper_changes_a_constant_of_every_kernel(tmp_path, monkeypatch):
    """A compile cache that keys a kernel by its own function's source then compiles it again."""
    folder = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, folder)
    monkeypatch.setattr(kernels, "__file__", str(folder / "__init__.py"))

    def constants():
        source_fingerprint.cache_clear()
        call = split_call("xuv", make((2, 256)), make((256, 24)), make((24, 40)))
        launch = launch_of(XUV, *call, "trn2")
        return launch.arguments

    before = constants()
    assert constants() == before
    with (folder / "stages" / "sums.py").open("a") as helper:
        helper.write("# changed\n")
    after = constants()
    monkeypatch.undo()
    source_fingerprint.cache_clear()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"fingerprint"}
