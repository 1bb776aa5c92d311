"""Which versions are installed, which backends run the ops here, which engines, and why not."""

import importlib.util
import os
import platform
import re
from typing import Any

import torch

from neuroncore.hardware import TARGET_VARIABLE
from neuronmm_ops.engines.installed import engines
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.extras import version_of
from neuronmm_ops.ops.backends.cpu import multiplies_fast, name_of
from neuronmm_ops.ops.backends.environment import (
    INSTALL,
    NEURON_PACKAGES,
    PLACEHOLDER,
    ROUTE_VARIABLE,
    XLA_INSTALL,
    Core,
    core,
    missing_packages,
    neuron_package,
    nki_release,
    why_not_compilable,
    why_untested,
    xla_route,
)
from neuronmm_ops.ops.backends.neuron import expected_call_mode
from neuronmm_ops.ops.backends.simulated import active_impl

PACKAGES = (
    "neuronmm-ops",
    "torch",
    "transformers",
    "safetensors",
    "accelerate",
    "torch-xla",
    "nki",
    "neuronx-cc",
    "torch-neuronx",
    "libtorch-neuronx-lite",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALL_MODES = {
    "nki_op": "through nki_op",
    "wrap_nki": "through wrap_nki",
    "direct": "directly",
    None: "as the first call finds",
}


def diagnose() -> dict[str, Any]:
    """Return `{"versions": {package: version or None}, "backends": [...], "engines": [...]}`.

    A backend is `{"name", "usable", "reason"}`, an engine that serves checkpoints also has its
    `version`, None where it is not installed, and `plugin`: whether our entry point for it is
    registered, None where it takes none. Imports none of the optional packages.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {package: version_of(package) for package in PACKAGES}
    fast = [dtype for dtype in DTYPES if multiplies_fast(dtype)]
    names = ", ".join(map(name_of, fast))
    cpu = (
        f"{torch.get_num_threads()} threads, implementation {active_impl()}, multiplies {names} "
        "fast"
    )
    backends = [{"name": "cpu", "usable": True, "reason": cpu}]
    for name, probe in (("cuda", _cuda), ("xla", _xla), ("neuron", _neuron)):
        try:
            usable, reason = probe()
        except (NkiVersionError, ValueError) as error:
            usable, reason = False, str(error)
        backends.append({"name": name, "usable": usable, "reason": reason})
    return {"versions": versions, "backends": backends, "engines": engines()}


def _cuda() -> tuple[bool, str]:
    if torch.version.cuda is None:
        return False, f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        index = "https://download.pytorch.org/whl/cpu"
        return False, f"torch finds no CUDA device; without CUDA it is 5 GB smaller: see {index}"
    return True, f"{torch.cuda.get_device_name()}, through the reference kernel"


def _xla() -> tuple[bool, str]:
    if importlib.util.find_spec("torch_xla") is None:
        return False, XLA_INSTALL
    version = version_of("torch-xla") or "without a version"
    line = version.split(".")[:2]
    if line != torch.__version__.split(".")[:2]:
        return False, (
            f"torch_xla and torch must be of one line, got {version} and {torch.__version__}; run: "
            "pip install 'neuronmm-ops[xla]'"
        )
    route = xla_route()
    reasons = [f"torch_xla {version}", f"lowered as {route.name}: {route.reason}"]
    if route.name == "composite":
        return True, "; ".join(reasons)
    chosen = core()
    reasons += [*_placeholder(), *_untested(), _described(chosen)]
    if route.name == "custom call":
        reasons.append(f"to be read or exported; to run the ops set {ROUTE_VARIABLE}=composite")
        return False, "; ".join(reasons)
    problem = why_not_compilable()
    reasons += [problem] if problem else _advice(chosen)
    return chosen.known and problem is None, "; ".join(reasons)


def _neuron() -> tuple[bool, str]:
    missing, chosen = missing_packages(*NEURON_PACKAGES), core()
    if missing:
        return False, "; ".join([f"needs {' and '.join(missing)}", *_placeholder(), INSTALL])
    package = neuron_package() or NEURON_PACKAGES[0]
    version = version_of(package) or "without a version"
    is_lite = package != NEURON_PACKAGES[0]
    if not is_lite and re.match(r"(1|2\.[0-9])(\.|$)", version):
        reason = f"torch_neuronx {version} is for PyTorch/XLA; the device neuron came with 2.10"
        return False, reason
    problem = why_not_compilable()
    reasons = [
        f"{package} {version} and nki {version_of('nki')}",
        f"kernels called {CALL_MODES[expected_call_mode()]}"
        + is_lite * ", in compiled graphs only",
        *([problem] if problem else []),
        *_untested(),
        _described(chosen),
        *_advice(chosen),
    ]
    return chosen.known and problem is None, "; ".join(reasons)


def _placeholder() -> list[str]:
    """What is to be said where the default package index has been asked for nki."""
    if version_of("nki") != PLACEHOLDER:
        return []
    return [
        f"nki {PLACEHOLDER} is the empty placeholder of the default package index; install nki "
        "from the Neuron index"
    ]


def _untested() -> list[str]:
    """What is to be said of a line of nki that is newer than this package."""
    release = nki_release()
    untested = release and why_untested(release)
    return [untested] if untested else []


def _described(chosen: Core) -> str:
    return f"target {chosen.target}, lnc {chosen.lnc} ({chosen.source})"


def _advice(chosen: Core) -> list[str]:
    """What is to be said where kernels are called without an override of the target.

    NKI asks `neuron-ls` for it at every call then, which takes about 52 ms.
    """
    if not chosen.known or os.environ.get(TARGET_VARIABLE):
        return []
    return [f"set {TARGET_VARIABLE}={chosen.target}: NKI looks it up at every call, slowly"]
