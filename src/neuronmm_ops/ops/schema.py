"""Every op's schema, fake and autograd formula, side by side.

`Library` registration costs one dispatcher hop where `torch.library.custom_op` costs three times
as much. Gradients come from plain torch ops, so that a training step under `torch.compile` stays
one graph.
"""

from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.ops import reference
from neuronmm_ops.ops.matmul import mm, weight_gradient
from neuronmm_ops.ops.validation import check_svd_mlp, check_xuv, check_xw

LIBRARY = torch.library.Library("neuronmm", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)

XUV = "xuv(Tensor x, Tensor u, Tensor v, Tensor? bias=None) -> Tensor"
XW = "xw(Tensor x, Tensor w, Tensor? bias=None) -> Tensor"
SVD_MLP = (
    "svd_mlp(Tensor x, Tensor u_gate, Tensor v_gate, Tensor u_up, Tensor v_up, "
    'Tensor u_down, Tensor v_down, str activation="silu") -> Tensor'
)

# --- neuronmm::xuv -------------------------------------------------------------------------------

try:
    LIBRARY.define(XUV, tags=_TAGS)
except RuntimeError:
    raise ImportError(
        "the neuronmm ops are already registered in this process, by libneuronmm_ops or by another "
        "copy of this package; use one of them in a process"
    ) from None
LIBRARY.impl("xuv", reference.xuv, "CompositeExplicitAutograd")


@torch.library.register_fake("neuronmm::xuv", lib=LIBRARY)
def _xuv_fake(x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    check_xuv(x, u, v, bias)
    return x.new_empty((*x.shape[:-1], v.shape[1]))


def _xuv_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Any) -> None:
    x, u, v, _ = inputs
    ctx.save_for_backward(x, u, v)


def _xuv_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, u, v = ctx.saved_tensors
    needs = ctx.needs_input_grad
    rows, grad_rows = reference.rows(x), reference.rows(grad)
    dx, du, dv = _pair_backward(rows, u, v, grad_rows, needs[:3])
    # The dispatcher drops a bias of None, and its place here with it.
    dbias = grad_rows.sum(0) if any(needs[3:]) else None
    return _like(dx, x), du, dv, dbias


torch.library.register_autograd(
    "neuronmm::xuv", _xuv_backward, setup_context=_xuv_setup, lib=LIBRARY
)

# --- neuronmm::xw --------------------------------------------------------------------------------

LIBRARY.define(XW, tags=_TAGS)
LIBRARY.impl("xw", reference.xw, "CompositeExplicitAutograd")


@torch.library.register_fake("neuronmm::xw", lib=LIBRARY)
def _xw_fake(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    check_xw(x, w, bias)
    return x.new_empty((*x.shape[:-1], w.shape[1]))


def _xw_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _xw_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad_rows = reference.rows(grad)
    dx = mm(grad_rows, w.t()).view(x.shape) if needs[0] else None
    dw = weight_gradient(reference.rows(x), grad_rows, w) if needs[1] else None
    return dx, dw, grad_rows.sum(0) if any(needs[2:]) else None


torch.library.register_autograd("neuronmm::xw", _xw_backward, setup_context=_xw_setup, lib=LIBRARY)

# --- neuronmm::svd_mlp ---------------------------------------------------------------------------

LIBRARY.define(SVD_MLP, tags=_TAGS)
LIBRARY.impl("svd_mlp", reference.svd_mlp, "CompositeExplicitAutograd")


@torch.library.register_fake("neuronmm::svd_mlp", lib=LIBRARY)
def _svd_mlp_fake(
    x: Tensor,
    u_gate: Tensor,
    v_gate: Tensor,
    u_up: Tensor,
    v_up: Tensor,
    u_down: Tensor,
    v_down: Tensor,
    activation: str = "silu",
) -> Tensor:
    check_svd_mlp(
        x, u_gate, v_gate, u_up, v_up, u_down, v_down, activation, reference.ACTIVATION_NAMES
    )
    return x.new_empty((*x.shape[:-1], v_down.shape[1]))


def _svd_mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.activation = inputs[7]


def _svd_mlp_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, u_gate, v_gate, u_up, v_up, u_down, v_down = ctx.saved_tensors
    needs = ctx.needs_input_grad
    rows = reference.rows(x)
    # Recomputed rather than saved: three [M, I] tensors a layer would dominate training memory.
    gate = mm(mm(rows, u_gate), v_gate)
    up = mm(mm(rows, u_up), v_up)
    act = reference.ACTIVATIONS[ctx.activation](gate)

    dhidden, du_down, dv_down = _pair_backward(
        act * up, u_down, v_down, reference.rows(grad), (any(needs[:5]), *needs[5:7])
    )
    dx = du_gate = dv_gate = du_up = dv_up = None
    if dhidden is not None:
        dgate = _activation_backward(ctx.activation, dhidden * up, gate)
        dx_gate, du_gate, dv_gate = _pair_backward(
            rows, u_gate, v_gate, dgate, (needs[0], *needs[1:3])
        )
        dx_up, du_up, dv_up = _pair_backward(
            rows, u_up, v_up, dhidden * act, (needs[0], *needs[3:5])
        )
        if dx_gate is not None and dx_up is not None:
            dx = _like(dx_gate + dx_up, x)
    return dx, du_gate, dv_gate, du_up, dv_up, du_down, dv_down, None


torch.library.register_autograd(
    "neuronmm::svd_mlp", _svd_mlp_backward, setup_context=_svd_mlp_setup, lib=LIBRARY
)

# --- autocast ------------------------------------------------------------------------------------


AUTOCAST_KEYS = {
    "AutocastCPU": "cpu",
    "AutocastCUDA": "cuda",
    "AutocastXLA": "xla",
    "AutocastPrivateUse1": None,  # named when a backend takes it
}


def _register_autocast(name: str, key: str) -> None:
    """Make the op follow `torch.autocast` as `nn.Linear` does: every tensor in the chosen dtype."""
    op = getattr(torch.ops.neuronmm, name).default
    exclude = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def cast(argument: Any, dtype: torch.dtype) -> Any:
        is_float = isinstance(argument, Tensor) and argument.is_floating_point()
        return argument.to(dtype) if is_float and argument.dtype != torch.float64 else argument

    def kernel(*args: Any) -> Tensor:
        device_type = AUTOCAST_KEYS[key] or torch._C._get_privateuse1_backend_name()
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            return op(*(cast(argument, dtype) for argument in args))

    LIBRARY.impl(name, kernel, key)


for _name in ("xuv", "xw", "svd_mlp"):
    for _key in AUTOCAST_KEYS:
        _register_autocast(_name, _key)

# --- shared by the formulas ----------------------------------------------------------------------


def _pair_backward(
    rows: Tensor, u: Tensor, v: Tensor, grad: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `(rows @ u) @ v` for rows [M, K] and grad [M, N]: dx, du, dv."""
    dinner = mm(grad, v.t()) if needs[0] or needs[1] else None
    dx = mm(dinner, u.t()) if needs[0] and dinner is not None else None
    du = weight_gradient(rows, dinner, u) if needs[1] and dinner is not None else None
    dv = weight_gradient(mm(rows, u), grad, v) if needs[2] else None
    return dx, du, dv


def _activation_backward(name: str, grad: Tensor, x: Tensor) -> Tensor:
    aten = torch.ops.aten
    if name == "silu":
        if torch.is_grad_enabled():  # create_graph=True; silu_backward has no derivative itself
            sigmoid = torch.sigmoid(x)
            return grad * sigmoid * (1 + x * (1 - sigmoid))
        return aten.silu_backward(grad, x)
    if name == "relu":
        return aten.threshold_backward(grad, x, 0)
    return aten.gelu_backward(grad, x, approximate="tanh" if name == "gelu_tanh" else "none")


def _like(rows: Tensor | None, x: Tensor) -> Tensor | None:
    return None if rows is None else rows.view(x.shape)
