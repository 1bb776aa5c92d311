"""The ops on XLA tensors: one HLO custom call each, with the NKI kernel inside.

Where NKI and torch_neuronx are installed the `@nki.jit` kernel is called and emits the call itself;
elsewhere the call is written here, so that lowering can be read and tested without Neuron. The
call goes through a user computation, whose hash covers its config: torch_xla's own
`_xla_custom_call` hashes the target alone, and would run one kernel for another.
"""

import base64
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.import_hooks import after_import
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.backends.environment import ROUTE_VARIABLE, core, xla_route
from neuronmm_ops.ops.backends.launch import (
    Launch,
    Tensors,
    call_kernel,
    implementation_of,
    implementations,
    launch_here,
    launch_parts,
    static_shape,
)
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.register import derivatives_of, is_differentiated  # registers the ops
from neuronmm_ops.ops.spec import OpSpec, Options, Results

TARGET = "AwsNeuronCustomNativeKernel"
"""The custom call that the Neuron compiler replaces by an NKI kernel."""
API_NEURON = 2
"""XLA's api version of the Neuron compiler: status-returning."""
API_HOST = 3
"""The same with the config passed to a handler on the host."""

LIBRARY = torch.library.Library("neuronmm", "IMPL")

# What a config says of the problem.
_PROBLEM = (
    *("op", "M", "matrices", "K", "ranks", "inner", "N", "dtype", "weight_dtype", "compute"),
    *("inputs", "target", "lnc"),
)

_api_version = API_NEURON
_computations: dict[tuple[Any, ...], Any] = {}
CHANGING: dict[str, Callable[..., Any]] = {}
"""Ops with a state: below autograd the dispatcher refuses them on XLA."""


@contextmanager
def api_version(version: int) -> Generator[None, None, None]:
    """Lower the ops with another api version: `API_HOST` for a handler registered with XLA:CPU."""
    global _api_version
    previous, _api_version = _api_version, version
    try:
        yield
    finally:
        _api_version = previous


def config_of(launch: Launch) -> str:
    """The custom call's backend_config, base64 of JSON: what NKI documents, and `neuronmm`.

    Source of the members that NKI writes: Neuron SDK 2.32, "NKI Kernel as a Framework Custom
    Operator". The object `neuronmm` holds whatever else distinguishes two calls, so that different
    kernels never share a hash.
    """
    from neuronmm_ops.kernels import source_fingerprint

    plan, problem = launch.plan, launch.plan.problem
    config = {
        "kernel_version": 1,
        "klir_binary": {
            "binary": f"neuronmm_ops.kernels.{plan.kernel}@{source_fingerprint()}",
            "input_names": launch.operands,
            "output_names": _results_of(launch),
        },
        "func_name": plan.kernel,
        "grid": [] if problem.lnc == 1 else [problem.lnc],
        "has_collectives": False,
        "neuronmm": {
            **{name: getattr(problem, name) for name in _PROBLEM},
            "bias": any(name.startswith("bias") for name in launch.operands),
            "activation": None,
            **launch.choices,
            "form": plan.phase,
            "blocks": plan.arguments,
        },
    }
    return base64.b64encode(json.dumps(config, sort_keys=True).encode()).decode()


def module_for(launch: Launch, tensors: Sequence[Tensor], api: int) -> bytes:
    """The HLO module of one launch: `tensors` as they are, reshaped around the call to [M, K]."""
    from neuronmm_ops.ops.backends.hlo import Array, CustomCall, module_of

    problem = launch.plan.problem
    spec = launch.spec
    activations = [spec.operands[place].name for place in spec.activations]
    parameters = [Array(tuple(tensor.shape), name_of(tensor.dtype)) for tensor in tensors]
    operands = [
        Array((problem.M, array.shape[-1]), array.dtype) if name in activations else array
        for name, array in zip(launch.operands, parameters, strict=True)
    ]
    states = [launch.operands.index(spec.operands[place].name) for place in spec.states]
    changed = [parameters[place] for place in states]
    return module_of(
        f"neuronmm_{problem.op}",
        CustomCall(TARGET, config_of(launch), api),
        parameters,
        operands,
        [*[Array((problem.M, shape[-1]), problem.dtype) for shape in launch.shapes], *changed],
        [*[Array(shape, problem.dtype) for shape in launch.shapes], *changed],
        dict(enumerate(states, len(launch.shapes))),
    )


def _results_of(launch: Launch) -> list[str]:
    """Names of what the kernel returns: y, or each result's, and the states."""
    count, spec = len(launch.shapes), launch.spec
    results = ["y"] if count == 1 else [f"y{n}" for n in range(count)]
    return [*results, *[spec.operands[place].name for place in spec.states]]


def _lower(spec: OpSpec, tensors: Tensors, choices: Options) -> Results:
    route = xla_route()
    if route.name == "custom call":
        return _custom_call(spec, tensors, choices)
    if route.name == "nki":
        return call_kernel(spec, tensors, choices)
    return spec.reference(*spec.joined(tensors, choices))


def _custom_call(
    spec: OpSpec, tensors: Tensors, choices: Options, part: Launch | None = None
) -> Results:
    """Append the op's custom call to the graph that torch_xla is tracing.

    Where the plan splits the tokens, or the kernel returns states, it is one of each part, which is
    planned already.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    # which are missing, too: two biases may be alike
    signature = [each is not None and (each.shape, each.dtype, each.device) for each in tensors]
    key = (spec.name, choices, core(), _api_version, part and part.plan, *signature)
    try:
        computation = _computations.get(key)
    except TypeError:  # a size that is no number has no hash
        for tensor in present:
            static_shape(spec.name, tensor)
        raise
    if computation is None:
        _refuse_downcasts()
        launch = part or launch_here(spec, tensors, choices)
        if launch is None:
            return spec.reference(*spec.joined(tensors, choices))
        _warn_where_it_cannot_run(_api_version)
        in_parts = len(launch.plan.launches) > 1 or (spec.states and part is None)
        computation = _computations[key] = launch if in_parts else _computation(launch, present)
    if isinstance(computation, Launch):
        return launch_parts(
            computation, tensors, lambda own, present: _custom_call(spec, present, choices, own)
        )
    made = _torch_xla()._xla_user_computation(f"xla::neuronmm_{spec.name}", present, computation)
    return made[0] if len(made) == 1 else tuple(made)


def _refuse_dynamic_exports() -> None:
    """Make torch_xla's StableHLO export raise where a size of an op is dynamic.

    Its lazy tensors have the size of the example there; the exported graph alone says it.
    """
    interpreter = sys.modules["torch_xla.stablehlo"].XLAExportInterpreter
    prepare = interpreter.__init__

    @wraps(prepare)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare(self, *args, **kwargs)
        if xla_route().name == "composite":
            return
        for node in self.graph.nodes:
            if getattr(node.target, "namespace", "") != "neuronmm":
                continue
            for shape in (tensor.meta["val"].shape for tensor in node.all_input_nodes):
                if any(isinstance(size, torch.SymInt) for size in shape):
                    raise ValueError(
                        f"{node.target}: the custom call has static shapes, got {list(shape)}; "
                        "export one program for each size"
                    )

    interpreter.__init__ = checked


def _refuse_downcasts() -> None:
    """Raise where torch_xla computes in another dtype than its tensors have."""
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if re.match(r"true$|\s*[+-]?0*[1-9]", os.environ.get(name, "")):  # as torch_xla reads it
            raise RuntimeError(
                f"the ops lower the dtypes that tensors have, {name}={os.environ[name]} changes "
                "them; unset it and use model.bfloat16()"
            )


@cache
def _warn_where_it_cannot_run(version: int) -> None:
    """Warn once: XLA's CPU client fails on a call without a handler, or ends the process."""
    from torch_xla import runtime  # pyright: ignore[reportMissingImports]

    if version == API_NEURON and runtime.device_type() == "CPU":
        warnings.warn(
            "XLA:CPU has no NKI kernels: this graph can be read or exported, not run; "
            f"set {ROUTE_VARIABLE}=composite to run it",
            stacklevel=2,
        )


@cache
def _torch_xla() -> Any:
    """torch_xla's extension module; importing it at every call would cost half a microsecond."""
    from torch_xla import _XLAC  # pyright: ignore[reportMissingImports]

    return _XLAC


def _computation(launch: Launch, tensors: Sequence[Tensor]) -> Any:
    from torch_xla.core import xla_builder  # pyright: ignore[reportMissingImports]

    name = f"neuronmm_{launch.plan.problem.op}"
    module = module_for(launch, tensors, _api_version)
    return xla_builder.computation_from_module_proto(name, module)


def register_op(spec: OpSpec) -> None:
    """Lower an op. One with a state runs above functionalization, which takes no such op."""
    lower = implementation_of(spec, _lower)
    LIBRARY.impl(spec.name, lower, "XLA")

    def change(*args: Any, **kwargs: Any) -> Results:
        if is_differentiated(args):
            return derivatives_of(spec)(*args)
        return lower(*args, **kwargs)

    if spec.states:
        CHANGING[spec.name] = change
        LIBRARY.impl(spec.name, change, "AutogradXLA")


IMPLEMENTATIONS = implementations(_lower)
for _spec in SPECS.values():
    register_op(_spec)
after_import("torch_xla.stablehlo", _refuse_dynamic_exports)
