"""`svd_qkv`, prefill form: values against fp64, FLOPs, and what one launch saves."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close_to_oracle
from torch import Tensor

import neuroncore as nc
from neuroncore.dtypes import bfloat16
from neuroncore.hardware import DMA_MODELS
from neuronmm_ops.kernels import nki_kernel
from neuronmm_ops.kernels.svd_qkv import decode, prefill
from neuronmm_ops.plan import Plan, plan_svd_qkv, plan_xuv, qkv_matrices

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LLAMA_1B = (2048, (768, 384, 384), (2048, 512, 512))
sizes = st.integers(1, 400)
launches = st.sampled_from([("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn3", 1), ("trn3", 2)])


def drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """Values whose products stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * shape[0] ** -0.5).to(dtype)


def projected(x: Tensor, factors: list[Tensor]) -> Tensor:
    pairs = zip(factors[::2], factors[1::2], strict=True)
    return torch.cat([x @ u @ v for u, v in pairs], dim=1)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    M=sizes,
    K=sizes,
    ranks=st.tuples(sizes, sizes, sizes),
    outputs=st.tuples(sizes, sizes, sizes),
    dtype=st.sampled_from(DTYPES),
    launch=launches,
    data=st.data(),
)
def test_any_size(
    M: int,
    K: int,
    ranks: tuple[int, int, int],
    outputs: tuple[int, int, int],
    dtype: torch.dtype,
    launch: tuple[str, int],
    data: Any,
) -> None:
    target, lnc = launch
    shapes = ((M, K), *qkv_matrices(K, ranks, outputs))
    x, *factors = [drawn(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    choices = {
        "token_block": (128, 512),
        "layout": ("dma", "pe"),
        "resident": (0, 2, 9),
        "u_block": (128, 384),
        "v_block": (100, 512),
        "tokens": (128, 512),
        "token_tiles": (1, 2),
        "banks": (2, 6),
        "engines": (1, 2),
    }
    blocks = {name: data.draw(st.sampled_from(values)) for name, values in choices.items()}
    kernel = prefill.svd_qkv if lnc == 1 else prefill.svd_qkv[lnc]
    done = nc.simulate(kernel, x, *factors, target=target, **blocks)
    oracle = projected(x.double(), [f.double() for f in factors])
    size = projected(x.double().abs(), [f.double().abs() for f in factors])
    assert_close_to_oracle(done.outputs, oracle, projected(x, factors), size)
    assert done.profile.flops == 2 * M * sum([f.numel() for f in factors]), "padding was computed"


def traced(plan: Plan) -> nc.Profile:
    p = plan.problem
    specs = [nc.TensorSpec(shape, bfloat16) for shape in ((p.M, p.K), *p.matrices)]
    arguments: dict[str, Any] = plan.arguments
    return nc.simulate(nki_kernel(plan), *specs, target=p.target, mode="trace", **arguments).profile


@pytest.mark.parametrize(("M", "gain"), [(1, 1.2), (64, 1.25), (512, 1.15)])
def test_one_launch_is_faster_than_three_under_every_dma_model(M: int, gain: float) -> None:
    K, ranks, outputs = LLAMA_1B
    together = traced(plan_svd_qkv(M, K, ranks, outputs, target="trn2"))
    pairs = zip(ranks, outputs, strict=True)
    alone = [traced(plan_xuv(M, K, r, N, target="trn2")) for r, N in pairs]
    for model in DMA_MODELS:
        three = sum([profile.times_ms[model] for profile in alone])
        assert three >= gain * together.times_ms[model]
    assert sum([profile.hbm_bytes for profile in alone]) - together.hbm_bytes == 2 * M * K * 2


def test_factors_that_do_not_fit_are_refused() -> None:
    x, u, v = torch.zeros(3, 8), torch.zeros(8, 2), torch.zeros(2, 4)
    for place, wrong in ((1, torch.zeros(7, 2)), (4, torch.zeros(3, 4)), (5, torch.zeros(7, 2))):
        tensors = [x, u, v, u, v, u, v]
        tensors[place] = wrong
        with pytest.raises(AssertionError, match=r"pass u \[K, r\], v \[r, N\]"):
            nc.simulate(prefill.svd_qkv, *tensors, target="trn2")


def test_strict_front_end() -> None:
    members = (prefill.svd_qkv, prefill.check_factors, prefill.check_biases, decode.side_by_side)
    for member in (*members, decode.svd_qkv_decode):
        assert nc.lint(member) == []
