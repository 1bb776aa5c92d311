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
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.backends.environment import ROUTE_VARIABLE, core, why_not_compilable
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.products import rows
from neuronmm_ops.ops.spec import ONE_BYTE_DTYPES, OpSpec

if TYPE_CHECKING:
    from neuronmm_ops.plan import Plan

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
WEIGHT_DTYPE_NAMES = {dtype: name_of(dtype) for dtype in ONE_BYTE_DTYPES}
"""Of factors in one byte."""
PLANNED = ("compute",)
"""Choices that are the plan's: kernels get blocks for them."""

Tensors = tuple[Tensor | None, ...]
"""An op's tensors in the order of `OpSpec.tensors`, x [..., K] first, missing ones None."""
Choices = tuple[str, ...]
"""An op's string arguments, such as the activation, in the order of `OpSpec.options`."""
Launcher = Callable[[OpSpec, Tensors, Choices], Tensor]
Implementations = Mapping[str, Callable[..., Tensor]]
"""What the dispatcher calls for each op."""


@dataclass(frozen=True)
class Launch:
    """An op on tensors of known shapes: one launch of its kernel, or one for each part of x.

    Attributes:
        spec: the op.
        plan: the kernel and its blocks.
        shape: of the op's result, `[..., N]`; the kernel's own is `[M, N]`.
        operands: names of the tensors, without a missing bias.
        choices: the op's string arguments by name.
    """

    spec: OpSpec
    plan: Plan
    shape: tuple[int, ...]
    operands: tuple[str, ...]
    choices: Mapping[str, str]

    @property
    def arguments(self) -> dict[str, int | bool | str]:
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
        return Launch(self.spec, plan, (tokens, plan.problem.N), self.operands, self.choices)


def implementations(launcher: Launcher) -> Implementations:
    """The dispatch implementations of all ops, each of which calls `launcher`."""
    return {name: _implementation(spec, launcher) for name, spec in SPECS.items()}


def _implementation(spec: OpSpec, launcher: Launcher) -> Callable[..., Tensor]:
    @wraps(spec.reference)  # torch_neuronx reads an op's schema from its function's signature
    def implementation(*args: Any, **kwargs: Any) -> Tensor:
        return launcher(spec, *spec.split(spec.complete(args, kwargs)))

    return implementation


def launch_of(
    spec: OpSpec, tensors: Tensors, choices: Choices, target: str, lnc: int = 1
) -> Launch | None:
    """Check an op's arguments and plan its kernel; None where a dimension is empty.

    Args:
        spec: the op.
        tensors: all of the op's, a missing bias None.
        choices: its string arguments.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores that share the launch.

    Raises:
        ValueError: shapes do not fit, or are not known.
        TypeError: dtypes or devices differ, or the dtype is not one of a NeuronCore's.
    """
    from neuronmm_ops.plan import plan_op

    spec.check(*spec.joined(tensors, choices))
    x = tensors[0]
    assert x is not None
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"{spec.name}: a NeuronCore takes bfloat16, float16 and float32, got {x.dtype}; "
            "cast x and the weights"
        )
    *lead, _ = static_shape(spec.name, x)
    shapes = [static_shape(spec.name, tensors[index]) for index in spec.factors]
    matrices = tuple([(rows, columns) for rows, columns in shapes])
    if 0 in lead or any(0 in shape for shape in matrices):
        return None
    factor = tensors[spec.factors[0]]
    assert factor is not None
    chosen = dict(zip(spec.options, choices, strict=True))
    plan = plan_op(
        *(spec.name, math.prod(lead), matrices, DTYPE_NAMES[x.dtype], target, lnc),
        weight_dtype=WEIGHT_DTYPE_NAMES.get(factor.dtype, ""),
        compute=chosen.get("compute", "x"),
        others=tuple(
            [
                (spec.operands[place].name, (-1, tensor.shape[-1]), "")
                for place in spec.activations[1:]
                if (tensor := tensors[place]) is not None
            ]
        ),
    )
    given = zip(spec.tensors, tensors, strict=True)
    return Launch(
        spec,
        plan,
        (*lead, plan.problem.N),
        tuple(operand.name for operand, tensor in given if tensor is not None),
        chosen,
    )


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


def launch_here(spec: OpSpec, tensors: Tensors, choices: Choices) -> Launch | None:
    """`launch_of` for the core of this machine."""
    chosen = core()
    return launch_of(spec, tensors, choices, chosen.target, chosen.lnc)


def launch_parts(
    launch: Launch, tensors: Tensors, run: Callable[[Launch, Tensors], Tensor]
) -> Tensor:
    """Run a launch, in several where its plan splits the tokens: a kernel's length is limited.

    Args:
        launch: what to run.
        tensors: the op's.
        run: runs one launch on x [M, K] and the other tensors, all activations as rows, and
            returns [M, N].

    Returns:
        `[..., N]`.
    """
    given, parts = list(tensors), launch.plan.launches
    activations = [
        (place, rows(tensor))
        for place in launch.spec.activations
        if (tensor := tensors[place]) is not None
    ]
    if len(parts) == 1:
        for place, tensor in activations:
            given[place] = tensor
        return run(launch, tuple(given)).view(launch.shape)
    results: list[Tensor] = []
    for n, tokens in enumerate(parts):
        for place, tensor in activations:
            given[place] = tensor.split(list(parts))[n]
        results.append(run(launch.part(tokens), tuple(given)))
    return torch.cat(results).view(launch.shape)


def call_kernel(
    spec: OpSpec,
    tensors: Tensors,
    choices: Choices,
    kernel_for: Callable[[Plan], Callable[..., Any]] | None = None,
) -> Tensor:
    """Plan an op for this machine's core and call the real NKI kernel on device tensors.

    Args:
        spec: the op.
        tensors: all of the op's, a missing bias None.
        choices: its string arguments.
        kernel_for: makes a callable of a plan; the kernel itself where not given.

    Returns:
        `[..., N]`.

    Raises:
        NkiVersionError: the kernels cannot compile with the installed NKI.
        RuntimeError: which NeuronCore this machine has is not known.
    """
    from neuronmm_ops.kernels import nki_kernel

    launch = launch_here(spec, tensors, choices)
    if launch is None:
        return without_products(spec, tensors, choices)
    problem = why_not_compilable()
    if problem:
        raise NkiVersionError(problem)
    if not core().known:
        raise RuntimeError(
            "an NKI kernel is planned for one NeuronCore, found no Neuron instance type; "
            f"set {TARGET_VARIABLE}"
        )

    def run(part: Launch, given: Tensors) -> Tensor:
        return (kernel_for or nki_kernel)(part.plan)(*given, **part.arguments)

    # A kernel reads row-major memory; factors may lie along their contraction.
    row_major = tuple([tensor if tensor is None else tensor.contiguous() for tensor in tensors])
    return launch_parts(launch, row_major, run)


def without_products(spec: OpSpec, tensors: Tensors, choices: Choices) -> Tensor:
    """The result where a dimension is empty: nothing to launch, the bias alone.

    Of several results side by side, the others may have products: the reference makes them.
    """
    if len(spec.outputs) > 1:
        return spec.reference(*spec.joined(tensors, choices))
    x = tensors[0]
    assert x is not None
    out = x.new_zeros(spec.result_shape(tensors))
    for operand, tensor in zip(spec.tensors, tensors, strict=True):
        if operand.role == "bias" and tensor is not None:
            out = out + tensor
    return out
