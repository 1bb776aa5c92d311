"""The ops on TorchNeuron's device `neuron`: the NKI kernels, eager and in a compiled graph.

torch_neuronx has three call modes; the first that the installed one has is used. `nki_op`
makes an op of a Python function that calls the kernel, `wrap_nki` a callable that can be traced,
and every kernel can be called directly. (Neuron SDK: "How to work with NKI kernels from
torch-neuronx".) vLLM-Neuron's libtorch_neuronx_lite has `wrap_nki`, for compiled graphs only.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.abc import InspectLoader
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from neuronmm_ops.ops import register as register  # registers the ops
from neuronmm_ops.ops.backends.environment import (
    INSTALL,
    NEURON_PACKAGES,
    WRAPPER_MODULES,
    is_installed,
    missing_packages,
    neuron_package,
    wrapper,
)
from neuronmm_ops.ops.backends.launch import (
    Implementations,
    Tensors,
    call_kernel,
    implementations,
)
from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.spec import OpSpec, Options, Results

if TYPE_CHECKING:
    from neuronmm_ops.plan import Plan

CallMode = Literal["nki_op", "wrap_nki", "direct"]
DEVICE = "neuron"
WRAPPERS: tuple[CallMode, ...] = ("nki_op", "wrap_nki")

LIBRARY = torch.library.Library("neuronmm", "IMPL")

_wrapped: dict[tuple[str, int], Callable[..., Any]] = {}

# --- the call mode -------------------------------------------------------------------------------


@cache
def call_mode() -> CallMode:
    """How kernels are called here. Imports torch_neuronx, or what stands for it.

    Raises:
        ImportError: nki is not installed, or none of `environment.NEURON_PACKAGES` is.
        NkiVersionError: see `environment.nki_release`.
    """
    missing = missing_packages(*NEURON_PACKAGES)
    if missing:
        raise ImportError(
            f"tensors on a Neuron device need torch_neuronx and nki, {' and '.join(missing)} not "
            f"found; {INSTALL}"
        )
    return _first([name for name in WRAPPERS if wrapper(name) is not None])


def expected_call_mode() -> CallMode | None:
    """What `call_mode` answers, or will answer by the package's source; None if unclear.

    Imports nothing.
    """
    package = neuron_package()
    if package is None:
        return None
    if package in sys.modules:
        return call_mode()
    modules = WRAPPER_MODULES[package]
    names = _names_in(package) if package in modules else []
    if names is None:
        return None
    if any(is_installed(module) for module in modules if module != package):
        names.append("wrap_nki")
    return _first([name for name in WRAPPERS if name in names])


def _names_in(module: str) -> list[str] | None:
    """The words of an installed module's source, None where it cannot be read."""
    spec = importlib.util.find_spec(module)
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return None
    try:
        source = spec.loader.get_source(spec.name)
    except (ImportError, SyntaxError):
        return None
    return None if source is None else re.findall(r"\w+", source)  # None: compiled


def _first(offered: list[CallMode]) -> CallMode:
    return offered[0] if offered else "direct"


# --- the calls -----------------------------------------------------------------------------------


def _run(spec: OpSpec, tensors: Tensors, choices: Options) -> Results:
    run = _implementations()[spec.name] if _is_neuron() else spec.reference
    return run(*spec.joined(tensors, choices))


def _is_neuron() -> bool:
    """Whether PrivateUse1 is not another vendor's device; those run the reference.

    Until a backend registers, the device has no name.
    """
    return torch._C._get_privateuse1_backend_name() in (DEVICE, "privateuseone")


@cache
def _implementations() -> Implementations:
    """What runs each op: ops that torch_neuronx makes, or the calls themselves."""
    calls = implementations(_call)
    if call_mode() != "nki_op":
        return calls
    nki_op = wrapper("nki_op")
    assert nki_op is not None
    made: dict[str, Callable[..., Results]] = {}
    for op, spec in SPECS.items():
        states = [spec.operands[place] for place in spec.states]
        changed = {state.group or state.name for state in states}
        made[op] = nki_op(f"neuronmm_nki::{op}", mutates_args=changed)(calls[op])
    return made


def _call(spec: OpSpec, tensors: Tensors, choices: Options) -> Results:
    """Plan an op and call its kernel; `nki_op` also runs this on fake tensors."""
    return call_kernel(spec, tensors, choices, _kernel_for)


def _kernel_for(plan: Plan) -> Callable[..., Any]:
    from neuronmm_ops.kernels import kernel_named

    return on_cores(kernel_named(plan.problem.op, plan.kernel), plan.kernel, plan.problem.lnc)


def on_cores(kernel: Any, name: str, lnc: int) -> Callable[..., Any]:
    """A kernel for device tensors on `lnc` cores, in `wrap_nki` where there is one.

    Wrapped once for each name: every wrapper takes a place in a registry. It is given the kernel
    and then the grid: a kernel that has its grid already loses it there.
    """
    wrap_nki = wrapper("wrap_nki")
    if wrap_nki is None:
        return kernel if lnc == 1 else kernel[lnc]
    if (name, lnc) not in _wrapped:
        _wrapped[name, lnc] = wrap_nki(kernel)[(lnc,)]
    return _wrapped[name, lnc]


# --- registration --------------------------------------------------------------------------------


def _traced(implementation: Callable[..., Results]) -> Callable[..., Any]:
    """What an op becomes in a graph: its kernel's call on Neuron tensors, itself on all others.

    A compiler for the device knows the node that torch_neuronx makes of a kernel, not our op.
    """

    def functionalize(
        mode: FunctionalTensorMode,
        op: Any,
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if args[0].device.type != DEVICE:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return implementation(*args, **(kwargs or {}))

    return functionalize


for _op, _implementation in implementations(_run).items():
    LIBRARY.impl(_op, _implementation, "PrivateUse1")
    torch.library.register_torch_dispatch(
        f"neuronmm::{_op}", FunctionalTensorMode, _traced(_implementation), lib=LIBRARY
    )
