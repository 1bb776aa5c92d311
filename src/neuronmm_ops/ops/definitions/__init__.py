"""The ops, a page each. A new op is a page here and a folder of its name in `kernels/`."""

from neuronmm_ops.ops.definitions import mlp, svd_mlp, svd_qkv, xuv, xw
from neuronmm_ops.ops.spec import OpSpec

SPECS: dict[str, OpSpec] = {page.SPEC.name: page.SPEC for page in (xuv, xw, mlp, svd_mlp, svd_qkv)}
"""Every op by its name."""
