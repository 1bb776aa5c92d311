"""Ops with operands of every kind, and their kernels.

`add_norm` has a vector, a float and two outputs, `append` a state and an integer that is read at
run time, and no output, `gate_up` a packed operand.
"""

import sys
from types import ModuleType

import torch
from torch import Tensor

from neuronmm_ops.kernels.knobs import Knobs
from neuronmm_ops.kernels.rms_norm.prefill import Normalization
from neuronmm_ops.kernels.shim import jit, nisa, nl
from neuronmm_ops.kernels.stages.tiling import Span
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.register import register
from neuronmm_ops.ops.spec import Operand, OpSpec

X = Operand("x", "... K", "activation")


def add_norm(
    x: Tensor, weight: Tensor, residual: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    ADD_NORM.check(x, weight, residual, eps)
    total = x + residual
    return total, total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def add_norm_backward(grads, needs, x, weight, residual, eps):
    total = x + residual
    inverse = (total.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed, dnormed = total * inverse, grads[1] * weight
    dtotal = grads[0] + inverse * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    return dtotal, (grads[1] * normed).sum(0), dtotal


ADD_NORM = OpSpec(
    "add_norm",
    operands=(X, Operand("weight", "K", "vector"), Operand("residual", "... K", "activation")),
    reference=add_norm,
    backward=add_norm_backward,
    choices={"eps": 1e-6},
    outputs=("K", "K"),
)


def append(x: Tensor, cache: Tensor, position: Tensor) -> None:
    APPEND.check(x, cache, position)
    rows = torch.arange(len(x), device=x.device) + position
    cache.index_copy_(0, rows.long(), x)


APPEND = OpSpec(
    "append",
    operands=(X, Operand("cache", "S K", "state"), Operand("position", "1", "integer")),
    reference=append,
    outputs=(),
)


def gate_up(x: Tensor, w: Tensor) -> Tensor:
    GATE_UP.check(x, w)
    return (x @ w[:, 0]).relu() * (x @ w[:, 1])


def gate_up_backward(grad, needs, x, w):
    gate, up = x @ w[:, 0], x @ w[:, 1]
    dgate, dup = grad * up * (gate > 0), grad * gate.relu()
    return dgate @ w[:, 0].T + dup @ w[:, 1].T, torch.stack([x.T @ dgate, x.T @ dup], 1)


GATE_UP = OpSpec(
    "gate_up",
    operands=(X, Operand("w", "K 2 I")),
    reference=gate_up,
    backward=gate_up_backward,
    outputs=("I",),
    cuts=("N",),
)

KINDS = (ADD_NORM, APPEND, GATE_UP)
for _spec in KINDS:
    register(_spec)


@jit
def add_norm_decode(x, weight, residual, parts=1, eps=1e-6, fingerprint=""):
    M = x.shape[0]
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    Normalization(weight, M, parts, eps).run(out, total, x, residual, Span(0, M))
    return total, out


@jit
def append_decode(x, cache, position, fingerprint=""):
    M, K = x.shape
    x_sb = nl.ndarray((M, K), dtype=x.dtype, buffer=nl.sbuf)
    position_sb = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(x_sb, x)
    nisa.dma_copy(position_sb, position.reshape((1, 1)))
    rows = cache.ap([[K, M], [1, K]], scalar_offset=position_sb, indirect_dim=0)
    nisa.dma_copy(rows, x_sb)
    return cache


@jit
def gate_up_decode(x, w, block=512, fingerprint=""):
    M, K = x.shape
    I = w.shape[2]  # noqa: E741
    out = nl.ndarray((M, I), dtype=x.dtype, buffer=nl.shared_hbm)
    x_sb = nl.ndarray((K, M), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_transpose(x_sb, x)
    for start in range(0, I, block):
        width = min(block, I - start)
        columns = nl.ds(start, width)
        sums = []
        for n in range(2):
            w_sb = nl.ndarray((K, width), dtype=w.dtype, buffer=nl.sbuf)
            sums.append(nl.ndarray((M, width), dtype=nl.float32, buffer=nl.psum))
            nisa.dma_copy(w_sb, w[:, n, columns])
            nisa.nc_matmul(sums[n], x_sb, w_sb)
        gate_sb = nl.ndarray((M, width), dtype=nl.float32, buffer=nl.sbuf)
        y_sb = nl.ndarray((M, width), dtype=x.dtype, buffer=nl.sbuf)
        nisa.activation(gate_sb, nl.relu, sums[0])
        nisa.tensor_tensor(y_sb, gate_sb, sums[1], nl.multiply)
        nisa.dma_copy(out[:, columns], y_sb)
    return out


KERNELS = {
    "add_norm": (add_norm_decode, {"parts": 1}),
    "append": (append_decode, {}),
    "gate_up": (gate_up_decode, {"block": 256}),
}


def operands(op, lead=(6,), dtype=torch.float32):
    """Operands of an op; those that have gradients want them."""
    torch.manual_seed(0)
    shapes = op.shapes({"K": 64, "S": 40, "I": 300}, lead)
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    if op is APPEND:
        return [*tensors[:2], torch.tensor([7], dtype=torch.int32)]
    return [t.requires_grad_() for t in tensors]


def install(monkeypatch):
    """Put the ops into the table of all, and a folder of each into `kernels`."""
    for spec in KINDS:
        kernel, start = KERNELS[spec.name]
        knobs = Knobs(f"{spec.name}_decode", [start], [])
        members = {"knobs": ("decode", lambda _, knobs=knobs: [knobs])}
        members |= {"decode": (knobs.kernel, kernel), "": ("__path__", [])}
        for name, (member, value) in members.items():
            module = ModuleType(f"neuronmm_ops.kernels.{spec.name}.{name}".rstrip("."))
            setattr(module, member, value)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(SPECS, spec.name, spec)
