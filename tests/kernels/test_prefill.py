"""The prefill kernels `xw` and `xuv`: values against fp64, work and traffic against formulas."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
import neuronmm_ops.kernels
from neuroncore.dtypes import bfloat16
from neuronmm_ops.kernels import nki_kernel
from neuronmm_ops.kernels.xuv.prefill import xuv
from neuronmm_ops.kernels.xw.prefill import xw
from neuronmm_ops.plan import plan_svd_mlp, plan_svd_qkv, plan_xuv, plan_xw

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TARGETS = ("trn1", "trn2", "trn3")
KERNELS = Path(neuronmm_ops.kernels.__file__).parent

sizes = st.integers(1, 700)
launches = st.sampled_from([("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn3", 1), ("trn3", 2)])


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Values whose products stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    scale = shape[0] ** -0.5 if len(shape) == 2 else 1.0
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def check(
    kernel: Any,
    launch: tuple[str, int],
    tensors: list[Tensor | None],
    every: int = 1,
    **blocks: Any,
) -> None:
    """Run a kernel; compare each `every`-th token with fp64 and with the plain composition."""
    target, lnc = launch
    done = nc.simulate(kernel[lnc] if lnc > 1 else kernel, *tensors, target=target, **blocks)
    x, *weights = tensors[:-1]
    bias = tensors[-1]
    tokens = len(x)
    plain = x = x[::every]
    oracle, size = x.double(), x.double().abs()
    for w in weights:
        plain = plain @ w
        oracle, size = oracle @ w.double(), size @ w.double().abs()
    if bias is not None:
        plain, oracle, size = plain + bias, oracle + bias.double(), size + bias.double().abs()
    assert_close_to_oracle(done.outputs[::every], oracle, plain, size)
    products = sum([w.numel() for w in weights])
    assert done.profile.flops == 2 * tokens * products, "padding was computed"


@pytest.mark.slow
@settings(max_examples=8)
@given(M=sizes, K=sizes, N=sizes, dtype=st.sampled_from(DTYPES), launch=launches, data=st.data())
def test_xw_at_any_size(M, K, N, dtype, launch, data):
    bias = draw((N,), dtype, 3) if data.draw(st.booleans()) else None
    layout = data.draw(st.sampled_from(["dma", "pe"]))
    x = draw((M, K), dtype, 1)
    blocks = {
        "token_block": data.draw(st.sampled_from([128, 512])),
        "resident": data.draw(st.sampled_from([0, 1, 9])),
        "block": data.draw(st.sampled_from([100, 512, 1024])),
        "token_tiles": data.draw(st.sampled_from([1, 3])),
        "banks": 6,
        "engines": data.draw(st.sampled_from([1, 2])),
    }
    check(xw, launch, [x, draw((K, N), dtype, 2), bias], layout=layout, **blocks)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    M=sizes, K=sizes, r=sizes, N=sizes, dtype=st.sampled_from(DTYPES), launch=launches,
    data=st.data(),
)  # fmt: skip
def test_xuv_at_any_size(M, K, r, N, dtype, launch, data):
    bias = draw((N,), dtype, 4) if data.draw(st.booleans()) else None
    layout = data.draw(st.sampled_from(["dma", "pe"]))
    x = draw((M, K), dtype, 1)
    tensors = [x, draw((K, r), dtype, 2), draw((r, N), dtype, 3), bias]
    block = data.draw(st.sampled_from([128, 512, 1024]))
    blocks = {
        "token_block": block,
        "resident": data.draw(st.sampled_from([0, 2, 9])),
        "u_block": data.draw(st.sampled_from([128, 384])),
        "tokens": data.draw(st.sampled_from([min(block, 512), block])),
        "banks": 6,
        "k_block": data.draw(st.sampled_from([0, 128, 256])),
        "v_block": data.draw(st.sampled_from([100, 512, 1024])),
        "token_tiles": data.draw(st.sampled_from([1, 2])),
        "engines": data.draw(st.sampled_from([1, 2])),
        "v_banks": data.draw(st.sampled_from([1, 6])),
    }
    check(xuv, launch, tensors, layout=layout, **blocks)


def test_partial_sums_may_be_rounded_behind_a_flag():
    x, u, v = draw((96, 2048), torch.bfloat16, 1), draw((2048, 64), torch.bfloat16, 2), None
    v = draw((64, 96), torch.bfloat16, 3)
    exact = x.double() @ u.double() @ v.double()
    errors = [
        float(
            (
                nc.simulate(xuv, x, u, v, k_block=128, bf16_partial_sums=r).outputs.double() - exact
            ).norm()
        )
        for r in (False, True)
    ]
    assert errors[0] < errors[1] < 10 * errors[0]


@pytest.mark.slow
def test_long_contractions():
    """A quarter of the paper's shape in each size: every loop still runs many times."""
    K, r, N = 2048, 1024, 4096
    tensors = [draw(s, torch.bfloat16, i) for i, s in enumerate([(256, K), (K, r), (r, N)])]
    check(
        xuv,
        ("trn1", 1),
        [*tensors, None],
        32,
        token_block=256,
        resident=16,
        u_block=256,
        v_block=256,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_byte_moves_as_often_as_the_blocks_say(target):
    M, K, r, N, block, resident = 1024, 1024, 512, 2048, 512, 3
    specs = [nc.TensorSpec(shape, bfloat16) for shape in ((M, K), (K, r), (r, N))]
    done = nc.simulate(
        xuv, *specs, target=target, mode="trace",
        token_block=block, resident=resident, u_block=256, tokens=512, v_block=512,
    )  # fmt: skip
    moved = {t.name: t.read_bytes + t.write_bytes for t in done.profile.tensors}
    blocks, groups = M // block, ceil(r / 256)
    reloaded = (groups - 1) * (K // 128 - resident) * 128 * M
    assert moved["x"] == 2 * (M * K + reloaded)
    assert moved["u"] == 2 * K * r * blocks
    assert moved["v"] == 2 * r * N * blocks
    assert sum(moved.values()) == done.profile.hbm_bytes
    assert done.profile.hbm_write_bytes == 2 * M * N


PLACES = ("stages/*", "*/prefill", "*/doubled", "*/decode")
FILES = sorted({path for place in PLACES for path in KERNELS.glob(f"{place}.py")})


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.stem}-{p.stem}")
def test_kernels_keep_to_the_strict_subset(path):
    assert nc.lint(path) == []


@pytest.mark.parametrize("resident", [0, 1, 2, 5, 9])
def test_tiles_that_are_not_resident_are_transposed_again(resident):
    tensors = [draw((256, 1100), torch.float32, 1), draw((1100, 1100), torch.float32, 2), None]
    blocks = {"token_block": 256, "resident": resident, "block": 512, "token_tiles": 1, "banks": 6}
    check(xw, ("trn1", 1), tensors, layout="pe", **blocks)


@pytest.mark.parametrize(
    "name", ["xw", "xuv", "svd_mlp", "svd_qkv", "xw_decode", "xuv_decode", "svd_qkv_decode"]
)
def test_operands_that_do_not_fit_are_refused(name):
    plans = {
        "xw": plan_xw(200, 64, 32),
        "xuv": plan_xuv(200, 64, 16, 32),
        "svd_mlp": plan_svd_mlp(200, 64, (16, 16, 16), 48, 64),
        "svd_qkv": plan_svd_qkv(200, 64, (16, 16, 16), (64, 16, 16)),
        "xw_decode": plan_xw(2, 4096, 4096),
        "xuv_decode": plan_xuv(2, 4096, 1024, 4096),
        "svd_qkv_decode": plan_svd_qkv(2, 4096, (1664, 640, 640), (4096, 1024, 1024)),
    }
    plan = plans[name]
    assert plan.kernel == name
    wrong = [nc.TensorSpec(shape, bfloat16) for shape in ((plan.problem.M, 65), *[(64, 16)] * 6)]
    count = {"xw": 2, "xuv": 3, "svd_mlp": 7, "svd_qkv": 7}[plan.problem.op]
    with pytest.raises(AssertionError, match="a contraction has 65 features and 64 rows"):
        nc.simulate(nki_kernel(plan), *wrong[:count], target="trn1", mode="trace", **plan.arguments)


def test_tensor_engine_transposes_a_tile_ahead():
    """It multiplies a tile while the next is evicted: 60 tiles, each once, hardly a wait."""
    M, K, N = 512, 7680, 512
    specs = [nc.TensorSpec(shape, bfloat16) for shape in ((M, K), (K, N))]
    blocks = {"token_block": 512, "block": 512, "token_tiles": 4, "banks": 4}
    done = nc.simulate(xw, *specs, target="trn2", mode="trace", layout="pe", **blocks).profile
    busy = next(use.busy_ms for use in done.engines[0] if use.engine == "TensorE")
    assert busy > 0.85 * done.time_ms
