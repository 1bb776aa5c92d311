"""The tolerances of the test suite."""

import torch
from torch import Tensor

# Roundings on the way to an output: `x @ u`, its product with v, the bias, the output itself.
ROUNDINGS = 4
# Two ways through fp64 part by their roundings, which a factorization multiplies by a condition
# number; what fp32 would leave is larger.
FP64_SLACK = 1e-7


def assert_close_to_oracle(
    actual: Tensor, oracle: Tensor, low_precision: Tensor, magnitude: Tensor | None = None
) -> None:
    """Assert that an op is about as accurate as plain torch in the same dtype.

    `max|actual - oracle| <= 2 max|low_precision - oracle| + 4 eps max(magnitude)`: the first term
    is what the dtype costs anyone; the second lets each rounding fall the other way, and matters
    where the plain composition happens to be exact.

    Args:
        actual: output of the op under test.
        oracle: the same in fp64, from the same (rounded) operands.
        low_precision: the plain composition in actual's dtype.
        magnitude: fp64 sums of absolute values of the terms, which cancellation does not shrink;
            default `|oracle|`.
    """
    assert oracle.dtype == torch.float64
    assert actual.dtype == low_precision.dtype, f"{actual.dtype} != {low_precision.dtype}"
    assert actual.shape == oracle.shape == low_precision.shape
    actual, oracle, low_precision = actual.detach(), oracle.detach(), low_precision.detach()
    if actual.numel() == 0:
        return
    scale = float((oracle if magnitude is None else magnitude.detach()).abs().max())
    band = ROUNDINGS * torch.finfo(actual.dtype).eps * scale
    allowed = float(2 * (low_precision.double() - oracle).abs().max() + band)
    error = float((actual.double() - oracle).abs().max())
    assert error <= allowed, f"error {error:.3e} exceeds {allowed:.3e} ({actual.dtype})"


def assert_same_in_fp64(actual: Tensor, expected: Tensor) -> None:
    """Assert that two fp64 computations are of one thing: equal to 1e-7 of the largest value."""
    assert actual.dtype == expected.dtype == torch.float64
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    error = float((actual - expected).detach().abs().max())
    scale = float(expected.detach().abs().max())
    assert error <= FP64_SLACK * scale, f"error {error:.3e} exceeds {FP64_SLACK} of {scale:.3e}"
