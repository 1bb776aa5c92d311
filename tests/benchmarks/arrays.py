"""Arrays in bfloat16 and their products in fp64."""

from functools import reduce

import ml_dtypes
import numpy as np


def bf16(rng, *shape):
    return (rng.standard_normal(shape) / 8).astype(ml_dtypes.bfloat16)


def exact(*factors):
    return reduce(np.matmul, [factor.astype(np.float64) for factor in factors])


def close(values, wanted, share=0.02):
    """Within the rounding of bf16 partial sums, which the published kernels keep."""
    error = np.abs(values.astype(np.float64) - wanted).max()
    assert error <= share * np.abs(wanted).max()
