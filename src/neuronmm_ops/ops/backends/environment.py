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
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, Literal, NamedTuple

from neuroncore.hardware import DetectedTarget, find_target
from neuronmm_ops.errors import NkiVersionError, NkiVersionWarning

LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
ROUTE_VARIABLE = "NEURONMM_XLA"

PLACEHOLDER = "0.0.1"
"""The version of `nki` on the default package index, which has no `nki.language`."""
OLDEST, COMPILING, TESTED = (0, 2), (0, 3), (0, 7)
"""Lines of NKI: the oldest that is known, the first in which the kernels compile, the last tested.

`nc_matmul(accumulate=)` came with 0.3 (NKI migration guide). Tested is by stand-ins.
"""
BRIDGES = ("nki.framework._torch_xla", "nki.framework.torch_xla", "nki._torch_xla")
"""Modules by which kernels take XLA tensors: from 0.5, in 0.3 and 0.4, in 0.2.

The kernels are called directly in all lines, and find that module by themselves; without it an
installation is broken.
"""
WRAPPER_MODULES = {
    "torch_neuronx": ("torch_neuronx", "torch_neuronx.nki_hop"),
    "libtorch_neuronx_lite": ("libtorch_neuronx_lite.nki.nki_hop",),
}
"""What brings the device neuron: TorchNeuron, or what vLLM-Neuron installs in its place.

Each with the modules in which `nki_op` and `wrap_nki` are, or have been. Both packages claim the
device when they are imported, so only one is.
"""
NEURON_PACKAGES = tuple(WRAPPER_MODULES)
XLA_INSTALL = "torch_xla is not installed; run: pip install 'neuronmm-ops[xla]'"
INSTALL = "run: pip install 'neuronmm-ops[neuron]' --extra-index-url https://pip.repos.neuron.amazonaws.com"

# --- the core ------------------------------------------------------------------------------------


class Core(NamedTuple):
    """The NeuronCore that kernels are planned for.

    Attributes:
        target: trn1, trn2 or trn3.
        lnc: physical cores of a logical one, 1 or 2.
        source: where each of the two came from.
        known: the target was set or found; otherwise it is the default.
    """

    target: str
    lnc: int
    source: str
    known: bool


def core() -> Core:
    """The core of this machine: `hardware.find_target`, and the logical core of the environment.

    Raises:
        ValueError: `NEURON_PLATFORM_TARGET_OVERRIDE` is no target, or `NEURON_LOGICAL_NC_CONFIG` is
            not 1 or 2, or 2 where the target has single cores only.
    """
    return _core(find_target(), os.environ.get(LNC_VARIABLE))


@cache
def _core(detected: DetectedTarget, lnc: str | None) -> Core:
    target, default = detected.machine.target, detected.machine.default_lnc
    if not lnc:
        source = f"target: {detected.source}; lnc: default of {target}"
        return Core(target, default, source, detected.known)
    if lnc not in ("1", "2") or int(lnc) > default:
        raise ValueError(
            f"{LNC_VARIABLE} must be 1, or 2 on trn2 and trn3; got {lnc!r} on {target} "
            f"({detected.source})"
        )
    return Core(target, int(lnc), f"target: {detected.source}; lnc: {LNC_VARIABLE}", detected.known)


# --- the packages --------------------------------------------------------------------------------


@cache
def nki_release() -> str | None:
    """Version of the installed NKI; None where there is none, or only the placeholder 0.0.1.

    Imports nothing. Warns once of a line newer than `TESTED`.

    Raises:
        NkiVersionError: it is older than `OLDEST`, is no version, or lacks a module of `BRIDGES`.
    """
    try:
        version = importlib.metadata.distribution("nki").metadata.get_all("Version", [""])[0]
    except importlib.metadata.PackageNotFoundError:
        return None
    if version == PLACEHOLDER:
        return None
    if not version:  # an interrupted installation
        raise NkiVersionError(
            "nki is installed without a version; reinstall it from the Neuron package index"
        )
    if _line(version) < OLDEST:
        raise NkiVersionError(
            f"nki must be 0.3 or later, got {version}; install 0.7 from the Neuron package index"
        )
    untested = why_untested(version)
    if untested:
        warnings.warn(untested, NkiVersionWarning, stacklevel=2)
    elif nki_bridge() is None:
        raise NkiVersionError(
            f"nki {version} must have {', '.join(BRIDGES[:-1])} or {BRIDGES[-1]}, found none; "
            "reinstall it from the Neuron package index"
        )
    return version


def why_untested(release: str) -> str | None:
    """What is to be said of a line of NKI that is newer than this package."""
    if _line(release) <= TESTED:
        return None
    return f"nki {release} is newer than 0.7, the last line that this package was tested with"


def why_not_compilable() -> str | None:
    """Why the kernels cannot compile with the installed NKI; None where nothing speaks against it.

    What an NKI that is imported lacks decides; of one that is not, its line.
    """
    release = nki_release()
    if release is None:
        return None
    if _line(release) < COMPILING:
        missing = ["nc_matmul(accumulate=)"]
    elif "nki.isa" in sys.modules:
        from neuronmm_ops.kernels import missing_instructions

        missing = missing_instructions()
    else:
        missing = []
    if not missing:
        return None
    return (
        f"the kernels need {', '.join(missing)}, which nki {release} lacks; install nki 0.7, "
        f"or set {ROUTE_VARIABLE}=composite on XLA"
    )


def _line(version: str) -> tuple[int, int]:
    """(0, 7) of 0.7.0; (0, 0) of what is no version."""
    match = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def nki_bridge() -> str | None:
    """The module by which the kernels of the installed NKI take XLA tensors; None without one."""
    return next(filter(is_installed, BRIDGES), None)


def is_installed(module: str) -> bool:
    """Whether a module can be found. Imports none of its parents, as `find_spec` would."""
    name, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module made by hand, without a spec
        return not below
    places = _places(spec)
    for part in below:
        if places is None:
            return False
        name = f"{name}.{part}"
        try:
            places = _places(PathFinder.find_spec(name, places))
        except KeyError:  # a folder without __init__.py, whose parent is not imported
            places = [os.path.join(place, part) for place in places]
    return places is not None


def _places(spec: ModuleSpec | None) -> list[str] | None:
    """Where modules below one can be; None where it is not found."""
    return None if spec is None else list(spec.submodule_search_locations or [])


def neuron_package() -> str | None:
    """Which of `NEURON_PACKAGES` is taken: the first that is installed; None without one.

    vLLM-Neuron makes the name torch_neuronx mean its own package, which is then the one.
    """
    for package in NEURON_PACKAGES:
        module = sys.modules.get(package)
        if is_installed(package) and getattr(module, "__name__", package) == package:
            return package
    return None


def missing_packages(*frameworks: str) -> list[str]:
    """What has to be installed of nki and one of `frameworks`. Raises as `nki_release` does."""
    missing = [] if nki_release() else ["nki"]
    return missing if any(map(is_installed, frameworks)) else [*missing, frameworks[0]]


@cache
def wrapper(name: str) -> Callable[..., Any] | None:
    """`nki_op` or `wrap_nki` of the installed package, which is imported; None without it."""
    package = neuron_package()
    for module in () if package is None else WRAPPER_MODULES[package]:
        if is_installed(module):
            member = getattr(importlib.import_module(module), name, None)
            if member is not None:
                return member
    return None


# --- the route of XLA ----------------------------------------------------------------------------


class Route(NamedTuple):
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
    missing, release = missing_packages("torch_neuronx"), nki_release()
    if missing or release is None:
        verb = "is" if len(missing) == 1 else "are"
        return Route("custom call", f"{' and '.join(missing)} {verb} not installed")
    return Route("nki", f"nki {release} and torch_neuronx, through {nki_bridge() or 'itself'}")
