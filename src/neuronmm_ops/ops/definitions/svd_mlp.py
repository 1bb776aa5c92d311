"""`neuronmm::svd_mlp`: the gated MLP `down(act(gate(x)) * up(x))` of low-rank projections."""

from collections.abc import Sequence

from torch import Tensor

from neuronmm_ops.ops.backends.cpu import mm
from neuronmm_ops.ops.gating import ACTIVATIONS, activation_backward, gated
from neuronmm_ops.ops.products import affine, batched, flat, pair_backward
from neuronmm_ops.ops.spec import FLOAT_DTYPES, Operand, OpSpec


def reference(
    x: Tensor,
    u_gate: Tensor,
    v_gate: Tensor,
    u_up: Tensor,
    v_up: Tensor,
    u_down: Tensor,
    v_down: Tensor,
    activation: str = "silu",
    u_gate_scale: Tensor | None = None,
    v_gate_scale: Tensor | None = None,
    u_up_scale: Tensor | None = None,
    v_up_scale: Tensor | None = None,
    u_down_scale: Tensor | None = None,
    v_down_scale: Tensor | None = None,
    compute: str = "x",
) -> Tensor:
    """Return `down(act(gate(x)) * up(x))`, each product times its scale where it is given."""
    factors = (u_gate, v_gate, u_up, v_up, u_down, v_down)
    scales = (u_gate_scale, v_gate_scale, u_up_scale, v_up_scale, u_down_scale, v_down_scale)
    args = (x, *factors, activation, *scales, compute)
    # As in xuv; the product of gate and up would broadcast.
    if (
        activation not in ACTIVATIONS
        or x.dtype not in FLOAT_DTYPES
        or x.dim() == 0
        or v_gate.shape[-1] != v_up.shape[-1]
        or compute != "x"
        or any(scale is not None for scale in scales)
    ):
        SPEC.check(*args)
    try:
        x_flat = flat(x, u_gate)
        gate = affine(x_flat, u_gate, None, u_gate_scale, compute)
        up = affine(x_flat, u_up, None, u_up_scale, compute)
        sides = (gate, v_gate, v_gate_scale), (up, v_up, v_up_scale)
        hidden = gated(*sides, ACTIVATIONS[activation], compute)
        down = affine(hidden, u_down, None, u_down_scale, compute)
        return batched(affine(down, v_down, None, v_down_scale, compute), x)
    except (RuntimeError, IndexError):
        SPEC.check(*args)
        raise


def backward(
    grad: Tensor,
    needs: Sequence[bool],
    x: Tensor,
    u_gate: Tensor,
    v_gate: Tensor,
    u_up: Tensor,
    v_up: Tensor,
    u_down: Tensor,
    v_down: Tensor,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Return dx and the gradients of the six factors."""
    # Recomputed rather than saved: three [M, I] tensors a layer would dominate training memory.
    gate = mm(mm(x, u_gate), v_gate)
    up = mm(mm(x, u_up), v_up)
    act = ACTIVATIONS[activation](gate)

    dhidden, du_down, dv_down = pair_backward(
        grad, (any(needs[:5]), *needs[5:7]), act * up, u_down, v_down
    )
    dx = du_gate = dv_gate = du_up = dv_up = None
    if dhidden is not None:
        dgate = activation_backward(activation, dhidden * up, gate)
        dx_gate, du_gate, dv_gate = pair_backward(dgate, (needs[0], *needs[1:3]), x, u_gate, v_gate)
        dx_up, du_up, dv_up = pair_backward(dhidden * act, (needs[0], *needs[3:5]), x, u_up, v_up)
        if dx_gate is not None and dx_up is not None:
            dx = dx_gate + dx_up
    return dx, du_gate, dv_gate, du_up, dv_up, du_down, dv_down


SPEC = OpSpec(
    "svd_mlp",
    operands=(
        Operand("x", "... K", "activation"),
        Operand("u_gate", "K r_gate"),
        Operand("v_gate", "r_gate I"),
        Operand("u_up", "K r_up"),
        Operand("v_up", "r_up I"),
        Operand("u_down", "I r_down"),
        Operand("v_down", "r_down N"),
    ),
    reference=reference,
    backward=backward,
    choices={"activation": tuple(ACTIVATIONS)},
    is_scaled=True,
    cuts=("I", "r_down", "N"),
)
