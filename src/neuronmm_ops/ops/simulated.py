"""The opt-in CPU implementation that runs the NKI kernels on the simulated NeuronCore.

`use_impl("simulated", target="trn1")` chooses it; `last_profile()` says what the last op moved and
how long it would have taken (modelled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuronmm_ops.ops.reference import ACTIVATION_NAMES, rows
from neuronmm_ops.ops.validation import check_packed, check_svd_mlp, check_xuv, check_xw

if TYPE_CHECKING:
    from neuronmm_ops.kernels import Plan
    from neuronmm_ops.neuroncore import Profile
    from neuronmm_ops.ops.implementation import Kernels

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_last: list[Profile] = []


def last_profile() -> Profile:
    """Return the profile of the last op that ran on the simulated NeuronCore.

    Raises:
        RuntimeError: none has run yet.
    """
    if not _last:
        raise RuntimeError('no op has been simulated; run one under use_impl("simulated")')
    return _last[0]


def implementation(target: str | None) -> Kernels:
    """The ops on the simulated core of `target`; None is trn1. Raises ValueError for no target."""
    from neuronmm_ops.neuroncore.machine import machine_of

    return _Ops(machine_of(target or "trn1").target).kernels()


class _Ops:
    """The ops for one target."""

    def __init__(self, target: str) -> None:
        self.target = target

    def kernels(self) -> Kernels:
        return {
            "xuv": self.xuv,
            "xuv_packed": self.xuv_packed,
            "xw": self.xw,
            "svd_mlp": self.svd_mlp,
        }

    def xuv(self, x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._xuv(x, u, v, bias, False)

    def xuv_packed(self, x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        check_packed(u)
        return self._xuv(x, u, v, bias, True)

    def _xuv(self, x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None, packed: bool) -> Tensor:
        from neuronmm_ops.kernels import plan_xuv

        check_xuv(x, u, v, bias)
        flat, dtype, shape = _prepare("xuv", x, v)
        if _nothing_to_multiply(x, u, v):
            return _without_products(x, shape, bias)
        plan = plan_xuv(
            len(flat), u.shape[0], v.shape[0], v.shape[1], dtype, self.target, packed=packed
        )
        return _run(plan, flat, u, v, bias).view(shape)

    def xw(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        from neuronmm_ops.kernels import plan_xw

        check_xw(x, w, bias)
        flat, dtype, shape = _prepare("xw", x, w)
        if _nothing_to_multiply(x, w):
            return _without_products(x, shape, bias)
        plan = plan_xw(len(flat), w.shape[0], w.shape[1], dtype, self.target)
        return _run(plan, flat, w, bias).view(shape)

    def svd_mlp(
        self,
        x: Tensor,
        u_gate: Tensor,
        v_gate: Tensor,
        u_up: Tensor,
        v_up: Tensor,
        u_down: Tensor,
        v_down: Tensor,
        activation: str = "silu",
    ) -> Tensor:
        from neuronmm_ops.kernels import plan_svd_mlp

        factors = (u_gate, v_gate, u_up, v_up, u_down, v_down)
        check_svd_mlp(x, *factors, activation, ACTIVATION_NAMES)
        flat, dtype, shape = _prepare("svd_mlp", x, v_down)
        if _nothing_to_multiply(x, *factors):
            return _without_products(x, shape, None)
        ranks = (u_gate.shape[1], u_up.shape[1], u_down.shape[1])
        plan = plan_svd_mlp(
            len(flat), u_gate.shape[0], ranks, u_down.shape[0], v_down.shape[1], dtype, self.target
        )
        return _run(plan, flat, *factors, activation=activation).view(shape)


def _prepare(op: str, x: Tensor, last: Tensor) -> tuple[Tensor, str, tuple[int, ...]]:
    """x as [M, K], the dtype's name, and the shape [..., N] of the output."""
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"{op}: the simulated NeuronCore takes bfloat16, float16 and float32, got {x.dtype}; "
            'cast x and the weights, or use_impl("reference")'
        )
    return rows(x), _DTYPES[x.dtype], (*x.shape[:-1], last.shape[1])


def _nothing_to_multiply(*tensors: Tensor) -> bool:
    return any(tensor.numel() == 0 for tensor in tensors)


def _without_products(x: Tensor, shape: tuple[int, ...], bias: Tensor | None) -> Tensor:
    """The result where a dimension is empty: nothing to launch."""
    out = x.new_zeros(shape)
    return out if bias is None else out + bias


def _run(plan: Plan, *tensors: Tensor | None, **options: str) -> Tensor:
    """Run a plan's kernel and keep its profile."""
    from neuronmm_ops.kernels import kernel_of
    from neuronmm_ops.neuroncore.kernel import run

    arguments = {**plan.arguments, **options}
    done = run(kernel_of(plan), tensors, arguments, target=plan.problem.target)
    _last[:] = [done.profile]
    return done.outputs
