"""Typed public wrappers: `neuronmm_ops.xuv(...)` and its siblings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from neuronmm_ops.ops import register as register  # registers the ops

# Bound once: looking an overload up costs more than calling it.
_XUV = torch.ops.neuronmm.xuv.default
_XW = torch.ops.neuronmm.xw.default
_SVD_MLP = torch.ops.neuronmm.svd_mlp.default
_SVD_QKV = torch.ops.neuronmm.svd_qkv.default


def _call(op: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call `op`, past its autograd kernel when nothing can want a gradient.

    Under `no_grad` a registered autograd formula still costs a second trip through Python (4 us);
    `inference_mode` skips it by itself, and a compiler must see the op as it is.
    """
    if torch.compiler.is_compiling():  # first: a compiler cannot trace the other questions
        return op(*args)
    if forward_ad._current_level >= 0:
        _refuse_tangents(args)
    try:
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return op(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    except NotImplementedError:
        _refuse_nested(args)
        raise


def _refuse_tangents(args: tuple[Any, ...]) -> None:
    """Raise where forward-mode AD would lose a derivative: torch's registration has no formula."""
    for argument in args:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                "neuronmm ops have no forward-mode derivative, got an input with a tangent; "
                "use reverse mode (torch.autograd.grad), or SVDLinear.to_linear()"
            )


def _refuse_nested(args: tuple[Any, ...]) -> None:
    """Raise for a nested tensor, of whatever layout: its rows are no `[..., K]`."""
    for argument in args:
        if isinstance(argument, Tensor) and argument.is_nested:
            raise TypeError(
                f"neuronmm ops take no nested tensor, got one of layout {argument.layout}; "
                "unbind() it, or pad it with to_padded_tensor(0.0)"
            )


def xuv(x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Low-rank matmul `(x @ u) @ v + bias` as one op, `neuronmm::xuv`.

    Args:
        x: `[..., K]`, any leading dimensions (none, or empty, allowed); bf16, fp16 or fp32
            (fp64 on CPU).
        u: `[K, r]`, dtype and device of x.
        v: `[r, N]`, dtype and device of x.
        bias: `[N]` or None.

    Returns:
        `[..., N]`, contiguous, dtype of x. Accumulated in fp32; `x @ u` is rounded once to x's
        dtype.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    return _call(_XUV, x, u, v, bias)


def xw(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Dense matmul `x @ w + bias` through the same machinery, `neuronmm::xw`: the baseline.

    Args:
        x: `[..., K]`; bf16, fp16 or fp32 (fp64 on CPU).
        w: `[K, N]`, dtype and device of x (`nn.Linear`'s weight is its transpose).
        bias: `[N]` or None.

    Returns:
        `[..., N]`, contiguous, dtype of x.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    return _call(_XW, x, w, bias)


def svd_mlp(
    x: Tensor,
    u_gate: Tensor,
    v_gate: Tensor,
    u_up: Tensor,
    v_up: Tensor,
    u_down: Tensor,
    v_down: Tensor,
    activation: str = "silu",
) -> Tensor:
    """Gated MLP `down(act(gate(x)) * up(x))` with low-rank projections, `neuronmm::svd_mlp`.

    Args:
        x: `[..., K]`; bf16, fp16 or fp32 (fp64 on CPU).
        u_gate: `[K, r_gate]`.
        v_gate: `[r_gate, I]`.
        u_up: `[K, r_up]`.
        v_up: `[r_up, I]`.
        u_down: `[I, r_down]`.
        v_down: `[r_down, N]`.
        activation: `silu`, `gelu`, `gelu_tanh` or `relu`.

    Returns:
        `[..., N]`, contiguous, dtype of x.

    Raises:
        ValueError: shapes do not fit, or the activation is unknown.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    return _call(_SVD_MLP, x, u_gate, v_gate, u_up, v_up, u_down, v_down, activation)


def svd_qkv(
    x: Tensor,
    u_query: Tensor,
    v_query: Tensor,
    u_key: Tensor,
    v_key: Tensor,
    u_value: Tensor,
    v_value: Tensor,
) -> Tensor:
    """Low-rank projections of x to query, key and value as one op, `neuronmm::svd_qkv`.

    One launch for three `xuv`, and x is read and transposed once. `torch.split` takes the result
    apart without a copy: `query, key, value = y.split([N_query, N_key, N_value], dim=-1)`.

    Args:
        x: `[..., K]`; bf16, fp16 or fp32 (fp64 on CPU).
        u_query: `[K, r_query]`, dtype and device of x, as all factors.
        v_query: `[r_query, N_query]`.
        u_key: `[K, r_key]`.
        v_key: `[r_key, N_key]`.
        u_value: `[K, r_value]`.
        v_value: `[r_value, N_value]`.

    Returns:
        `[..., N_query + N_key + N_value]`, contiguous, dtype of x. Accumulated in fp32; each
        `x @ u` is rounded once to x's dtype.

    Raises:
        ValueError: shapes do not fit.
        TypeError: dtypes or devices differ, or the dtype is not supported.
    """
    return _call(_SVD_QKV, x, u_query, v_query, u_key, v_key, u_value, v_value)
