"""Registers every op: schema, reference, fake, gradients and autocast.

`Library` registration costs one dispatcher hop where `torch.library.custom_op` costs three times
as much. Gradients come from plain torch ops, so that a training step under `torch.compile` stays
one graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.products import rows
from neuronmm_ops.ops.spec import OpSpec

LIBRARY = torch.library.Library("neuronmm", "FRAGMENT")
AUTOCAST_KEYS = {
    "AutocastCPU": "cpu",
    "AutocastCUDA": "cuda",
    "AutocastXLA": "xla",
    "AutocastPrivateUse1": None,  # named when a backend takes it
}


def _register(spec: OpSpec) -> None:
    name = f"neuronmm::{spec.name}"
    try:
        LIBRARY.define(spec.schema, tags=(torch.Tag.pt2_compliant_tag,))
    except RuntimeError:
        raise ImportError(
            "the neuronmm ops are already registered in this process, by libneuronmm_ops or by "
            "another copy of this package; use one of them in a process"
        ) from None
    LIBRARY.impl(spec.name, spec.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(name, _fake(spec), lib=LIBRARY)
    torch.library.register_autograd(
        name, _backward(spec), setup_context=_setup_context(spec), lib=LIBRARY
    )
    for key in AUTOCAST_KEYS:
        LIBRARY.impl(spec.name, _autocast(spec, key), key)


def _fake(spec: OpSpec) -> Callable[..., Tensor]:
    """The op on tensors without values: its checks, and the shape of its result."""

    def fake(*args: Any) -> Tensor:
        spec.check(*spec.complete(args, {}))
        return args[0].new_empty(spec.result_shape(args))

    return fake


def _setup_context(spec: OpSpec) -> Callable[..., None]:
    """What saves x, the factors and the choices of a call for its gradients."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], *[inputs[index] for index in spec.factors])
        ctx.choices = inputs[len(spec.operands) :]

    return setup_context


def _backward(spec: OpSpec) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradients of a call: those of the spec, and the sum of rows for a bias."""
    biases = [index for index, operand in enumerate(spec.operands) if operand.role == "bias"]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *factors = ctx.saved_tensors
        needs, grad_rows = ctx.needs_input_grad, rows(grad)
        dx, *rest = spec.backward(grad_rows, needs, rows(x), *factors, *ctx.choices)
        # The dispatcher drops a bias of None, and its place among the needs with it.
        dbias = [grad_rows.sum(0) if any(needs[i : i + 1]) else None for i in biases]
        return None if dx is None else dx.view(x.shape), *rest, *dbias, *[None] * len(ctx.choices)

    return backward


def _autocast(spec: OpSpec, key: str) -> Callable[..., Tensor]:
    """The op under `torch.autocast`, as `nn.Linear` follows it: every tensor in its dtype."""
    op = getattr(torch.ops.neuronmm, spec.name).default
    exclude = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def cast(argument: Any, dtype: torch.dtype) -> Any:
        is_float = isinstance(argument, Tensor) and argument.is_floating_point()
        return argument.to(dtype) if is_float and argument.dtype != torch.float64 else argument

    def autocast(*args: Any) -> Tensor:
        device_type = AUTOCAST_KEYS[key] or torch._C._get_privateuse1_backend_name()
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            return op(*(cast(argument, dtype) for argument in args))

    return autocast


for _spec in SPECS.values():
    _register(_spec)
