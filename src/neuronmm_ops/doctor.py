"""Which versions are installed, which backends run the ops here, and why the others do not."""

import importlib.metadata
import importlib.util
import platform
from typing import Any

import torch

from neuronmm_ops.ops.implementation import active_impl

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
)


def diagnose() -> dict[str, Any]:
    """Return `{"versions": {package: version or None}, "backends": [...]}`.

    A backend is `{"name", "usable", "reason"}`. Imports none of the optional packages.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {package: _version(package) for package in PACKAGES}
    cpu = f"{torch.get_num_threads()} threads, implementation {active_impl()}"
    backends = [_backend("cpu", True, cpu), _cuda()]
    backends += [
        _device_kernel("xla", "XLA", "torch_xla", "xla"),
        _device_kernel("neuron", "PrivateUse1", "torch_neuronx", "neuron"),
    ]
    return {"versions": versions, "backends": backends}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> dict[str, Any]:
    if torch.version.cuda is None:
        return _backend("cuda", False, f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        return _backend("cuda", False, "torch finds no CUDA device")
    return _backend("cuda", True, f"{torch.cuda.get_device_name()}, through the reference kernel")


def _device_kernel(name: str, key: str, module: str, extra: str) -> dict[str, Any]:
    """Report a device whose kernel is registered under a dispatch key of its own."""
    if importlib.util.find_spec(module) is None:
        reason = f"{module} is not installed; run: pip install 'neuronmm-ops[{extra}]'"
        return _backend(name, False, reason)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("neuronmm::xuv", key):
        reason = f"this version registers no {key} kernel; the ops would run as plain matmuls"
        return _backend(name, False, reason)
    return _backend(name, True, f"{module} {_version(module.replace('_', '-'))}")


def _backend(name: str, usable: bool, reason: str) -> dict[str, Any]:
    return {"name": name, "usable": usable, "reason": reason}
