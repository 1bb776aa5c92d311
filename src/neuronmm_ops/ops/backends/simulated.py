"""The opt-in CPU implementation that runs the NKI kernels on the simulated NeuronCore.

`use_impl("simulated", target="trn1")` chooses it, never a silent fallback; `last_profile()` says
what the last op moved and how long it would have taken (modelled). The reference is the composite
kernel. The simulated one is installed under the CPU key, which outranks the composite, and removed
again; so the choice costs nothing per call.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from neuroncore.hardware import resolve_target
from neuronmm_ops.ops.backends.launch import (
    Implementations,
    Launch,
    Tensors,
    implementations,
    launch_of,
    launch_parts,
)
from neuronmm_ops.ops.spec import OpSpec, Options, Results

if TYPE_CHECKING:
    from neuroncore import Profile

_last: list[Profile] = []
_kept: list[list[Profile]] = []
_active: tuple[str, str | None] = ("reference", None)
_override: torch.library.Library | None = None


def use_impl(name: str, target: str | None = None) -> AbstractContextManager[None]:
    """Run the ops on CPU tensors through `name`, from now on or for a `with` block.

    Args:
        name: `reference`, or `simulated`: the NKI kernels on the simulated NeuronCore.
        target: of `simulated`: trn1, trn2 or trn3; default that of `hardware.resolve_target`.

    Returns:
        A context manager that restores the implementation that was active before.

    Raises:
        ValueError: no implementation has that name, or it takes no such target.
    """
    previous = _active
    _activate(name, target)
    return _restore(previous)


def active_impl() -> str:
    """Return the name of the implementation that runs on CPU tensors now."""
    return _active[0]


def last_profile() -> Profile:
    """Return the profile of the last launch on the simulated NeuronCore.

    Raises:
        RuntimeError: none has run yet.
    """
    if not _last:
        raise RuntimeError('no op has been simulated; run one under use_impl("simulated")')
    return _last[0]


@contextmanager
def record_profiles() -> Generator[list[Profile]]:
    """Keep the profiles of all ops on the simulated NeuronCore in a `with` block."""
    kept: list[Profile] = []
    _kept.append(kept)
    try:
        yield kept
    finally:
        _kept.pop()


@contextmanager
def _restore(previous: tuple[str, str | None]) -> Generator[None, None, None]:
    try:
        yield
    finally:
        _activate(*previous)


def _activate(name: str, target: str | None) -> None:
    global _active, _override
    if (name, target) == _active:
        return
    if name not in ("simulated", "reference"):
        raise ValueError(f"implementation must be one of simulated, reference; got {name!r}")
    if name == "reference" and target is not None:
        raise ValueError(f"only the simulated implementation takes a target; got {target!r}")
    kernels = implementation(target) if name == "simulated" else {}
    if _override is not None:
        _override._destroy()
        _override = None
    if kernels:
        _override = torch.library.Library("neuronmm", "IMPL")
        for op, kernel in kernels.items():
            _override.impl(op, kernel, "CPU")
    _active = (name, target)


def implementation(target: str | None) -> Implementations:
    """The ops on the simulated core of `target`. Raises ValueError for no target."""
    machine_name = resolve_target(target).target

    def simulate(spec: OpSpec, tensors: Tensors, choices: Options) -> Results:
        launch = launch_of(spec, tensors, choices, machine_name)
        if launch is None:
            return spec.reference(*spec.joined(tensors, choices))
        return launch_parts(launch, tensors, _simulate)

    return implementations(simulate)


def _simulate(launch: Launch, tensors: Tensors) -> Results:
    """Run a launch on the simulated core and keep its profile."""
    from neuroncore.kernel import RunSettings, run
    from neuronmm_ops.kernels.simulated import simulated_kernel

    problem = launch.plan.problem
    kernel = simulated_kernel(problem.op, launch.plan.kernel, problem.lnc)
    operands = tuple(launch.spec.listed(tensors))
    done = run(kernel, operands, launch.arguments, RunSettings(problem.target))
    _last[:] = [done.profile]
    for kept in _kept:
        kept.append(done.profile)
    return done.outputs
