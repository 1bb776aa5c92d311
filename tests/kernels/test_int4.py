"""Kernels with weights in int4: groups of rows, pairs of rows, and what is left of either."""

import pytest
from kernels.cases import LAUNCHES, Case, check, matrices_of

from neuronmm_ops.plan import Problem

KERNELS = [
    (op, phase)
    for op in ("xw", "xuv", "svd_qkv", "svd_mlp", "mlp")
    for phase in ("decode", "prefill")
]
# Rows of less than a group, of whole ones, and of parts of several sizes.
SIZES = [(90, 34, 130), (256, 128, 256), (898, 200, 300)]


@pytest.mark.parametrize(("op", "phase"), KERNELS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values(op, phase, sizes):
    place = SIZES.index(sizes) + KERNELS.index((op, phase))
    target, lnc = LAUNCHES[place % len(LAUNCHES)]
    dtype = ("bfloat16", "float32", "bfloat16", "float16")[place % 4]
    K, r, N = sizes
    M = (1, 5, 40)[place % 3] if phase == "decode" else 140
    matrices = (
        ((K, N), (K, N), (N, K)) if op == "mlp" else matrices_of(op, K, (r, r, r), (N,) * 3, N)
    )
    problem = Problem(op, M, matrices, dtype, target, lnc, weight_dtype="int4")
    check(Case(problem, bias=op in ("xw", "xuv", "svd_qkv"), phase=phase))
