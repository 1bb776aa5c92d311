"""What the launchers of NKI kernels share: an op's arguments, checked and planned.

A launcher (`simulated.py`, `xla.py`, `neuron.py`) is one function from an op's spec, tensors and
choices to its result; `implementations` makes the dispatch implementations of all ops of it.
`call_kernel` calls an NKI kernel on the tensors of a Neuron device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuroncore.hardware import TARGET_VARIABLE
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.ops.backends.environment import ROUTE_VARIABLE, core, why_not_compilable
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.layered import LayersSpec
from neuronmm_ops.ops.products import rows
from neuronmm_ops.ops.spec import Operand, OpSpec, Options, Results
from neuronmm_ops.storages import storage_of

if TYPE_CHECKING:
    from neuronmm_ops.plan import Other, Plan

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
PLANNED = ("compute",)
"""Choices that are the plan's: kernels get blocks for them."""

Tensors = tuple[Tensor | None, ...]
"""An op's tensors in the order of `OpSpec.tensors`, x [..., K] first, missing ones None."""
Launcher = Callable[[OpSpec, Tensors, Options], Results]
Implementations = Mapping[str, Callable[..., Results]]
"""What the dispatcher calls for each op."""


@dataclass(frozen=True)
class Launch:
    """An op on tensors of known shapes: one launch of its kernel, or one for each part of x.

    Attributes:
        spec: the op.
        plan: the kernel and its blocks.
        shapes: of the op's results, `[..., N]`; the kernel's own are `[M, N]`, and after them it
            returns the states.
        operands: names of the tensors, without a missing bias.
        choices: the op's other arguments by name.
    """

    spec: OpSpec
    plan: Plan
    shapes: tuple[tuple[int, ...], ...]
    operands: tuple[str, ...]
    choices: Mapping[str, str | float]

    @property
    def arguments(self) -> dict[str, Any]:
        """The kernel's compile-time arguments.

        vLLM-Neuron's compile cache keys a kernel by them and by its own function's source, not its
        helpers'; the fingerprint is of all.
        """
        from neuronmm_ops.kernels import source_fingerprint

        choices = {name: value for name, value in self.choices.items() if name not in PLANNED}
        return {**self.plan.arguments, **choices, "fingerprint": source_fingerprint()}

    def part(self, tokens: int) -> Launch:
        """The launch of some of the tokens, by the arguments of the plan."""
        plan = replace(self.plan, problem=replace(self.plan.problem, M=tokens), launches=(tokens,))
        shapes = tuple([(tokens, shape[-1]) for shape in self.shapes])
        return replace(self, plan=plan, shapes=shapes)


def implementations(launcher: Launcher) -> Implementations:
    """The dispatch implementations of all ops, each of which calls `launcher`."""
    return {name: implementation_of(spec, launcher) for name, spec in SPECS.items()}


def implementation_of(spec: OpSpec, launcher: Launcher) -> Callable[..., Results]:
    """The dispatch implementation of one op."""

    @wraps(spec.reference)  # torch_neuronx reads an op's schema from its function's signature
    def implementation(*args: Any, **kwargs: Any) -> Results:
        arguments = spec.complete(args, kwargs)
        of_call = spec.of(arguments)
        return launcher(of_call, *of_call.split(arguments))

    return implementation


def launch_of(
    spec: OpSpec, tensors: Tensors, choices: Options, target: str, lnc: int = 1
) -> Launch | None:
    """Check an op's arguments and plan its kernel; None where a dimension is empty.

    Args:
        spec: the op.
        tensors: all of the op's, a missing bias None.
        choices: its other arguments.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores that share the launch.

    Raises:
        ValueError: shapes do not fit, or are not known; or layers are too many for a launch.
        TypeError: dtypes or devices differ, or the dtype is not one of a NeuronCore's.
    """
    from neuronmm_ops.kernels.problem import several
    from neuronmm_ops.plan import MAX_INSTRUCTIONS, plan_op

    spec.check(*spec.joined(tensors, choices))
    x = tensors[0]
    assert x is not None
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"{spec.name}: a NeuronCore takes bfloat16, float16 and float32, got {x.dtype}; "
            "cast x and the weights"
        )
    *lead, _ = static_shape(spec.name, x)
    planned = [(operand, _most(spec.name, given)) for operand, given in spec.planned(tensors)]
    factors = [
        (storage_of(given[0].dtype), _most(spec.name, given))
        for operand, given in spec.planned(tensors)
        if operand.role == "factor"
    ]
    matrices = tuple([storage.size(*shape) if storage else shape for storage, shape in factors])
    if 0 in lead or any(0 in shape for shape in matrices):
        return None
    options = dict(zip(spec.options, choices, strict=True))
    plan = plan_op(
        *(spec.name, math.prod(lead), matrices, DTYPE_NAMES[x.dtype], target, lnc),
        weight_dtype=several([storage.dtype if storage else "" for storage, _ in factors]),
        compute=str(options.get("compute", "x")),
        others=tuple(
            [
                _other(operand, shape)
                for n, (operand, shape) in enumerate(planned)
                if operand.role not in ("factor", "bias") and (n > 0 or not matrices)
            ]
        ),
    )
    most = max(1, MAX_INSTRUCTIONS // plan.instructions)
    if isinstance(spec, LayersSpec) and spec.layers > most:
        raise ValueError(
            f"{spec.name}: a launch takes at most {most} layers of these sizes, got {spec.layers}; "
            "pass fewer"
        )
    given = zip(spec.tensors, tensors, strict=True)
    return Launch(
        spec,
        plan,
        tuple([(*lead, width) for *_, width in spec.result_shapes(tensors)]),
        tuple(operand.name for operand, tensor in given if tensor is not None),
        options,
    )


def _most(op: str, tensors: list[Tensor]) -> tuple[int, ...]:
    """The greatest sizes of an operand in any layer."""
    shapes = [static_shape(op, each) for each in tensors]
    return tuple([max(sizes) for sizes in zip(*shapes, strict=True)])


def _other(operand: Operand, shape: tuple[int, ...]) -> Other:
    """A tensor as one of a problem's `others`."""
    if operand.role == "activation":
        return operand.name, (-1, shape[-1]), ""
    return operand.name, shape, "int32" if operand.role == "integer" else ""


def static_shape(op: str, tensor: Tensor | None) -> tuple[int, ...]:
    """A tensor's sizes as numbers.

    A kernel is planned for one shape. A compiler's symbol becomes the size that is being traced:
    the compiler guards on it, and compiles again for another.

    Raises:
        ValueError: a size is known only when the graph has run.
    """
    assert tensor is not None
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


def launch_here(spec: OpSpec, tensors: Tensors, choices: Options) -> Launch | None:
    """`launch_of` for the core of this machine."""
    chosen = core()
    return launch_of(spec, tensors, choices, chosen.target, chosen.lnc)


def launch_parts(
    launch: Launch, tensors: Tensors, run: Callable[[Launch, Tensors], Any]
) -> Results:
    """Run a launch, in several where its plan splits the tokens: a kernel's length is limited.

    Args:
        launch: what to run.
        tensors: the op's.
        run: runs one launch on x [M, K] and the other tensors, all activations as rows, and
            returns what the kernel does: each result [M, N], then the states.

    Returns:
        What the op does.

    Raises:
        ValueError: an op that changes an operand in place has more tokens than a launch takes.
    """
    operands, parts, spec = list(tensors), launch.plan.launches, launch.spec
    if spec.states and len(parts) > 1:
        raise ValueError(
            f"{spec.name}: one launch takes {parts[0]} tokens, got {sum(parts)}; call it with fewer"
        )
    activations = [
        (place, rows(tensor))
        for place in spec.activations
        if (tensor := tensors[place]) is not None
    ]
    made: list[tuple[Tensor, ...]] = []
    for n, tokens in enumerate(parts):
        for place, tensor in activations:
            operands[place] = tensor if len(parts) == 1 else tensor.split(list(parts))[n]
        results = run(launch if len(parts) == 1 else launch.part(tokens), tuple(operands))
        made.append(results if isinstance(results, tuple) else (results,))
    count = len(spec.outputs)
    for place, changed in zip(spec.states, made[0][count:], strict=True):
        state = tensors[place]
        if state is not None and changed is not state:  # a compiler's alias is another tensor
            state.copy_(changed)
    joined = made[0][:count]
    if len(parts) > 1:
        joined = [torch.cat(own) for own in zip(*made, strict=True)]
    return spec.returned([y.view(s) for y, s in zip(joined, launch.shapes, strict=True)])


def call_kernel(
    spec: OpSpec,
    tensors: Tensors,
    choices: Options,
    kernel_for: Callable[[Plan], Callable[..., Any]] | None = None,
) -> Results:
    """Plan an op for this machine's core and call the real NKI kernel on device tensors.

    Args:
        spec: the op.
        tensors: all of the op's, a missing bias None.
        choices: its other arguments.
        kernel_for: makes a callable of a plan; the kernel itself where not given.

    Returns:
        What the op does.

    Raises:
        NkiVersionError: the kernels cannot compile with the installed NKI.
        RuntimeError: which NeuronCore this machine has is not known.
    """
    from neuronmm_ops.kernels import nki_kernel

    launch = launch_here(spec, tensors, choices)
    if launch is None:
        return spec.reference(*spec.joined(tensors, choices))
    problem = why_not_compilable()
    if problem:
        raise NkiVersionError(problem)
    if not core().known:
        raise RuntimeError(
            "an NKI kernel is planned for one NeuronCore, found no Neuron instance type; "
            f"set {TARGET_VARIABLE}"
        )

    def run(part: Launch, tensors: Tensors) -> Results:
        # A kernel reads row-major memory; factors may lie along their contraction.
        row_major = [tensor if tensor is None else tensor.contiguous() for tensor in tensors]
        kernel = (kernel_for or nki_kernel)(part.plan)
        return kernel(*spec.listed(row_major), **part.arguments)

    return launch_parts(launch, tensors, run)
