"""The simulator as the package `nki`: for a block, for a process, for pytest."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Generator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from neuroncore import collectives, dtypes, isa, typing
from neuroncore import language as nl
from neuroncore.core import running
from neuroncore.kernel import Kernel, RunSettings, Simulation, jit, run, simulate


class MeasuredKernel(Kernel):
    """A kernel of `nki.benchmark` or `nki.profile`: each call prints its modelled time.

    Attributes:
        benchmark_result: its `nc_latency.get_latency_percentile(p)` is the modelled time in us, the
            same for every p.
    """

    def __init__(self, kernel: Kernel, show: Callable[[str, Simulation], None]) -> None:
        super().__init__(kernel.func, kernel.lnc, kernel.schedule)
        self._show = show
        self._latency = types.SimpleNamespace()
        self.benchmark_result = types.SimpleNamespace(nc_latency=self._latency)

    def __getitem__(self, lnc: int) -> MeasuredKernel:
        one = copy.copy(self)  # its result is this one's, too
        one.lnc = super().__getitem__(lnc).lnc
        return one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, print its modelled time and return its outputs."""
        if running() is not None:
            return self.func(*args, **kwargs)
        done = run(self, args, kwargs, RunSettings())
        self._latency.get_latency_percentile = lambda percentile: done.profile.time_ms * 1e3
        self._show(self.func.__name__, done)
        return done.outputs


def simulate_kernel(
    func: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None, lnc: int = 1
) -> Any:
    """Return a kernel's outputs on so many cores: `nki.simulator.simulate_kernel`.

    Frameworks call it where they have no device: vLLM-Neuron's `wrap_nki` under `NKI_SIMULATOR=1`
    (AWS: "NKI CPU simulator").
    """
    kernel = func if isinstance(func, Kernel) else Kernel(func)
    return run(kernel[lnc], args, kwargs or {}).outputs


def _measured(show: Any, kernel: Any = None, **options: Any) -> Any:
    """A decorator, bare or called with options of a device, which have no effect."""
    if kernel is None:
        return functools.partial(_measured, functools.partial(show, **options))
    return MeasuredKernel(kernel if isinstance(kernel, Kernel) else Kernel(kernel), show)


def _benchmark(name: str, done: Simulation, **_: Any) -> None:
    profile = done.profile
    time, low, high = (1e3 * ms for ms in (profile.time_ms, *profile.time_range_ms))
    print(f"nki.benchmark: {name} takes {time:.2f} us (modelled; range {low:.2f} to {high:.2f})")


def _profile(name: str, done: Simulation, working_directory: Any = None, **_: Any) -> None:
    print(f"nki.profile: every time is modelled\n{done.profile}")
    if working_directory is not None:
        folder = Path(working_directory)
        folder.mkdir(parents=True, exist_ok=True)
        done.profile.save_timeline(folder / f"{name}.html")


@functools.cache
def modules() -> dict[str, types.ModuleType]:
    """The modules of the package, by name."""
    package = importlib.util.module_from_spec(ModuleSpec("nki", None, is_package=True))
    package.__doc__ = "The simulated NeuronCore, under the name of the real package."
    simulator = types.ModuleType("nki.simulator")
    simulator.__dict__["simulate_kernel"] = simulate_kernel
    parts: dict[str, types.ModuleType] = {
        "language": nl, "isa": isa, "typing": typing, "collectives": collectives,
        "dtype": dtypes, "simulator": simulator,
    }  # fmt: skip
    vars(package).update(
        parts,
        jit=jit,
        simulate=simulate,
        benchmark=functools.partial(_measured, _benchmark),
        profile=functools.partial(_measured, _profile),
    )
    modules = {"nki": package, **{f"nki.{name}": part for name, part in parts.items()}}
    return {**modules, "nki.isa.constants": isa.constants}


def install() -> types.ModuleType:
    """Make `import nki` find this simulator from now on; a second call changes nothing.

    Raises RuntimeError where a real `nki` is installed or imported: it is not to be shadowed.
    """
    package = modules()["nki"]
    if sys.modules.get("nki") is not package:
        if _is_there("nki"):
            raise RuntimeError(
                "as_nki: the package nki is installed; use it, or uninstall it to simulate"
            )
        sys.modules.update(modules())
    return package


@contextlib.contextmanager
def as_nki() -> Generator[types.ModuleType]:
    """`install` while the block runs, so that published kernels import this simulator.

    Raises RuntimeError where a real `nki` is installed or imported.
    """
    was_installed = sys.modules.get("nki") is modules()["nki"]
    package = install()
    try:
        yield package
    finally:
        if not was_installed:
            for name in modules():
                sys.modules.pop(name, None)


@contextlib.contextmanager
def torch_on_cpu() -> Generator[None]:
    """While the block runs, scripts find the CPU where they ask torch-xla for its device.

    Of torch_xla: `device`, `sync`, and `xla_device` and `mark_step` of `core.xla_model`; of
    torch_neuronx: `trace`, which returns the kernel. Nothing changes where a package is installed.
    """

    def device(index: int | None = None) -> Any:
        return importlib.import_module("torch").device("cpu")

    def done(*_: Any, **__: Any) -> None:
        """Everything has run when a call returns."""

    contents: dict[str, dict[str, Any]] = {
        "torch_xla": {"device": device, "sync": done},
        "torch_xla.core": {},
        "torch_xla.core.xla_model": {"xla_device": device, "mark_step": done},
        "torch_neuronx": {"trace": lambda kernel, example_inputs, **_: kernel},
    }
    absent = [name for name in ("torch_xla", "torch_neuronx") if not _is_there(name)]
    added: dict[str, types.ModuleType] = {}
    for name, members in contents.items():
        package, _, last = name.rpartition(".")
        if name.partition(".")[0] in absent:
            spec = ModuleSpec(name, None, is_package=True)
            added[name] = importlib.util.module_from_spec(spec)
            vars(added[name]).update(members)
            if package:
                setattr(added[package], last, added[name])
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)


def _is_there(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None
