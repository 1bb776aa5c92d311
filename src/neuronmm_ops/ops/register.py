"""Registers every op: schema, reference, fake, gradients and autocast.

`Library` registration costs one dispatcher hop where `torch.library.custom_op` costs three times
as much. Derivatives come from plain torch ops, so that a training step under `torch.compile` stays
one graph.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
    function = _function(spec)
    LIBRARY.impl(spec.name, _autograd(spec, function), "Autograd", with_keyset=True)
    # Before the transforms of torch.func: they know an autograd.Function, not an op's own formula.
    LIBRARY.impl(
        spec.name,
        lambda *args: function.apply(*spec.complete(args, {})),
        "FuncTorchDynamicLayerFrontMode",
    )
    for key in AUTOCAST_KEYS:
        LIBRARY.impl(spec.name, _autocast(spec, key), key)


def _fake(spec: OpSpec) -> Callable[..., Tensor]:
    """The op on tensors without values: its checks, and the shape of its result."""

    def fake(*args: Any) -> Tensor:
        spec.check(*args)
        return args[0].new_empty(spec.result_shape(args))

    return fake


def _autograd(spec: OpSpec, function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """The op below its derivatives, and `function` where one may be wanted."""
    op = getattr(torch.ops.neuronmm, spec.name).default

    def autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Tensor:
        is_wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        if is_wanted or forward_ad._current_level >= 0:  # a tangent is no requires_grad
            return function.apply(*spec.complete(args, {}))
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return autograd


def _function(spec: OpSpec) -> type[torch.autograd.Function]:
    """The op with its derivatives in both modes, and its batching rule; takes all arguments."""
    op, gradients = getattr(torch.ops.neuronmm, spec.name).default, _gradients(spec)

    def forward(*args: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.options = spec.split(inputs)
        ctx.constants = [_is_constant(*pair) for pair in zip(spec.tensors, tensors, strict=True)]
        wanted = [tensor is not None and tensor.requires_grad for tensor in tensors]
        _refuse_constants(spec, ctx.constants, wanted)
        saved = [tensors[place] for place in (*spec.activations, *spec.factors)]
        saved += tensors[len(spec.operands) :]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        return gradients(ctx.saved_tensors, ctx.options, grad, ctx.needs_input_grad)

    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """The gradients are linear in the result's: the tangent is the transpose of that map."""
        saved, needs = ctx.saved_tensors, [tangent is not None for tangent in tangents]
        x, factors = saved[0], saved[len(spec.activations) :][: len(spec.factors)]
        _refuse_constants(spec, ctx.constants, spec.split(tuple(needs))[0])

        def wanted(grad: Tensor) -> tuple[Tensor | None, ...]:
            found = gradients(saved, ctx.options, grad, needs)
            return tuple(each for each, is_needed in zip(found, needs, strict=True) if is_needed)

        zeros = x.new_zeros(spec.result_shape([x, *factors]))
        transposed: Any = torch.func.vjp(wanted, zeros)[1]
        return transposed(tuple(tangent for tangent in tangents if tangent is not None))[0]

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """Batches of activations are leading dimensions; of weights, a call each."""
        size, batched = info.batch_size, [n for n, dim in enumerate(in_dims) if dim is not None]
        given = list(args)
        for n in batched:
            given[n] = args[n].movedim(in_dims[n], 0)
        if set(batched) <= set(spec.activations):
            for n in spec.activations:
                if n not in batched and given[n] is not None:
                    given[n] = given[n].expand(size, *given[n].shape)
            return function.apply(*given), 0
        calls = [
            [each[i] if n in batched else each for n, each in enumerate(given)] for i in range(size)
        ]
        return torch.stack([function.apply(*call) for call in calls]), 0

    members: tuple[Any, ...] = (forward, setup_context, backward, jvp, vmap)
    body: Any = {member.__name__: staticmethod(member) for member in members}
    function: Any = type(f"Derivatives_{spec.name}", (torch.autograd.Function,), body)
    return function


def _refuse_constants(spec: OpSpec, constants: Sequence[bool], wanted: Sequence[bool]) -> None:
    for operand, is_constant, is_wanted in zip(spec.tensors, constants, wanted, strict=True):
        if is_constant and is_wanted:
            raise TypeError(
                f"{spec.name}: one-byte factors and their scales have no gradient, got "
                f"{operand.name} that requires one; use requires_grad_(False), and train "
                "LoRA beside them or the factors before they are rounded"
            )


def _is_constant(operand: Operand, tensor: Tensor | None) -> bool:
    """Whether no gradient with respect to an operand exists."""
    if tensor is None or operand.role != "factor":
        return operand.role == "scale"
    return tensor.dtype in ONE_BYTE_DTYPES


def _gradients(spec: OpSpec) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradients of a call: those of the spec, and the sum of rows for a bias.

    They are a function of the activations, factors and scales, the options, the result's gradient,
    and whether each argument's is needed.
    """
    biases = {
        index: spec.outputs.index(operand.shape)
        for index, operand in enumerate(spec.operands)
        if operand.role == "bias"
    }
    first, choices = len(spec.activations), len(spec.choices)
    last = first + len(spec.factors)
    others = len(spec.options) + len(spec.scales)

    def gradients(
        saved: Sequence[Any], options: tuple[str, ...], grad: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        x, *more = saved[:first]
        pairs = zip_longest(saved[first:last], saved[last:])
        factors = [dequantized(factor, scale, x.dtype) for factor, scale in pairs]
        grad_rows = rows(grad)
        given = [*factors, *[None if tensor is None else rows(tensor) for tensor in more]]
        found = spec.backward(grad_rows, needs, rows(x), *given, *options[:choices])
        dfactors, dmore = found[1 : last - first + 1], found[last - first + 1 :]
        dx, *dmore = [
            None if dtensor is None else dtensor.view(tensor.shape)
            for dtensor, tensor in zip((found[0], *dmore), (x, *more), strict=True)
        ]
        of_outputs = (grad_rows,)  # not split in one: of a DTensor cut there, that would gather
        if len(spec.outputs) > 1:
            of_outputs = grad_rows.split(spec.widths([x, *factors]), dim=1)
        dbias = [of_outputs[n].sum(0) if needs[i] else None for i, n in biases.items()]
        return dx, *dfactors, *dmore, *dbias, *[None] * others

    return gradients


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
