"""What the launchers of NKI kernels share: an op's arguments, checked and planned.

A launcher (`simulated.py`, `xla.py`, `neuron.py`) is one function from an op's name, tensors and
activation to its result; `kernels_of` makes the dispatcher's kernels of it. `call_kernel` calls an
NKI kernel on the tensors of a Neuron device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.hardware import TARGET_VARIABLE
from neuronmm_ops.ops.reference import ACTIVATION_NAMES, rows
from neuronmm_ops.ops.toolchain import (
    ROUTE_VARIABLE,
    core,
    why_not_compilable,
)
from neuronmm_ops.ops.validation import check_packed, check_svd_mlp, check_xuv, check_xw

if TYPE_CHECKING:
    from neuronmm_ops.kernels import Plan

OPERANDS = {
    "xuv": ("x", "u", "v", "bias"),
    "xuv_packed": ("x", "u", "v", "bias"),
    "xw": ("x", "w", "bias"),
    "svd_mlp": ("x", "u_gate", "v_gate", "u_up", "v_up", "u_down", "v_down"),
}
"""Each op's tensors, in the order of its schema and of its kernels."""
OPS = tuple(OPERANDS)
DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

Weights = tuple[Tensor | None, ...]
Launcher = Callable[[str, Tensor, Weights, str | None], Tensor]
Kernels = Mapping[str, Callable[..., Tensor]]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel on tensors of known shapes.

    Attributes:
        plan: the kernel and its blocks.
        shape: of the op's result, `[..., N]`; the kernel's own is `[M, N]`.
        bias: whether there is one.
        activation: of svd_mlp, None for the others.
    """

    plan: Plan
    shape: tuple[int, ...]
    bias: bool
    activation: str | None

    @property
    def arguments(self) -> dict[str, int | bool | str]:
        """The kernel's compile-time arguments."""
        chosen = {} if self.activation is None else {"activation": self.activation}
        return {**self.plan.arguments, **chosen}


def kernels_of(launcher: Launcher) -> Kernels:
    """The dispatcher kernels of all ops, each of which calls `launcher`.

    Written out, for torch_neuronx reads an op's schema from its function's signature.
    """

    def xuv(x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return launcher("xuv", x, (u, v, bias), None)

    def xuv_packed(x: Tensor, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return launcher("xuv_packed", x, (u, v, bias), None)

    def xw(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return launcher("xw", x, (w, bias), None)

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
        return launcher("svd_mlp", x, (u_gate, v_gate, u_up, v_up, u_down, v_down), activation)

    return {"xuv": xuv, "xuv_packed": xuv_packed, "xw": xw, "svd_mlp": svd_mlp}


def call(kernels: Kernels, op: str, x: Tensor, weights: Weights, activation: str | None) -> Tensor:
    """Call one of `kernels` with a launcher's arguments."""
    return kernels[op](x, *weights, *([] if activation is None else [activation]))


def launch_of(
    op: str, x: Tensor, weights: Weights, activation: str | None, target: str, lnc: int = 1
) -> Launch | None:
    """Check an op's arguments and plan its kernel; None where a dimension is empty.

    Args:
        op: one of `OPS`.
        x: `[..., K]`.
        weights: the op's other tensors in the order of its schema, a missing bias None.
        activation: of svd_mlp, None for the others.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores that share the launch.

    Raises:
        ValueError: shapes do not fit, or are not known.
        TypeError: dtypes or devices differ, or the dtype is not one of a NeuronCore's.
    """
    from neuronmm_ops.kernels import plan_svd_mlp, plan_xuv, plan_xw

    _check(op, x, weights, activation)
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"{op}: a NeuronCore takes bfloat16, float16 and float32, got {x.dtype}; "
            "cast x and the weights"
        )
    *lead, K = static_shape(op, x)
    matrices = [static_shape(op, t) for t in weights if t is not None and t.dim() == 2]
    if 0 in lead or any(0 in shape for shape in matrices):
        return None
    M, N, dtype = math.prod(lead), matrices[-1][1], DTYPE_NAMES[x.dtype]
    ranks = tuple(shape[1] for shape in matrices[::2])
    if op == "xw":
        plan = plan_xw(M, K, N, dtype, target, lnc)
    elif op == "svd_mlp":
        gate, up, down = ranks
        inner = matrices[4][0]
        plan = plan_svd_mlp(M, K, (gate, up, down), inner, N, dtype, target, lnc)
    else:
        plan = plan_xuv(M, K, ranks[0], N, dtype, target, lnc)
    has_bias = weights[-1] is not None and weights[-1].dim() == 1
    return Launch(plan, (*lead, N), has_bias, activation)


def static_shape(op: str, tensor: Tensor) -> tuple[int, ...]:
    """A tensor's sizes as numbers.

    A kernel is planned for one shape. A compiler's symbol becomes the size that is being traced:
    the compiler guards on it, and compiles again for another.

    Raises:
        ValueError: a size is known only when the graph has run.
    """
    if not any(isinstance(size, torch.SymInt) for size in tensor.shape):
        return tuple(tensor.shape)
    is_xla = tensor.device.type == "xla"
    try:
        if not is_xla:  # there int() would run the graph, whose shapes are bounds
            return tuple(int(size) for size in tensor.shape)
    except RuntimeError:
        pass
    other = f", or set {ROUTE_VARIABLE}=composite" if is_xla else ""
    raise ValueError(
        f"{op}: a kernel's shapes must be static, got {list(tensor.shape)}; "
        f"pad to a fixed size{other}"
    )


def launch_here(op: str, x: Tensor, weights: Weights, activation: str | None) -> Launch | None:
    """`launch_of` for the core of this machine."""
    chosen = core()
    return launch_of(op, x, weights, activation, chosen.target, chosen.lnc)


def call_kernel(
    launch: Launch | None,
    x: Tensor,
    weights: Weights,
    kernel_for: Callable[[Plan], Callable[..., Any]] | None = None,
) -> Tensor:
    """Call the real NKI kernel of a launch on device tensors.

    Args:
        launch: what to run; None where a dimension is empty.
        x: `[..., K]`.
        weights: as they were planned, a missing bias None.
        kernel_for: makes a callable of a plan; the kernel itself where not given.

    Returns:
        `[..., N]`.

    Raises:
        NkiVersionError: the kernels cannot compile with the installed NKI.
        RuntimeError: which NeuronCore this machine has is not known.
    """
    from neuronmm_ops.kernels import nki_kernel

    if launch is None:
        return without_products(x, weights)
    problem = why_not_compilable()
    if problem:
        raise NkiVersionError(problem)
    if not core().known:
        raise RuntimeError(
            "an NKI kernel is planned for one NeuronCore, found no Neuron instance type; "
            f"set {TARGET_VARIABLE}"
        )
    kernel = (kernel_for or nki_kernel)(launch.plan)
    # A kernel reads row-major memory; factors are stored along their contraction.
    tensors = [t if t is None else t.contiguous() for t in (rows(x), *weights)]
    return kernel(*tensors, **launch.arguments).view(launch.shape)


def without_products(x: Tensor, weights: Weights) -> Tensor:
    """The result where a dimension is empty: nothing to launch."""
    *_, last = (tensor for tensor in weights if tensor is not None and tensor.dim() == 2)
    out = x.new_zeros((*x.shape[:-1], last.shape[1]))
    bias = weights[-1]
    return out if bias is last or bias is None else out + bias


def _check(op: str, x: Tensor, weights: Weights, activation: str | None) -> None:
    first, second, *_ = weights
    assert first is not None
    if op == "svd_mlp":
        check_svd_mlp(x, *weights, activation, ACTIVATION_NAMES)  # pyright: ignore
    elif op == "xw":
        check_xw(x, first, second)
    else:
        assert second is not None
        if op == "xuv_packed":
            check_packed(first)
        check_xuv(x, first, second, weights[2])
