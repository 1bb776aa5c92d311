"""NKI kernels of the ops, and the plans that choose their blocks.

`kernel_of(plan)` is the kernel of a plan; `plan.arguments` are its compile-time arguments.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronmm_ops.kernels.plan import plan_svd_mlp, plan_xuv, plan_xw
from neuronmm_ops.kernels.problem import Plan, Problem

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore import Kernel

__all__ = [
    "Plan",
    "Problem",
    "kernel_of",
    "plan_svd_mlp",
    "plan_xuv",
    "plan_xw",
    "source_fingerprint",
]


def kernel_of(plan: Plan) -> Kernel:
    """The kernel that a plan is for, on as many cores as it says."""
    from neuronmm_ops.kernels import svd_mlp, svd_mlp_decode, xuv, xuv_decode, xw, xw_decode

    kernels: dict[str, Any] = {
        "xw": xw.xw,
        "xw_decode": xw_decode.xw_decode,
        "xuv": xuv.xuv,
        "xuv_decode": xuv_decode.xuv_decode,
        "svd_mlp": svd_mlp.svd_mlp,
        "svd_mlp_decode": svd_mlp_decode.svd_mlp_decode,
    }
    kernel = kernels[plan.kernel]
    return kernel if plan.problem.lnc == 1 else kernel[plan.problem.lnc]


@cache
def source_fingerprint() -> str:
    """16 hexadecimal digits of the kernels' source: what a compiled kernel is a result of."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
