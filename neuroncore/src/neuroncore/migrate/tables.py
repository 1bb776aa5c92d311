"""What has another name or form in the current dialect, and what is left by hand."""

from __future__ import annotations

from neuroncore.legacy.names import OPERATORS

BINARY = {
    *OPERATORS.values(), "maximum", "minimum", "equal", "not_equal", "logical_and", "logical_or",
    "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift",
}  # fmt: skip
ACTIVATIONS = {
    "exp", "log", "sqrt", "rsqrt", "tanh", "arctan", "sigmoid", "relu", "gelu", "gelu_dx",
    "gelu_apprx_tanh", "silu", "silu_dx", "softplus", "mish", "erf", "erf_dx", "square", "sign",
    "abs",
}  # fmt: skip
"""Functions of `nl` that are one activation."""
LOOPS = ("affine_range", "sequential_range", "static_range")
GONE = {"par_dim", "mgrid", "arange", "benchmark", "baremetal", "profile", "simulate_kernel",
        "trace", "spmd_dim", "nc", "loop_reduce", "static_cast"}  # fmt: skip
"""Names of neuronxcc.nki that nothing imports any more."""
BY_HAND = {
    "mask": ("mask= is no box of indices", "cut slices with min(), or use nisa.affine_select"),
    "index-pattern": ("no slice and no access pattern has this index", "write it with .ap()"),
    "broadcast": ("only a tile [P, 1] repeats in an instruction", "use broadcast() on a view"),
    "indirect": ("an index is a tile", "gather by .ap(..., vector_offset=)"),
    "block-dimension": ("block dimensions became lists of tiles", "index every one by a number"),
    "result": ("the shape of this call's result is not known", "allocate it and pass dst="),
    "removed": ("this function was removed from NKI", "write it with nki.isa"),
    "benchmark": ("nki.benchmark and nki.profile are gone", "profile with neuron-explorer"),
    "import": ("the module has no counterpart", "import nki, nki.language and nki.isa by name"),
    "nested": ("an instruction stands where it cannot be moved out", "give it a line of its own"),
    "grid": ("a launch grid is 1 or 2 cores", "loop over the programs inside the kernel"),
    "stale-index": ("a size in this index has changed since", "compute the index after it"),
    "output-parameter": (
        "a kernel returns its outputs", "allocate it with buffer=nl.shared_hbm and return it"
    ),
}  # fmt: skip
"""By the rule's name: what it is, and the remedy. Rules of `lint` are the others."""
