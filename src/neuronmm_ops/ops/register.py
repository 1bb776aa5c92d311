"""Registers every op: schema, reference, fake, gradients and autocast.

`Library` registration costs one dispatcher hop where `torch.library.custom_op` costs three times
as much. Gradients come from plain torch ops, so that a training step under `torch.compile` stays
one graph.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.products import dequantized, rows
from neuronmm_ops.ops.spec import FLOAT_DTYPES, ONE_BYTE_DTYPES, Operand, OpSpec

LIBRARY = torch.library.Library("neuronmm", "FRAGMENT")
AUTOCAST_KEYS = {
    "AutocastCPU": "cpu",
    "AutocastCUDA": "cuda",
    "AutocastXLA": "xla",
    "AutocastPrivateUse1": None,  # named when a backend takes it
}


def register(spec: OpSpec) -> None:
    """Register an op under every key; a process can do so once.

    Raises:
        ImportError: the process has an op of that name.
    """
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
        spec.check(*args)
        return args[0].new_empty(spec.result_shape(args))

    return fake


def _setup_context(spec: OpSpec) -> Callable[..., None]:
    """What saves activations, factors, their scales and the choices of a call for its gradients."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.options = spec.split(inputs)
        for operand, tensor in zip(spec.tensors, tensors, strict=True):
            if tensor is not None and tensor.requires_grad and _is_constant(operand, tensor):
                raise TypeError(
                    f"{spec.name}: one-byte factors and their scales have no gradient, got "
                    f"{operand.name} that requires one; use requires_grad_(False), and train "
                    "LoRA beside them or the factors before they are rounded"
                )
        saved = [tensors[place] for place in (*spec.activations, *spec.factors)]
        ctx.save_for_backward(*saved, *tensors[len(spec.operands) :])

    return setup_context


def _is_constant(operand: Operand, tensor: Tensor) -> bool:
    """Whether no gradient with respect to an operand exists."""
    is_one_byte = operand.role == "factor" and tensor.dtype in ONE_BYTE_DTYPES
    return operand.role == "scale" or is_one_byte


def _backward(spec: OpSpec) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradients of a call: those of the spec, and the sum of rows for a bias."""
    biases = {
        index: spec.outputs.index(operand.shape)
        for index, operand in enumerate(spec.operands)
        if operand.role == "bias"
    }
    first, choices = len(spec.activations), len(spec.choices)
    last = first + len(spec.factors)
    others = len(spec.options) + len(spec.scales)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, *more = saved[:first]
        pairs = zip_longest(saved[first:last], saved[last:])
        factors = [dequantized(factor, scale, x.dtype) for factor, scale in pairs]
        needs, grad_rows = ctx.needs_input_grad, rows(grad)
        given = [*factors, *[None if tensor is None else rows(tensor) for tensor in more]]
        found = spec.backward(grad_rows, needs, rows(x), *given, *ctx.options[:choices])
        dfactors, dmore = found[1 : last - first + 1], found[last - first + 1 :]
        dx, *dmore = [
            None if dtensor is None else dtensor.view(tensor.shape)
            for dtensor, tensor in zip((found[0], *dmore), (x, *more), strict=True)
        ]
        of_outputs = (grad_rows,)  # not split in one: of a DTensor cut there, that would gather
        if len(spec.outputs) > 1:
            of_outputs = grad_rows.split(spec.widths([x, *factors]), dim=1)
        # The dispatcher drops a last bias of None, and its place among the needs with it.
        dbias = [of_outputs[n].sum(0) if any(needs[i : i + 1]) else None for i, n in biases.items()]
        return dx, *dfactors, *dmore, *dbias, *[None] * others

    return backward


def _autocast(spec: OpSpec, key: str) -> Callable[..., Tensor]:
    """The op under `torch.autocast`, as `nn.Linear` follows it: every tensor in its dtype."""
    op = getattr(torch.ops.neuronmm, spec.name).default
    exclude = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def cast(argument: Any, dtype: torch.dtype) -> Any:
        is_float = isinstance(argument, Tensor) and argument.dtype in FLOAT_DTYPES
        return argument.to(dtype) if is_float and argument.dtype != torch.float64 else argument

    def autocast(*args: Any) -> Tensor:
        device_type = AUTOCAST_KEYS[key] or torch._C._get_privateuse1_backend_name()
        dtype, count = torch.get_autocast_dtype(device_type), len(spec.operands)
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            # factors in one byte and scales stay as they are
            return op(*(cast(argument, dtype) for argument in args[:count]), *args[count:])

    return autocast


for _spec in SPECS.values():
    register(_spec)
