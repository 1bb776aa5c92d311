"""An op's arguments, checked and planned; a kernel called on device tensors."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import stand_ins
import torch
from operands import OPS, doubled, magnitude_of, make, plain_xuv, shapes_of, split_call
from splits import split_plans
from stand_ins import NeuronMachine
from tolerances import assert_close_to_oracle
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from neuronmm_ops import kernels, ops, use_impl
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.kernels import nki_kernel, source_fingerprint
from neuronmm_ops.ops.backends.launch import (
    call_kernel,
    launch_here,
    launch_of,
    static_shape,
)
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.plan import plan_op, plan_svd_mlp, plan_svd_qkv, plan_xuv, plan_xw

XUV = SPECS["xuv"]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[NeuronMachine]:
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:
        yield found


def test_each_op_has_its_plan():
    x, u, v, bias = make((2, 3, 256)), make((256, 24)), make((24, 40)), make((40,))
    launch = launch_of(XUV, *split_call("xuv", x, u, v, bias), "trn2", 2)
    assert launch is not None
    assert launch.plan == plan_xuv(6, 256, 24, 40, "float32", "trn2", 2)
    assert (launch.shapes, launch.operands) == (((2, 3, 40),), ("x", "u", "v", "bias"))
    launch = launch_of(XUV, *split_call("xuv", x, u, v), "trn1")
    assert launch is not None
    assert launch.operands == ("x", "u", "v")
    launch = launch_of(SPECS["xw"], *split_call("xw", x, u), "trn3")
    assert launch is not None
    assert launch.plan == plan_xw(6, 256, 24, "float32", "trn3")


def test_svd_mlp_has_three_ranks_and_an_activation():
    shapes = ((5, 256), (256, 8), (8, 96), (256, 16), (16, 96), (96, 24), (24, 40))
    call = split_call("svd_mlp", *map(make, shapes), "relu")
    launch = launch_of(SPECS["svd_mlp"], *call, "trn1")
    assert launch is not None
    assert launch.plan == plan_svd_mlp(5, 256, (8, 16, 24), 96, 40, "float32", "trn1")
    own = {"activation": "relu", "fingerprint": source_fingerprint()}
    assert launch.arguments == {**launch.plan.arguments, **own}
    assert launch.shapes == ((5, 40),)


def test_an_x_up_is_planned_and_split_as_x_is(monkeypatch):
    shapes = ((2, 5, 256), (256, 96), (40, 96), (96, 24), (2, 5, 40))
    tensors = [make(shape) for shape in shapes]
    launch = launch_of(SPECS["mlp"], *split_call("mlp", *tensors, "gelu"), "trn2", 2)
    assert launch is not None
    assert launch.plan == plan_op(
        "mlp", 10, shapes[1:4], "float32", "trn2", 2, others=(("x_up", (-1, 40), ""),)
    )
    assert launch.operands == ("x", "w_gate", "w_up", "w_down", "x_up")
    assert launch.arguments["activation"] == "gelu"
    assert launch.shapes == ((2, 5, 24),)
    dense = [tensors[0], tensors[1], tensors[1], tensors[3]]
    launch = launch_of(SPECS["mlp"], *split_call("mlp", *dense), "trn2")
    assert launch is not None
    assert launch.plan.problem.inputs == 1
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
    assert launch is not None
    options = {"weight_dtype": "float8_e4m3fn", "compute": "fp8"}
    assert launch.plan == plan_xuv(6, 256, 24, 40, "float32", "trn2", **options)
    assert launch.operands == ("x", "u", "v", "u_scale", "v_scale")
    assert "compute" not in launch.arguments, "the plan has a block for it"


def test_the_results_of_svd_qkv_lie_side_by_side():
    shapes = ((2, 5, 256), (256, 8), (8, 96), (256, 16), (16, 32), (256, 24), (24, 40))
    launch = launch_of(SPECS["svd_qkv"], *split_call("svd_qkv", *map(make, shapes)), "trn2", 2)
    assert launch is not None
    assert launch.plan == plan_svd_qkv(10, 256, (8, 16, 24), (96, 32, 40), "float32", "trn2", 2)
    assert launch.shapes == ((2, 5, 168),)
    assert launch.plan.problem.ranks == (8, 16, 24)


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
    assert launch is not None
    assert launch.plan == plan_xuv(12, 256, 24, 40, "float32", "trn1")
    assert launch.shapes == ((2, 6, 40),)
    assert tokens.node.maybe_as_int() == 6, "the compiler guards on it"


def test_a_size_that_only_the_data_tells_is_refused():
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        x = torch.empty(shape_env.create_unbacked_symint(), 256)
    with pytest.raises(ValueError, match=r"^xw: a kernel's shapes must be static, got \[u0, 256\]"):
        static_shape("xw", x)


def test_a_symbolic_size_is_refused_on_xla():
    """Its number would be a bound."""
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        x = torch.empty(symbolic(shape_env, 6), 256, device="xla")
    with pytest.raises(ValueError, match=r"a fixed size, or set NEURONMM_XLA=composite$"):
        static_shape("xw", x)


@pytest.mark.parametrize(("target", "lnc"), [("trn1", 1), ("trn2", 2), ("trn3", 1)])
def test_a_launch_is_planned_for_this_machine(machine, target, lnc):
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE=target, NEURON_LOGICAL_NC_CONFIG=str(lnc))
    tensors = make((2, 3, 40)), make((40, 8)), make((8, 24))
    launch = launch_here(XUV, *split_call("xuv", *tensors))
    assert launch is not None
    assert (launch.plan.problem.target, launch.plan.problem.lnc) == (target, lnc)


def direct(plan):
    return stand_ins.DirectKernel(nki_kernel(plan))


def test_a_kernel_is_called_on_the_tensors(machine):
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    tensors = make((2, 3, 40)), make((40, 8), layout="transposed"), make((8, 24)), make((24,))
    y = call_kernel(XUV, *split_call("xuv", *tensors), direct)
    oracle = plain_xuv(*doubled(*tensors))
    assert_close_to_oracle(y, oracle, plain_xuv(*tensors), magnitude_of("xuv", *tensors))


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


def test_nothing_is_launched_without_elements(machine):
    call = split_call("xuv", make((0, 40)), make((40, 8)), make((8, 24)))
    assert launch_here(XUV, *call) is None
    assert call_kernel(XUV, *call).shape == (0, 24)


def test_a_kernel_is_not_called_for_a_guessed_core(machine):
    with pytest.raises(RuntimeError, match="set NEURON_PLATFORM_TARGET_OVERRIDE"):
        call_kernel(SPECS["xw"], *split_call("xw", make((3, 40)), make((40, 24))))


def test_a_changed_helper_changes_a_constant_of_every_kernel(tmp_path, monkeypatch):
    """A compile cache that keys a kernel by its own function's source then compiles it again."""
    folder = tmp_path / "kernels"
    shutil.copytree(Path(kernels.__file__).parent, folder)
    monkeypatch.setattr(kernels, "__file__", str(folder / "__init__.py"))

    def constants():
        source_fingerprint.cache_clear()
        call = split_call("xuv", make((2, 256)), make((256, 24)), make((24, 40)))
        launch = launch_of(XUV, *call, "trn2")
        assert launch is not None
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


def test_a_kernel_is_not_called_through_an_nki_too_old(machine):
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn1")
    machine.nki("0.2.0")
    with pytest.raises(NkiVersionError, match=r"need nc_matmul.*nki 0.2.0 lacks"):
        call_kernel(SPECS["xw"], *split_call("xw", make((3, 40)), make((40, 24))))
