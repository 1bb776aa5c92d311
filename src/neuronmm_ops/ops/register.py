"""Registers every op: schema, reference, fake, gradients and autocast.

`Library` registration costs one dispatcher hop where `torch.library.custom_op` costs three times
as much. Derivatives come from plain torch ops, so that a training step under `torch.compile` stays
one graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.layered import LayeredSpec
from neuronmm_ops.ops.products import rows
from neuronmm_ops.ops.spec import FLOAT_DTYPES, OpSpec, Options, Results
from neuronmm_ops.storages import dequantized, size_of, storage_of

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
    derivatives = derivatives_of(spec)
    LIBRARY.impl(spec.name, _autograd(spec, derivatives), "Autograd", with_keyset=True)
    # Before the transforms of torch.func: they know an autograd.Function, not an op's own formula.
    LIBRARY.impl(
        spec.name,
        lambda *args: derivatives(*spec.complete(args, {})),
        "FuncTorchDynamicLayerFrontMode",
    )
    for key in () if isinstance(spec, LayeredSpec) else AUTOCAST_KEYS:
        LIBRARY.impl(spec.name, _autocast(spec, key), key)


def _fake(spec: OpSpec) -> Callable[..., Results]:
    """The op on tensors without values: its checks, and the shapes of its results."""

    def fake(*args: Any) -> Results:
        arguments = spec.complete(args, {})
        of_call = spec.of(arguments)
        of_call.check(*arguments)
        shapes = of_call.result_shapes(of_call.split(arguments)[0])
        return spec.returned([args[0].new_empty(shape) for shape in shapes])

    return fake


def derivatives_of(spec: OpSpec) -> Callable[..., Results]:
    """What runs a call of which derivatives may be wanted; it takes all arguments."""
    if spec.backward is not None:
        function, transformed = _functions(spec)
        # Past what `apply` does for transforms alone, in Python up to torch 2.14.
        base: Any = super(torch.autograd.Function, function)

        def differentiate(*args: Any) -> Results:
            is_transformed = torch._C._are_functorch_transforms_active()
            return (transformed if is_transformed else base).apply(*args)

        return differentiate

    def refuse(*args: Any) -> Results:
        raise NotImplementedError(
            f"{spec.name}: the op has no gradient, and no rule for torch.func; call it under "
            "torch.no_grad() and outside transforms"
        )

    return refuse


def is_differentiated(args: Sequence[Any]) -> bool:
    """Whether derivatives with respect to arguments may be wanted."""
    is_wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
    return is_wanted or forward_ad._current_level >= 0  # a tangent is no requires_grad


def _autograd(spec: OpSpec, derivatives: Callable[..., Results]) -> Callable[..., Results]:
    """The op below its derivatives, and `derivatives` where one may be wanted."""
    op = getattr(torch.ops.neuronmm, spec.name).default

    def autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Results:
        if is_differentiated(args):
            return derivatives(*spec.complete(args, {}))
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return autograd


def _functions(spec: OpSpec) -> tuple[Any, Any]:
    """The op with its derivatives in both modes; and with its batching rule, for `torch.func`.

    Both take all arguments. The second has a `setup_context`, with which `apply` binds arguments to
    the signature: twice the time of a small call.
    """
    op, gradients = getattr(torch.ops.neuronmm, spec.name).default, _gradients(spec)
    kept = (*spec.activations, *spec.weights, *spec.integers)

    def forward(*args: Any) -> Results:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.options = spec.split(inputs)
        scales = tensors[len(spec.operands) :]
        wanted = [tensor is not None and tensor.requires_grad for tensor in tensors]
        _refuse_constants(spec, scales, wanted)
        saved = [*[tensors[place] for place in kept], *scales]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)

    def forward_with(ctx: Any, *args: Any) -> Results:
        result = forward(*args)
        setup_context(ctx, args, result)
        return result

    def zeros(saved: Sequence[Any]) -> list[Tensor]:
        tensors = dict(zip(kept, saved, strict=False))
        shapes = spec.result_shapes([tensors.get(place) for place in range(len(spec.operands))])
        return [saved[0].new_zeros(shape) for shape in shapes]

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        saved, all_grads = ctx.saved_tensors, list[Any](grads)
        for n, grad in enumerate(grads):
            all_grads[n] = zeros(saved)[n] if grad is None else grad
        return gradients(saved, ctx.options, all_grads, ctx.needs_input_grad)

    def jvp(ctx: Any, *tangents: Any) -> Results:
        """The gradients are linear in the result's: the tangent is the transpose of that map."""
        saved, needs = ctx.saved_tensors, [tangent is not None for tangent in tangents]
        _refuse_constants(spec, saved[len(kept) :], spec.split(tuple(needs))[0])

        def wanted(*grads: Tensor) -> tuple[Tensor | None, ...]:
            computed = gradients(saved, ctx.options, grads, needs)
            return tuple(each for each, is_needed in zip(computed, needs, strict=True) if is_needed)

        transposed: Any = torch.func.vjp(wanted, *zeros(saved))[1]
        return spec.returned(transposed(tuple(t for t in tangents if t is not None)))

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Results, Any]:
        """Batches of activations are leading dimensions; of weights, a call each."""
        size, batched = info.batch_size, [n for n, dim in enumerate(in_dims) if dim is not None]
        of_results = 0 if len(spec.outputs) == 1 else (0,) * len(spec.outputs)
        arguments = list(args)
        for n in batched:
            arguments[n] = args[n].movedim(in_dims[n], 0)
        if set(batched) <= set(spec.activations):
            for n in spec.activations:
                if n not in batched and arguments[n] is not None:
                    arguments[n] = arguments[n].expand(size, *arguments[n].shape)
            return transformed.apply(*arguments), of_results
        calls = [
            [each[i] if n in batched else each for n, each in enumerate(arguments)]
            for i in range(size)
        ]
        results = [transformed.apply(*call) for call in calls]
        if len(spec.outputs) == 1:
            return torch.stack(results), 0
        return tuple([torch.stack(parts) for parts in zip(*results, strict=True)]), of_results

    def of(**members: Any) -> Any:
        body: Any = {name: staticmethod(member) for name, member in members.items()}
        return type(f"Derivatives_{spec.name}", (torch.autograd.Function,), body)

    both: Any = {"backward": backward, "jvp": jvp}
    transformed: Any = of(forward=forward, setup_context=setup_context, vmap=vmap, **both)
    return of(forward=forward_with, **both), transformed


def _refuse_constants(spec: OpSpec, scales: Sequence[Any], wanted: Sequence[bool]) -> None:
    """Refuse derivatives with respect to scales, and to the factors that have them."""
    if not [scale for scale in scales if scale is not None]:
        return
    for operand, is_wanted in zip(spec.tensors, wanted, strict=True):
        if is_wanted and operand.role in ("factor", "scale"):
            raise TypeError(
                f"{spec.name}: one-byte factors and their scales have no gradient, got "
                f"{operand.name} that requires one; use requires_grad_(False), and train "
                "LoRA on top of them or the factors before they are rounded"
            )


def _gradients(spec: OpSpec) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradients of a call: those of the spec, and the sum of rows for a bias.

    They are a function of the activations, weights, integers and scales, the options, the results'
    gradients, and whether each argument's is needed.
    """
    assert spec.backward is not None
    of_spec = spec.backward
    sizes = [name for names in spec.sides for name in names]
    biases = {
        index: sizes.index(operand.shape)
        for index, operand in enumerate(spec.operands)
        if operand.role == "bias"
    }
    activations, weights = len(spec.activations), len(spec.weights)
    count, choices = len(spec.operands), len(spec.choices)
    places = (0, *spec.weights, *spec.activations[1:])  # as backward returns them

    def gradients(
        saved: Sequence[Any], options: Options, grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        operands: list[Any] = [None] * count
        for place, tensor in zip((*spec.activations, *spec.weights), saved, strict=False):
            operands[place] = tensor
        x, integers = operands[0], saved[activations + weights :][: len(spec.integers)]
        scales = saved[activations + weights + len(integers) :]
        for place, scale in zip(spec.factors, scales, strict=False):
            operands[place] = _dequantized(operands[place], scale, x.dtype)
        grad_rows = [rows(grad) for grad in grads]
        values = [
            operands[place]
            if operands[place] is None or place in spec.weights
            else rows(operands[place])
            for place in places
        ]
        grad = grad_rows[0] if len(grad_rows) == 1 else tuple(grad_rows)
        of_tensors = of_spec(grad, needs, *values, *integers, *options[:choices])
        result: list[Tensor | None] = [None] * len(needs)
        for place, gradient in zip(places, of_tensors, strict=True):
            if gradient is not None and place in spec.activations:
                result[place] = gradient.view(operands[place].shape)
            else:
                result[place] = gradient
        of_sizes = grad_rows  # not split in one: of a DTensor cut there, that would gather
        if biases and len(sizes) > 1:
            widths = iter(spec.widths(operands))
            parts = [
                (one, [next(widths) for _ in names])
                for one, names in zip(grad_rows, spec.sides, strict=True)
            ]
            of_sizes = [part for one, each in parts for part in one.split(each, dim=1)]
        for place, n in biases.items():
            result[place] = of_sizes[n].sum(0) if needs[place] else None
        return tuple(result)

    return gradients


def _dequantized(matrix: Any, scale: Any, dtype: torch.dtype) -> Any:
    """Return a factor `[K, N]` in `dtype`; of a DTensor in groups of rows each rank's part."""
    storage = storage_of(matrix.dtype)
    if storage is None or storage.group is None or not hasattr(matrix, "placements"):
        return dequantized(matrix, scale, dtype)
    from torch.distributed.tensor import DTensor  # imported by whoever made one

    scale = scale.redistribute(placements=matrix.placements)
    like = torch.empty(size_of(matrix), device="meta")
    return DTensor.from_local(
        dequantized(matrix.to_local(), scale.to_local(), dtype),
        *(matrix.device_mesh, matrix.placements),
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _autocast(spec: OpSpec, key: str) -> Callable[..., Results]:
    """The op under `torch.autocast`, as `nn.Linear` follows it: every tensor in its dtype."""
    op = getattr(torch.ops.neuronmm, spec.name).default
    exclude = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def cast(argument: Any, dtype: torch.dtype) -> Any:
        is_float = isinstance(argument, Tensor) and argument.dtype in FLOAT_DTYPES
        return argument.to(dtype) if is_float and argument.dtype != torch.float64 else argument

    def autocast(*args: Any) -> Results:
        device_type = AUTOCAST_KEYS[key] or torch._C._get_privateuse1_backend_name()
        dtype, count = torch.get_autocast_dtype(device_type), len(spec.operands)
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            # factors in one byte and scales stay as they are, and so does what is changed in place
            operands = [
                argument if place in spec.states else cast(argument, dtype)
                for place, argument in enumerate(args[:count])
            ]
            return op(*operands, *args[count:])

    return autocast


for _spec in SPECS.values():
    register(_spec)
