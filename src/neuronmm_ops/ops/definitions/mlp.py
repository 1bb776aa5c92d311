"""`neuronmm::mlp`: the gated MLP `(act(x @ w_gate) * (x_up @ w_up)) @ w_down`, x_up by default x.

With an x_up it is the middle of a low-rank MLP whose ranks are divided among devices: x and x_up
are then the products with u_gate and u_up, the weights v_gate, v_up and u_down.
"""

from collections.abc import Sequence

from torch import Tensor

from neuronmm_ops.ops.backends.cpu import mm
from neuronmm_ops.ops.gating import ACTIVATIONS, activation_backward, gated
from neuronmm_ops.ops.products import affine, batched, flat, matrix_backward, rows
from neuronmm_ops.ops.spec import FLOAT_DTYPES, Operand, OpSpec


def reference(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    x_up: Tensor | None = None,
    activation: str = "silu",
    w_gate_scale: Tensor | None = None,
    w_up_scale: Tensor | None = None,
    w_down_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Return `(act(x @ w_gate) * (x_up @ w_up)) @ w_down`, each product times its scale, if any."""
    scales = (w_gate_scale, w_up_scale, w_down_scale)
    args = (x, w_gate, w_up, w_down, x_up, activation, *scales, compute)
    # As in xuv; the product of gate and up would broadcast.
    if (
        activation not in ACTIVATIONS
        or x.dtype not in FLOAT_DTYPES
        or x.dim() == 0
        or x_up is not None
        or w_gate.shape[-1] != w_up.shape[-1]
        or compute != "x"
        or any(scale is not None for scale in scales)
    ):
        SPEC.check(*args)
    try:
        of_gate = of_up = flat(x, w_gate)
        if x_up is not None:
            of_up = x_up.reshape(-1) if of_gate.dim() == 1 else rows(x_up)
        sides = (of_gate, w_gate, w_gate_scale), (of_up, w_up, w_up_scale)
        hidden = gated(*sides, ACTIVATIONS[activation], compute)
        return batched(affine(hidden, w_down, None, w_down_scale, compute), x)
    except (RuntimeError, IndexError):
        SPEC.check(*args)
        raise


def backward(
    grad: Tensor,
    needs: Sequence[bool],
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    x_up: Tensor | None,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Return dx, the gradients of the weights, and dx_up where there is an x_up."""
    of_up = x if x_up is None else x_up
    needs_up = needs[0] if x_up is None else needs[4]
    # Recomputed rather than saved, as in svd_mlp.
    gate, up = mm(x, w_gate), mm(of_up, w_up)
    act = ACTIVATIONS[activation](gate)

    needs_hidden = any(needs[:3]) or needs_up
    dhidden, dw_down = matrix_backward(grad, (needs_hidden, needs[3]), act * up, w_down)
    dx = dw_gate = dx_up = dw_up = None
    if dhidden is not None:
        dgate = activation_backward(activation, dhidden * up, gate)
        dx, dw_gate = matrix_backward(dgate, needs[:2], x, w_gate)
        dx_up, dw_up = matrix_backward(dhidden * act, (needs_up, needs[2]), of_up, w_up)
    if x_up is None and dx is not None and dx_up is not None:
        dx, dx_up = dx + dx_up, None
    return dx, dw_gate, dw_up, dw_down, dx_up


SPEC = OpSpec(
    "mlp",
    operands=(
        Operand("x", "... K", "activation"),
        Operand("w_gate", "K I"),
        Operand("w_up", "K_up I"),
        Operand("w_down", "I N"),
        Operand("x_up", "... K_up", "activation", optional=True),
    ),
    reference=reference,
    backward=backward,
    choices={"activation": tuple(ACTIVATIONS)},
    is_scaled=True,
    cuts=("I", "N"),
)
