"""`use_impl("simulated")`: the ops through the NKI kernels on the simulated NeuronCore."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operands import (
    OPS,
    PLAIN,
    doubled,
    magnitude_of,
    make,
    mlp_shapes,
    names_of,
    operands_of,
    plain_xuv,
    shapes_of,
)
from splits import split_plans
from tolerances import assert_close_to_oracle

import neuronmm_ops as nm
from neuroncore import kernel
from neuronmm_ops import plan as plans
from neuronmm_ops.ops.backends import simulated
from neuronmm_ops.ops.backends.launch import DTYPE_NAMES
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.plan import plan_xuv

targets = st.sampled_from(["trn1", "trn2", "trn3"])


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=40)
@given(data=st.data(), target=targets)
def test_the_simulated_op_matches_the_fp64_oracle(op, data, target):
    arguments = data.draw(operands_of(op, tuple(DTYPE_NAMES)))
    with nm.use_impl("simulated", target=target):
        y = getattr(nm, op)(*arguments)
    oracle = PLAIN[op](*doubled(*arguments))
    magnitude = magnitude_of(op, *arguments[: len(SPECS[op].operands)])
    assert_close_to_oracle(y, oracle, PLAIN[op](*arguments), magnitude)
    assert y.is_contiguous()


@pytest.mark.parametrize("op", OPS)
def test_a_split_op_is_launched_once_for_each_part(op, monkeypatch):
    tensors = [make(shape) for shape in shapes_of(op, lead=(3, 50))]
    with nm.use_impl("simulated", target="trn2"):
        whole = getattr(nm, op)(*tensors)
        profile = nm.last_profile()
        planned = split_plans(monkeypatch, 64)
        y = getattr(nm, op)(*tensors)
    assert [plan.launches for plan in planned] == [(64, 64, 22)]
    assert torch.equal(y, whole)
    assert nm.last_profile().flops == profile.flops * 22 // 150


@pytest.mark.parametrize("op", OPS)
def test_the_parts_of_a_split_plan_are_what_it_counts(op, monkeypatch):
    profiles, run = [], kernel.run

    def noted(*arguments, **named):
        profiles.append((done := run(*arguments, **named)).profile)
        return done

    plan_op = partial(plans.plan_op, max_instructions=1)
    monkeypatch.setattr(plans, "plan_op", plan_op)
    spec, tensors = SPECS[op], [make(shape) for shape in shapes_of(op, lead=(2, 150))]
    matrices = tuple(tensors[index].shape for index in spec.factors)
    names = [spec.operands[place].name for place in spec.activations[1:]]
    others = tuple((name, (-1, tensors[names_of(op).index(name)].shape[-1]), "") for name in names)
    plan = plan_op(op, 300, matrices, "float32", "trn2", others=others)
    monkeypatch.setattr(kernel, "run", noted)
    given = zip(spec.operands, tensors, strict=True)
    with nm.use_impl("simulated", target="trn2"):
        getattr(nm, op)(**{operand.name: t for operand, t in given if operand.role != "bias"})
    assert plan.launches == (128, 128, 44)
    assert plan.instructions == sum(profile.instructions for profile in profiles)
    assert plan.hbm_bytes == sum(profile.hbm_bytes for profile in profiles)


def test_the_last_profile_is_kept():
    simulated._last.clear()
    with pytest.raises(RuntimeError, match="no op has been simulated"):
        nm.last_profile()
    x, u, v = make((2, 3, 200)), make((200, 40)), make((40, 64))
    with nm.use_impl("simulated", target="trn2"):
        nm.xuv(x, u, v)
    profile = nm.last_profile()
    assert (profile.target, profile.mode) == ("trn2", "execute")
    assert profile.flops == 2 * 6 * 40 * (200 + 64)
    plan = plan_xuv(6, 200, 40, 64, "float32", "trn2")
    assert profile.kernel_name == plan.kernel
    with nm.use_impl("simulated"):
        nm.svd_mlp(make((2, 8)), *[make(s) for s in mlp_shapes(8, 9, 8)])
    assert nm.last_profile().target == "trn2"


def test_targets_nest_and_are_restored():
    x, w = make((4, 8)), make((8, 8))
    with nm.use_impl("simulated", target="trn1"):
        with nm.use_impl("simulated", target="trn3"):
            nm.xw(x, w)
            assert nm.last_profile().target == "trn3"
        nm.xw(x, w)
        assert nm.last_profile().target == "trn1"


def test_gradients_flow_around_the_simulated_forward():
    x, u, v = [make(s).requires_grad_() for s in ((5, 12), (12, 4), (4, 6))]
    with nm.use_impl("simulated"):
        nm.xuv(x, u, v).square().sum().backward()
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (x, u, v)]
        grads.append(torch.autograd.grad(plain_xuv(*leaves).square().sum(), leaves))
    for mine, low, oracle in zip((x, u, v), *grads, strict=True):
        assert_close_to_oracle(mine.grad, oracle, low)


def test_what_the_core_cannot_do_is_refused():
    x, w = make((4, 8), torch.float64), make((8, 8), torch.float64)
    with (
        nm.use_impl("simulated"),
        pytest.raises(TypeError, match="NeuronCore takes bfloat16, float16 and float32"),
    ):
        nm.xw(x, w)
    with pytest.raises(ValueError, match="target must be one of trn1"):
        nm.use_impl("simulated", target="trn9")
    with pytest.raises(ValueError, match="only the simulated implementation takes a target"):
        nm.use_impl("reference", target="trn1")
