"""The prefill kernels with their blocks of tokens as a loop of the device."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neuroncore as nc
from neuroncore.dtypes import bfloat16, dtype_of
from neuronmm_ops.kernels import nki_kernel
from neuronmm_ops.kernels.svd_mlp.prefill import svd_mlp
from neuronmm_ops.kernels.svd_qkv.prefill import svd_qkv
from neuronmm_ops.kernels.xuv.prefill import xuv
from neuronmm_ops.kernels.xw.prefill import xw
from neuronmm_ops.plan import MAX_INSTRUCTIONS, Plan, mlp_matrices, plan_op

MLP = mlp_matrices(256, (128, 100, 128), 600, 300)
MATRICES = {"xw": ((256, 600),), "xuv": ((256, 130), (130, 600)), "svd_mlp": MLP}
QKV = ((256, 130), (130, 300), (256, 64), (64, 100), (256, 40), (40, 100))
MATRICES["svd_qkv"] = QKV
KERNELS = {"xw": xw, "xuv": xuv, "svd_mlp": svd_mlp, "svd_qkv": svd_qkv}
SIZES = {
    "xw": ((4096, 4096),),
    "xuv": ((4096, 1024), (1024, 8192)),
    "svd_mlp": mlp_matrices(2048, (768, 768, 768), 6144, 2048),
    "svd_qkv": ((2048, 768), (768, 4096), (2048, 384), (384, 1024), (2048, 384), (384, 1024)),
}
launches = st.sampled_from([("trn2", 1), ("trn2", 2), ("trn3", 1)])


def drawn(shape: tuple[int, ...], seed: int) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape) * shape[0] ** -0.5
    return values.astype(bfloat16.numpy)


def traced(plan: Plan) -> Any:
    p = plan.problem
    specs = [nc.TensorSpec(shape, dtype_of(p.dtype)) for shape in ((p.M, p.K), *p.matrices)]
    kernel = nki_kernel(plan)
    return nc.simulate(kernel, *specs, target=p.target, mode="trace", **plan.arguments).profile


@pytest.mark.parametrize("op", KERNELS)
@settings(max_examples=4, deadline=None)
@given(M=st.integers(1, 1000), launch=launches, layout=st.sampled_from(["dma", "pe"]))
def test_a_loop_computes_what_the_unrolled_kernel_does(op, M, launch, layout):
    target, lnc = launch
    kernel = KERNELS[op] if lnc == 1 else KERNELS[op][lnc]
    shapes = ((M, MATRICES[op][0][0]), *MATRICES[op])
    arrays = [drawn(shape, seed) for seed, shape in enumerate(shapes)]
    spill = {"spill": 1} if op == "svd_mlp" else {}
    done = [
        nc.simulate(kernel, *arrays, target=target, token_block=128, layout=layout, **spill, **loop)
        for loop in ({}, {"device_loop": True})
    ]
    unrolled, looped = done
    assert looped.outputs.tobytes() == unrolled.outputs.tobytes()
    assert looped.profile.opcodes == unrolled.profile.opcodes
    assert looped.profile.hbm_bytes == unrolled.profile.hbm_bytes
    tokens = [M] if lnc == 1 else [-(-M // 256) * 128 if M >= 256 else -(-M // 2), M // 2]
    if max(tokens) >= 256:
        assert looped.profile.stream_instructions < looped.profile.instructions


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize(("target", "lnc", "M"), [("trn2", 1, 4096), ("trn3", 2, 8200)])
def test_a_loop_takes_as_long_as_the_unrolled_kernel(op, target, lnc, M):
    whole = plan_op(op, M, SIZES[op], "bfloat16", target, lnc)
    plan = plan_op(op, M, SIZES[op], "bfloat16", target, lnc, 1, device_loop=True)
    assert plan.arguments == {**whole.arguments, "device_loop": True}
    assert plan.launches == (M,)
    looped, unrolled = traced(plan), traced(whole)
    assert looped.time_ms == pytest.approx(unrolled.time_ms, rel=0.03)
    assert looped.time_ms == pytest.approx(plan.time_ms)
    assert looped.instructions == unrolled.instructions == whole.instructions
    assert looped.stream_instructions == plan.instructions < whole.instructions
    assert looped.hbm_bytes == unrolled.hbm_bytes == plan.hbm_bytes


@pytest.mark.slow
def test_32k_tokens_are_thousands_of_instructions():
    matrices = mlp_matrices(4096, (2048, 2048, 2048), 14336, 4096)
    split = plan_op("svd_mlp", 32768, matrices, target="trn2")
    assert len(split.launches) == 2
    assert split.instructions > MAX_INSTRUCTIONS
    looped = plan_op("svd_mlp", 32768, matrices, target="trn2", device_loop=True)
    assert looped.launches == (32768,)
    assert looped.instructions < 20_000
    profile = traced(looped)
    assert profile.stream_instructions == looped.instructions
    assert profile.instructions == pytest.approx(split.instructions, rel=1e-4)
    assert profile.time_ms == pytest.approx(split.time_ms, rel=0.03)


def test_what_a_loop_does_not_shorten_stays_as_it_is():
    long = plan_op("xuv", 2048, MATRICES["xuv"], target="trn1", max_instructions=200)
    for target in ("trn1", "trn2"):
        plan = plan_op("xuv", 2048, MATRICES["xuv"], target=target, device_loop=True)
        assert "device_loop" not in plan.arguments  # it is short
    plan = plan_op(
        "xuv", 2048, MATRICES["xuv"], target="trn1", max_instructions=200, device_loop=True
    )
    assert plan == long  # NKI 0.6, which has the loop, does not document trn1
    small = plan_op("xw", 130, MATRICES["xw"], target="trn2", max_instructions=1, device_loop=True)
    assert small.launches == (128, 2)
