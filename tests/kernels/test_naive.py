"""The kernels with visible loops compute what the references do."""

import pytest
import torch
from tolerances import assert_close_to_oracle

from neuroncore import simulate
from neuronmm_ops.kernels.svd_mlp.naive import svd_mlp_naive
from neuronmm_ops.kernels.xuv.naive import xuv_naive
from neuronmm_ops.ops.definitions import svd_mlp, xuv

KERNELS = {"xuv": (xuv_naive, xuv.reference), "svd_mlp": (svd_mlp_naive, svd_mlp.reference)}
FACTORS = {
    "xuv": lambda K, r, middle, N: [(K, r), (r, N)],
    "svd_mlp": lambda K, r, middle, N: [
        *((K, r), (r, middle)),
        *((K, r + 8), (r + 8, middle)),
        *((middle, r), (r, N)),
    ],
}


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize(
    "sizes", [(1, 64, 16, 96, 40), (130, 200, 136, 300, 520)], ids=["small", "edges"]
)
@pytest.mark.parametrize("op", KERNELS)
def test_values_are_the_references(op, sizes, target):
    M, *features = sizes
    kernel, reference = KERNELS[op]
    generator = torch.Generator().manual_seed(0)
    operands = [
        torch.randn(K, N, generator=generator).mul(scale).bfloat16()
        for K, N, scale in [
            (M, features[0], 1.0),
            *((K, N, K**-0.5) for K, N in FACTORS[op](*features)),
        ]
    ]
    done = simulate(kernel, *operands, target=target)
    oracle = reference(*[operand.double() for operand in operands])
    assert_close_to_oracle(done.outputs, oracle, reference(*operands))
