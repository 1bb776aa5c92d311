"""`jit`, `Kernel` and `simulate`: from a Python function and arrays to outputs and a profile."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from threadpoolctl import ThreadpoolController

from neuronmm_ops.hardware import MODELS, Model, resolve_target
from neuronmm_ops.neuroncore import language as nl
from neuronmm_ops.neuroncore.boundary import Boundary, on_core
from neuronmm_ops.neuroncore.checks.base import note, noted, refuse, wrong_call
from neuronmm_ops.neuroncore.checks.races import check_races
from neuronmm_ops.neuroncore.core import KernelRun, SimulatedCore, Uninitialised, running
from neuronmm_ops.neuroncore.dtypes import DType
from neuronmm_ops.neuroncore.memory.liveness import CapacityError, CapacityPolicy
from neuronmm_ops.neuroncore.profile.profile import Profile
from neuronmm_ops.neuroncore.timing.order import order_to_fit
from neuronmm_ops.neuroncore.timing.schedule import schedule

Mode = Literal["execute", "trace"]


@dataclass(frozen=True)
class Simulation:
    """What `simulate` returns: the kernel's outputs and its profile.

    In trace mode each output is a `TensorSpec`.
    """

    outputs: Any
    profile: Profile


class Kernel:
    """A jitted kernel: `kernel(*args)` or `kernel[2](*args)` runs it on the simulated core."""

    def __init__(self, func: Callable[..., Any], lnc: int = 1) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.lnc = lnc

    def __getitem__(self, lnc: int) -> Kernel:
        if lnc not in (1, 2):
            refuse(f"kernel[{lnc}]: a launch takes 1 or 2 cores (LNC)")
        return Kernel(self.func, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it in execute mode and return its outputs."""
        if running() is not None:  # called from another kernel: inlined
            return self.func(*args, **kwargs)
        return run(self, args, kwargs).outputs

    def __repr__(self) -> str:
        return f"<nki kernel {self.func.__name__}, lnc {self.lnc}>"


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make a function a kernel. Options of the compiler (`**kwargs`) are without effect here.

    Raises TypeError for `platform_target`, an error since NKI 0.3 (migration guide).
    """
    if "platform_target" in kwargs:
        raise TypeError(
            "nki.jit takes no platform_target; set NEURON_PLATFORM_TARGET_OVERRIDE or "
            "neuroncore.simulate(target=)"
        )
    if unknown := set(kwargs) - {"mode"}:
        note(f"nki.jit: {', '.join(sorted(unknown))} has no effect on the simulated core")
    return jit if fn is None else Kernel(fn)


def run(
    kernel: Kernel | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    target: str | None = None,
    mode: Mode = "execute",
    model: Model = "calibrated",
    seed: int = 0,
    uninitialised: Uninitialised = "partial",
    capacity: CapacityPolicy = "raise",
) -> Simulation:
    """Run a kernel and schedule what it issued. See `simulate`."""
    if mode not in ("execute", "trace"):
        raise ValueError(f'mode must be "execute" or "trace"; got {mode!r}')
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}; got {model!r}")
    if uninitialised not in get_args(Uninitialised):
        raise ValueError(
            f"uninitialised must be one of {get_args(Uninitialised)}; got {uninitialised!r}"
        )
    if capacity not in get_args(CapacityPolicy):
        raise ValueError(f"capacity must be one of {get_args(CapacityPolicy)}; got {capacity!r}")
    if type(kernel).__module__.partition(".")[0] == "nki":
        raise TypeError(
            f"the simulated core runs functions and kernels of neuroncore.jit, got {kernel!r}, "
            "made by the installed nki; simulate in an environment without it"
        )
    kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    machine = resolve_target(target)
    launch = KernelRun(machine, mode == "execute", kernel.lnc, seed, uninitialised)
    boundary = Boundary(launch)
    noted.clear()
    signature = inspect.signature(kernel.func)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    inputs = {name: boundary.enter(name, value) for name, value in bound.arguments.items()}

    def body(core: SimulatedCore) -> Any:
        own = {name: on_core(core, value) for name, value in inputs.items()}
        call = inspect.BoundArguments(signature, OrderedDict(own))
        return kernel.func(*call.args, **call.kwargs)

    with _no_collection(), _blas().limit(limits=1, user_api="blas"), np.errstate(all="ignore"):
        try:
            results = launch.run(body)
        except (AttributeError, TypeError) as error:
            wrong_call(error)
            raise
        if len(launch.cores) == 2:
            check_races(*[core.trace for core in launch.cores])
        boundary.write_back()
        outputs = boundary.leave(results[0])
        try:
            times = schedule(launch, model)
        except CapacityError:
            for core in launch.cores:
                order_to_fit(core.trace, machine)
            launch.capacity = capacity
            times = schedule(launch, model)
        profile = Profile(kernel.func.__name__, launch, times)
    return Simulation(outputs, profile)


@functools.cache
def _blas() -> ThreadpoolController:
    """NumPy's BLAS, loaded by now: a tile is too small to be worth a second thread."""
    return ThreadpoolController()


@contextmanager
def _no_collection() -> Generator[None]:
    """A trace makes many objects and no cycles: the collector would only walk them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def simulate(
    kernel: Kernel | Callable[..., Any],
    *args: Any,
    target: str | None = None,
    mode: Mode = "execute",
    model: Model = "calibrated",
    seed: int = 0,
    uninitialised: Uninitialised = "partial",
    capacity: CapacityPolicy = "raise",
    **kwargs: Any,
) -> Any:
    """Run a kernel on the simulated NeuronCore.

    Two forms. `simulate(kernel, *args, target=, mode=)` returns a `Simulation` with `outputs` and
    `profile`. `simulate(kernel)(*args)`, AWS's form, takes no arguments here and returns a
    callable that returns the outputs.

    Args:
        kernel: a jitted kernel, `kernel[2]` for two cores, or a plain function.
        args: NumPy arrays, CPU torch tensors, compile-time values; `TensorSpec` in trace mode.
        target: "trn1", "trn2" or "trn3"; None as `hardware.resolve_target`.
        mode: "execute" computes values; "trace" computes none, so that full sizes take seconds.
        model: "calibrated" adds the fitted matmul overhead to the documented costs;
            "stationary_reuse", a what-if, only where the stationary operand changes.
        seed: of the random number generators of the core.
        uninitialised: what a read of elements that were never written does. "partial" refuses a
            read of nothing else, and warns where a part of it was written; "raise" refuses both,
            "warn" neither. Such elements hold NaN (floats) or 4 (integers).
        capacity: "raise" refuses tensors that do not fit SBUF or PSUM; "warn" goes on as if they
            did, to explore: the times are then those of a larger memory.

    What runs here but the documentation refuses or leaves undefined is an `NkiWarning`.
    Raises NkiValidationError where the kernel breaks a rule, ValueError for bad arguments.
    """
    bound = functools.partial(
        run,
        kernel,
        target=target,
        mode=mode,
        model=model,
        seed=seed,
        uninitialised=uninitialised,
        capacity=capacity,
    )
    if args or kwargs:
        return bound(args, kwargs)
    return lambda *args, **kwargs: bound(args, kwargs).outputs


@contextmanager
def as_nki() -> Generator[types.ModuleType]:
    """Install this simulator as `nki` while the block runs, so that published kernels import it.

    Raises RuntimeError where a real `nki` is installed or imported: it is not to be shadowed.
    """
    import importlib.util

    from neuronmm_ops.neuroncore import isa
    from neuronmm_ops.neuroncore import typing as nt

    if "nki" in sys.modules or importlib.util.find_spec("nki") is not None:
        raise RuntimeError(
            "as_nki: the package nki is installed; use it, or uninstall it to simulate"
        )
    package = types.ModuleType(
        "nki", "The simulated NeuronCore, under the name of the real package."
    )
    package.__path__ = []
    parts = {"language": nl, "isa": isa, "typing": nt}
    vars(package).update(parts, jit=jit, simulate=simulate, dtype=DType)
    modules = {"nki": package, **{f"nki.{name}": part for name, part in parts.items()}}
    modules["nki.isa.constants"] = isa.constants
    sys.modules.update(modules)
    try:
        yield package
    finally:
        for name in modules:
            sys.modules.pop(name, None)
