"""What must hold of the ops' arguments: one function an op, one error text a rule.

Shapes raise `ValueError`, dtypes and devices `TypeError`; each text states the rule, the values
seen and the remedy.
"""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_xuv(x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """Check `x[..., K]`, `u[K, r]`, `v[r, N]`, `bias[N]`."""
    _check_operands("xuv", x, {"u": u, "v": v}, bias)
    _check_contraction("xuv", "x", x, "u", u)
    _check_contraction("xuv", "u", u, "v", v)
    _check_bias("xuv", "v", v, bias)


def check_xw(x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """Check `x[..., K]`, `w[K, N]`, `bias[N]`."""
    _check_operands("xw", x, {"w": w}, bias)
    _check_contraction("xw", "x", x, "w", w)
    _check_bias("xw", "w", w, bias)


def check_svd_mlp(
    x: Tensor,
    u_gate: Tensor,
    v_gate: Tensor,
    u_up: Tensor,
    v_up: Tensor,
    u_down: Tensor,
    v_down: Tensor,
    activation: str,
    activations: tuple[str, ...],
) -> None:
    """Check `x[..., K]`, gate and up `u[K, r]`, `v[r, I]`, down `u[I, r]`, `v[r, N]`."""
    factors = {
        "u_gate": u_gate,
        "v_gate": v_gate,
        "u_up": u_up,
        "v_up": v_up,
        "u_down": u_down,
        "v_down": v_down,
    }
    _check_operands("svd_mlp", x, factors, None)
    for first, second in (("u_gate", "v_gate"), ("u_up", "v_up"), ("u_down", "v_down")):
        _check_contraction("svd_mlp", first, factors[first], second, factors[second])
    _check_contraction("svd_mlp", "x", x, "u_gate", u_gate)
    _check_contraction("svd_mlp", "x", x, "u_up", u_up)
    if v_gate.shape[1] != v_up.shape[1]:
        raise ValueError(
            "svd_mlp: v_gate and v_up must have the same number of columns, "
            f"got v_gate {_shape(v_gate)} and v_up {_shape(v_up)}"
        )
    _check_contraction("svd_mlp", "v_gate", v_gate, "u_down", u_down)
    if activation not in activations:
        raise ValueError(
            f"svd_mlp: activation must be one of {', '.join(activations)}; got {activation!r}"
        )


def check_not_nested(args: tuple[object, ...]) -> None:
    """Check that no argument is a nested tensor, of whatever layout: its rows are no `[..., K]`."""
    for argument in args:
        if isinstance(argument, Tensor) and argument.is_nested:
            raise TypeError(
                f"neuronmm ops take no nested tensor, got one of layout {argument.layout}; "
                "unbind() it, or pad it with to_padded_tensor(0.0)"
            )


def _check_operands(op: str, x: Tensor, matrices: dict[str, Tensor], bias: Tensor | None) -> None:
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension [..., K], got a 0-D tensor")
    for name, matrix in matrices.items():
        if matrix.dim() != 2:
            raise ValueError(f"{op}: {name} must be a matrix, got shape {_shape(matrix)}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: dtype must be bfloat16, float16, float32 or float64, got {x.dtype}; "
            "cast x and the weights"
        )
    others = dict(matrices) if bias is None else {**matrices, "bias": bias}
    for name, tensor in others.items():
        if tensor.dtype != x.dtype:
            raise TypeError(
                f"{op}: x and {name} must have the same dtype, got {x.dtype} and {tensor.dtype}; "
                "cast one of them with .to(dtype)"
            )
        if tensor.device != x.device:
            raise TypeError(
                f"{op}: x and {name} must be on the same device, got {x.device} and "
                f"{tensor.device}; move one of them with .to(device)"
            )


def _check_contraction(op: str, a: str, left: Tensor, b: str, right: Tensor) -> None:
    if left.shape[-1] != right.shape[0]:
        raise ValueError(
            f"{op}: last dimension of {a} must equal first dimension of {b}, "
            f"got {a} {_shape(left)} and {b} {_shape(right)}"
        )


def _check_bias(op: str, name: str, matrix: Tensor, bias: Tensor | None) -> None:
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != matrix.shape[1]):
        raise ValueError(
            f"{op}: bias must have shape [N] with N the columns of {name}, "
            f"got bias {_shape(bias)} and {name} {_shape(matrix)}"
        )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
