"""The one tolerance of the test suite."""

import torch
from torch import Tensor

# Roundings on the way to an output: `x @ u`, its product with v, the bias, the output itself.
ROUNDINGS = 4


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
    if actual.numel() == 0:
        return
    scale = (oracle if magnitude is None else magnitude).abs().max()
    band = ROUNDINGS * torch.finfo(actual.dtype).eps * scale
    allowed = float(2 * (low_precision.double() - oracle).abs().max() + band)
    error = float((actual.double() - oracle).abs().max())
    assert error <= allowed, f"error {error:.3e} exceeds {allowed:.3e} ({actual.dtype})"
