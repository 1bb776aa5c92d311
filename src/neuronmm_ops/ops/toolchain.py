"""The Neuron tools of this machine: which core, which NKI, how an op is lowered.

Every import path of NKI and torch_neuronx that the package knows is in this file; only the kernels'
own imports are in `kernels/shim.py`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.ops.launch import Launch, Weights, launch_of, without_products
from neuronmm_ops.ops.reference import rows

if TYPE_CHECKING:
    from neuronmm_ops.kernels import Plan

TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
ROUTE_VARIABLE = "NEURONMM_XLA"

PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"
"""Holds the EC2 instance type (source: aws-neuron/nkipy, which detects the target by it)."""

PLACEHOLDER = "0.0.1"
"""The version of `nki` on the default package index, which has no `nki.language`."""
BRIDGES = {
    "0.2": "nki._torch_xla",
    "0.3": "nki.framework.torch_xla",
    "0.4": "nki.framework.torch_xla",
    "0.5": "nki.framework._torch_xla",
    "0.6": "nki.framework._torch_xla",
}
"""The supported NKI lines, each with the module by which its kernels take XLA tensors."""
TOO_OLD = ("0.2",)
"""Lines in which the kernels cannot compile: `nc_matmul(accumulate=)` came with 0.3.

Source: Neuron SDK 2.32, NKI migration guide.
"""
TORCH_NEURONX = ("torch_neuronx", "torch_neuronx.nki_hop", "libtorch_neuronx_lite.nki.nki_hop")
"""Where `nki_op` and `wrap_nki` have been, newest first."""
INSTALL = "run: pip install 'neuronmm-ops[neuron]' --extra-index-url https://pip.repos.neuron.amazonaws.com"

# --- the core ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Core:
    """The NeuronCore that kernels are planned for.

    Attributes:
        target: trn1, trn2 or trn3.
        lnc: physical cores of a logical one, 1 or 2.
        source: where each of the two came from.
        known: the target was set or found; otherwise it is only the smallest.
    """

    target: str
    lnc: int
    source: str
    known: bool


def core() -> Core:
    """The core of this machine: by the environment, else by the instance type, else trn1.

    The environment is read at every call: the Neuron tools read it late, too.

    Raises:
        ValueError: `NEURON_PLATFORM_TARGET_OVERRIDE` is no target, or `NEURON_LOGICAL_NC_CONFIG` is
            not 1 or 2, or 2 where the target has single cores only.
    """
    read = os.environ.get
    return _core(read(TARGET_VARIABLE), read(LNC_VARIABLE), _instance_type(PRODUCT_NAME))


@cache
def _instance_type(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


@cache
def _core(override: str | None, lnc: str | None, instance: str) -> Core:
    from neuronmm_ops.neuroncore.machine import machine_of

    if override:
        machine, known, source = machine_of(override), True, TARGET_VARIABLE
    elif found := _target_of(instance):
        machine, known, source = machine_of(found), True, f"instance type {instance}"
    else:
        machine, known = machine_of("trn1"), False
        source = f"no Neuron instance found; set {TARGET_VARIABLE}"
    target, default = machine.target, machine.default_lnc
    if not lnc:
        return Core(target, default, f"target: {source}; lnc: default of {target}", known)
    if lnc not in ("1", "2") or int(lnc) > default:
        raise ValueError(
            f"{LNC_VARIABLE} must be 1, or 2 on trn2 and trn3; got {lnc!r} on {target} ({source})"
        )
    return Core(target, int(lnc), f"target: {source}; lnc: {LNC_VARIABLE}", known)


def _target_of(instance: str) -> str | None:
    """The target of an EC2 instance type such as trn1n.32xlarge, None for any other machine."""
    family = re.match(r"(trn[123]|inf2)[a-z]*\.", instance)
    return family and family[1]


# --- the packages --------------------------------------------------------------------------------


@cache
def nki_release() -> str | None:
    """Version of the installed NKI; None where there is none, or only the placeholder 0.0.1.

    Imports nothing.

    Raises:
        NkiVersionError: it is of no supported line, or lacks the module that its line has.
    """
    try:
        version = importlib.metadata.version("nki")
    except importlib.metadata.PackageNotFoundError:
        return None
    if version == PLACEHOLDER:
        return None
    bridge = BRIDGES.get(_line(version))
    if bridge is None:
        raise NkiVersionError(
            f"nki must be one of {', '.join(BRIDGES)}; got {version}; install one of these from "
            "the Neuron package index"
        )
    if not is_installed(bridge):
        raise NkiVersionError(
            f"nki {version} should have the module {bridge}, and has none; reinstall it from the "
            "Neuron package index"
        )
    return version


def why_not_compilable() -> str | None:
    """Why the kernels cannot compile with the installed NKI; None where they can."""
    release = nki_release()
    if release is None or _line(release) not in TOO_OLD:
        return None
    return (
        f"the kernels need NKI 0.3 or later for nc_matmul(accumulate=), got nki {release}; install "
        f"a later one, or set {ROUTE_VARIABLE}=composite on XLA"
    )


def nki_bridge(release: str) -> str:
    """The module by which the kernels of a supported NKI take XLA tensors."""
    return BRIDGES[_line(release)]


def _line(version: str) -> str:
    return ".".join(version.split(".")[:2])


def is_installed(module: str) -> bool:
    """Whether a module can be found. Imports none of its parents, as `find_spec` would."""
    top, *below = module.split(".")
    spec, name = importlib.util.find_spec(top), top
    for part in below:
        if spec is None:
            return False
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations or [])
    return spec is not None


def missing_packages() -> list[str]:
    """Which of nki and torch_neuronx are not installed. Raises as `nki_release` does."""
    found = {"nki": nki_release() is not None, "torch_neuronx": is_installed("torch_neuronx")}
    return [name for name, there in found.items() if not there]


@cache
def torch_neuronx_function(name: str) -> Callable[..., Any] | None:
    """`nki_op` or `wrap_nki` of the installed torch_neuronx, which is imported; None without it."""
    for module in TORCH_NEURONX:
        if is_installed(module):
            found = getattr(importlib.import_module(module), name, None)
            if found is not None:
                return found
    return None


# --- the route of XLA ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """How the ops on XLA tensors are lowered, and why so."""

    name: Literal["custom call", "nki", "composite"]
    reason: str


_COMPOSITE = Route("composite", f"two dots per pair, asked for by {ROUTE_VARIABLE}=composite")


def xla_route() -> Route:
    """How this process lowers an op on XLA tensors.

    Raises:
        ValueError: `NEURONMM_XLA` is neither empty nor composite.
        NkiVersionError: see `nki_release`.
    """
    asked = os.environ.get(ROUTE_VARIABLE)
    if not asked:
        return _route_of_packages()
    if asked == "composite":
        return _COMPOSITE
    raise ValueError(f"{ROUTE_VARIABLE} must be composite or empty; got {asked!r}")


@cache
def _route_of_packages() -> Route:
    missing, release = missing_packages(), nki_release()
    if missing or release is None:
        verb = "is" if len(missing) == 1 else "are"
        return Route("custom call", f"{' and '.join(missing)} {verb} not installed")
    return Route("nki", f"nki {release} and torch_neuronx, through {nki_bridge(release)}")


# --- a launch ------------------------------------------------------------------------------------


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
    from neuronmm_ops.kernels import kernel_of

    if launch is None:
        return without_products(x, weights)
    problem = why_not_compilable()
    if problem:
        raise NkiVersionError(problem)
    if not core().known:
        raise RuntimeError(f"cannot plan an NKI kernel: {core().source}")
    kernel = (kernel_for or kernel_of)(launch.plan)
    # A kernel reads row-major memory; factors are stored along their contraction.
    tensors = [t if t is None else t.contiguous() for t in (rows(x), *weights)]
    return kernel(*tensors, **launch.arguments).view(launch.shape)
