"""What the tests of the decode kernels share: sizes, roundings, activations in fp64, plans."""

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from neuroncore import dtypes
from neuronmm_ops.plan import Problem
from neuronmm_ops.plan.search import descend, knobs_of

SIZES = st.one_of(st.sampled_from((1, 127, 128, 129, 256)), st.integers(1, 300))
TOKENS = st.one_of(st.sampled_from((1, 2, 32, 33, 64, 65, 128)), st.integers(1, 128))
CORES = st.sampled_from((("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn3", 1), ("trn3", 2)))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return dtypes.from_fp32(values.astype(np.float32), dtypes.dtype_of(dtype))


def wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float64)


def act(name: str, z: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(z, 0)
    if name == "silu":
        return z / (1 + np.exp(-z))
    if name == "gelu_tanh":
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def decode_arguments(problem: Problem) -> dict[str, Any]:
    """Arguments of the quickest decode kernel, where prefill may be quicker."""
    (knobs,) = knobs_of(problem, "decode")
    return min(descend(problem, knobs), key=lambda candidate: candidate.rank).arguments
