"""Names of the Beta dialect, and what they are in the current one."""

from __future__ import annotations

ON_DATA = {
    "activation": "data", "activation_reduce": "data", "tensor_tensor": "data1",
    "tensor_scalar": "data", "tensor_copy": "src", "reciprocal": "data",
    "scalar_tensor_tensor": "data", "tensor_scalar_reduce": "data", "tensor_tensor_scan": "data0",
    "range_select": "on_true_tile", "dropout": "data", "nc_stream_shuffle": "src",
}  # fmt: skip
"""Instructions whose result has the shape and dtype of an operand."""
OPERATORS = {
    "Add": "add", "Sub": "subtract", "Mult": "multiply", "Div": "divide", "Pow": "power",
    "Lt": "less", "LtE": "less_equal", "Gt": "greater", "GtE": "greater_equal",
}  # fmt: skip
"""Python's operators on tiles, and the functions of `nl` that they are."""
REDUCTIONS = {"max": "maximum", "min": "minimum", "sum": "add", "prod": "multiply"}
"""Reductions of `nl`, and the operator of each."""
SYNONYMS = {**REDUCTIONS, "amax": "maximum", "amin": "minimum", "absolute": "abs"}
"""Operators that were also taken by these names, of NumPy too."""
