"""`jit`, `Kernel` and `simulate`: from a Python function and arrays to outputs and a profile."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from threadpoolctl import ThreadpoolController

from neuroncore.boundary import Boundary, on_core
from neuroncore.budget import Budget, within
from neuroncore.checks.base import NkiValidationError, note, noted, refuse, wrong_call
from neuroncore.checks.hazards import check_aliases, check_overlaps
from neuroncore.checks.races import check_races
from neuroncore.collector import no_collection
from neuroncore.core import Follow, KernelRun, SimulatedCore, Uninitialised, running
from neuroncore.hardware import DMA_MODELS, MODELS, DmaModel, Model, resolve_target
from neuroncore.memory.liveness import CapacityError, CapacityPolicy
from neuroncore.orders import same_values
from neuroncore.profile.profile import Profile
from neuroncore.timing.edges import Edges, apply_edges, edges_of
from neuroncore.timing.order import order_to_fit
from neuroncore.timing.schedule import schedule
from neuroncore.uncertainty import assuming

Mode = Literal["execute", "trace"]
observers: list[Callable[[Profile], object]] = []
"""Called with the profile of each launch."""


@dataclass(frozen=True)
class Simulation:
    """What `simulate` returns: the kernel's outputs and its profile.

    In trace mode each output is a `TensorSpec`. With `ranks=`, `outputs` is a tuple of the outputs
    of each rank, and the profile holds the cores of all ranks, those of rank 0 first.
    """

    outputs: Any
    profile: Profile


class Kernel:
    """A jitted kernel: `kernel(*args)` or `kernel[2](*args)` runs it on the simulated core."""

    def __init__(self, func: Callable[..., Any], lnc: int = 1, schedule: Edges = ()) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.lnc = lnc
        self.schedule = schedule

    def __getitem__(self, lnc: int) -> Kernel:
        if lnc not in (1, 2):
            refuse(f"kernel[{lnc}]: a launch takes 1 or 2 cores (LNC)")
        return Kernel(self.func, lnc, self.schedule)

    def with_schedule(self, schedule: Iterable[tuple[str, str | Sequence[str]]]) -> Kernel:
        """This kernel with an order among instructions: pairs of a later and earlier ones.

        Instructions are named by their `name=`; each later one starts when the results of the
        earlier ones can be used (NKI scheduling APIs). Raises NkiValidationError for what is no
        such pair, and when the kernel runs, for names that no single instruction has.
        """
        return Kernel(self.func, self.lnc, edges_of(schedule))

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


@dataclass(frozen=True)
class RunSettings:
    """How a kernel is run; see `simulate`, whose arguments these are."""

    target: str | None = None
    mode: Mode = "execute"
    model: Model = "calibrated"
    dma_model: DmaModel = "transfers"
    assume: tuple[str, ...] = ()
    cores_busy: int = 1
    seed: int = 0
    ranks: int | None = None
    follow: Follow = "documentation"
    uninitialised: Uninitialised = "partial"
    capacity: CapacityPolicy = "raise"
    budget: Budget | None = None
    schedules: int = 0
    alike_ranks: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("execute", "trace"):
            raise ValueError(f'mode must be "execute" or "trace"; got {self.mode!r}')
        for name, allowed in (("model", MODELS), ("dma_model", DMA_MODELS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        for name, allowed in (("uninitialised", Uninitialised), ("capacity", CapacityPolicy)):
            if (value := getattr(self, name)) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}; got {value!r}")
        if self.follow not in get_args(Follow):
            raise ValueError(
                f"follow must be one of {', '.join(get_args(Follow))}; got {self.follow!r}"
            )
        if self.schedules < 0 or (self.schedules and self.mode == "trace"):
            raise ValueError(
                "schedules must be a number of orders to compare values in, and needs them "
                f'(mode="execute"); got {self.schedules} in mode {self.mode!r}'
            )
        if self.ranks is not None and (not isinstance(self.ranks, int) or self.ranks < 1):
            raise ValueError(
                f"ranks must be a positive number of ranks, or None; got {self.ranks!r}"
            )
        if self.alike_ranks and (self.mode == "execute" or self.ranks is None):
            raise ValueError(
                'alike_ranks needs mode="trace" and ranks; got '
                f"mode {self.mode!r} and ranks {self.ranks}"
            )


def run(
    kernel: Kernel | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: RunSettings = RunSettings(),
) -> Simulation:
    """Run a kernel, in other orders of its cores too if asked. See `simulate`."""
    inputs = copy.deepcopy((args, kwargs)) if settings.schedules else ((), {})  # it may change them
    simulation = _run(kernel, args, kwargs, settings)
    for observe in observers:
        observe(simulation.profile)
    for order in range(settings.schedules):
        try:
            other = _run(kernel, *copy.deepcopy(inputs), settings, order)
        except NkiValidationError as error:
            raise NkiValidationError(
                f"a race: one core after the other it ends, but not in order {order}: {error}"
            ) from None
        same_values(simulation, other, order)
    return simulation


def _run(
    kernel: Kernel | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: RunSettings,
    order: int | None = None,
) -> Simulation:
    if type(kernel).__module__.partition(".")[0] == "nki":
        raise TypeError(
            f"the simulated core runs functions and kernels of neuroncore.jit, got {kernel!r}, "
            "made by the installed nki; simulate in an environment without it"
        )
    kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    machine = assuming(resolve_target(settings.target).under(settings.dma_model), settings.assume)
    budget = settings.budget or Budget()
    launch = KernelRun(
        machine.with_cores_busy(settings.cores_busy),
        settings.mode == "execute",
        kernel.lnc,
        settings.seed,
        (1 if settings.alike_ranks else settings.ranks or 1, settings.ranks or 1),
        settings.follow,
        settings.uninitialised,
        budget.memory_bytes,
        order,
    )
    run_ranks = range(len(launch.cores) // kernel.lnc)
    boundaries = [Boundary(launch, rank, settings.ranks is not None) for rank in run_ranks]
    noted.clear()
    signature = inspect.signature(kernel.func)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = bound.arguments.items()
    inputs = [{name: b.enter(name, value) for name, value in named} for b in boundaries]

    def body(core: SimulatedCore) -> Any:
        arguments = {name: on_core(core, value) for name, value in inputs[core.rank].items()}
        call = inspect.BoundArguments(signature, OrderedDict(arguments))
        return kernel.func(*call.args, **call.kwargs)

    with no_collection(), _blas().limit(limits=1, user_api="blas"), np.errstate(all="ignore"):
        try:
            with within(budget, launch):
                results = launch.run(body)
        except (AttributeError, TypeError) as error:
            wrong_call(error)
            raise
        finally:
            launch.end()
        if kernel.lnc == 2:
            for first in range(0, len(launch.cores), 2):
                check_races(*[core.trace for core in launch.cores[first : first + 2]])
        for core in launch.cores if launch.execute else ():
            check_overlaps(core.trace)
            check_aliases(core.trace)
        for boundary in boundaries:
            boundary.write_back()
        outputs = [b.leave(results[b.rank * kernel.lnc]) for b in boundaries]
        for core in launch.cores:
            apply_edges(core.trace, kernel.schedule)
        try:
            times = schedule(launch, settings.model)
        except CapacityError:
            for core in launch.cores:
                order_to_fit(core.trace, launch.machine)
            launch.capacity = settings.capacity
            times = schedule(launch, settings.model)
        profile = Profile(kernel.func.__name__, launch, times)
    return Simulation(outputs[0] if settings.ranks is None else tuple(outputs), profile)


def _blas() -> ThreadpoolController:
    """NumPy's BLAS: a tile is too small for a second thread, whose start costs more than it."""
    return _blas_of(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _blas_of(modules: int) -> ThreadpoolController:
    """Looked for again where so many modules are no longer all: SciPy brings a BLAS of its own."""
    return ThreadpoolController()


def simulate(
    kernel: Kernel | Callable[..., Any],
    *args: Any,
    target: str | None = None,
    mode: Mode = "execute",
    model: Model = "calibrated",
    dma_model: DmaModel = "transfers",
    assume: str | Sequence[str] = (),
    cores_busy: int = 1,
    seed: int = 0,
    ranks: int | None = None,
    follow: Follow = "documentation",
    uninitialised: Uninitialised = "partial",
    capacity: CapacityPolicy = "raise",
    budget: Budget | None = None,
    schedules: int = 0,
    alike_ranks: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a kernel on the simulated NeuronCore.

    Two forms. `simulate(kernel, *args, target=, mode=)` returns a `Simulation` with `outputs` and
    `profile`. `simulate(kernel)(*args)`, AWS's form, takes no arguments here and returns a
    callable that returns the outputs.

    Args:
        kernel: a jitted kernel, `kernel[2]` for two cores, or a plain function.
        args: NumPy or jax arrays, CPU torch tensors, compile-time values; `TensorSpec` in trace
            mode.
        target: "trn1", "trn2" or "trn3"; None as `hardware.resolve_target`.
        mode: "execute" computes values; "trace" computes none, so that full sizes take seconds.
        model: "calibrated" adds measured issue of matmuls and throttling to documented costs;
            "stationary_reuse", a what-if, only where the stationary operand changes.
        dma_model: what small DMAs cost, one of `hardware.DMA_MODELS`; the profile has the range of
            all of them.
        assume: those of `uncertainty.UNCERTAINTIES` whose other end the time is given with, by
            name.
        cores_busy: NeuronCores of the chip that share its HBM while this one runs.
        seed: of the random number generators of the core.
        ranks: run the kernel on so many ranks, which meet in `nki.collectives`; arguments that
            differ between them are `PerRank`, and the others are copied for each.
        follow: "documentation", or "kernels" where AWS's public kernels contradict it
            (`quantize_mx`, `topk`).
        uninitialised: what a read of elements that were never written does. "partial" refuses a
            read of nothing else, and warns where a part of it was written; "raise" refuses both,
            "warn" neither. Such elements hold NaN (floats) or 4 (integers).
        capacity: "raise" refuses tensors that do not fit SBUF or PSUM; "warn" goes on as if they
            did, to explore: the times are then those of a larger memory.
        budget: instructions, seconds and bytes after which the kernel is stopped; None is
            `Budget()`.
        schedules: run the kernel so many times more, its cores in other orders that their waiting
            for each other allows; refused where a value changes: it is a race.
        alike_ranks: trace rank 0 alone, and take the others to do what it does, so that many ranks
            take no longer than one.

    What runs here but the documentation refuses or leaves undefined is an `NkiWarning`.
    Raises NkiValidationError where the kernel breaks a rule, ValueError for bad arguments.
    """
    names = (assume,) if isinstance(assume, str) else tuple(assume)
    settings = RunSettings(
        target, mode, model, dma_model, names, cores_busy, seed, ranks, follow,
        uninitialised, capacity, budget, schedules, alike_ranks,
    )  # fmt: skip
    if args or kwargs:
        return run(kernel, args, kwargs, settings)
    return lambda *args, **kwargs: run(kernel, args, kwargs, settings).outputs
