"""The tolerances of the test suite."""

import torch
from torch import Tensor

from neuronmm_ops.device.values import error_ratio

# Two ways through fp64 part by their roundings, which a factorization multiplies by a condition
# number; what fp32 would leave is larger.
FP64_SLACK = 1e-7


def assert_close_to_oracle(
    actual: Tensor, oracle: Tensor, low_precision: Tensor, magnitude: Tensor | None = None
) -> None:
    """Assert that an op is about as accurate as plain torch in the same dtype.

    That is, that `error_ratio` of the same arguments is at most 1.
    """
    assert oracle.dtype == torch.float64
    assert actual.dtype == low_precision.dtype, f"{actual.dtype} != {low_precision.dtype}"
    assert actual.shape == oracle.shape == low_precision.shape
    actual, oracle, low_precision = actual.detach(), oracle.detach(), low_precision.detach()
    ratio = error_ratio(actual, oracle, low_precision, magnitude)
    assert ratio <= 1, f"error is {ratio:.3g} times what {actual.dtype} excuses"


def assert_same_in_fp64(actual: Tensor, expected: Tensor) -> None:
    """Assert that two fp64 computations are of one thing: equal to 1e-7 of the largest value."""
    assert actual.dtype == expected.dtype == torch.float64
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    error = float((actual - expected).detach().abs().max())
    scale = float(expected.detach().abs().max())
    assert error <= FP64_SLACK * scale, f"error {error:.3e} exceeds {FP64_SLACK} of {scale:.3e}"
