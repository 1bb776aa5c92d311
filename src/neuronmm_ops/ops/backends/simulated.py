"""The opt-in CPU implementation that runs the NKI kernels on the simulated NeuronCore.

`use_impl("simulated", target="trn1")` chooses it; `last_profile()` says what the last op moved and
how long it would have taken (modelled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from neuronmm_ops.hardware import resolve_target
from neuronmm_ops.ops.backends.launch import (
    Choices,
    Implementations,
    Launch,
    Tensors,
    implementations,
    launch_of,
    launch_parts,
    without_products,
)
from neuronmm_ops.ops.spec import OpSpec

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore import Profile

_last: list[Profile] = []


def last_profile() -> Profile:
    """Return the profile of the last launch on the simulated NeuronCore.

    Raises:
        RuntimeError: none has run yet.
    """
    if not _last:
        raise RuntimeError('no op has been simulated; run one under use_impl("simulated")')
    return _last[0]


def implementation(target: str | None) -> Implementations:
    """The ops on the simulated core of `target`. Raises ValueError for no target."""
    chosen = resolve_target(target).target

    def simulate(spec: OpSpec, tensors: Tensors, choices: Choices) -> Tensor:
        launch = launch_of(spec, tensors, choices, chosen)
        if launch is None:
            return without_products(spec, tensors)
        return launch_parts(launch, tensors, _simulate)

    return implementations(simulate)


def _simulate(launch: Launch, tensors: Tensors) -> Tensor:
    """Run a launch on the simulated core and keep its profile."""
    from neuronmm_ops.kernels import nki_kernel
    from neuronmm_ops.neuroncore.kernel import run

    kernel, target = nki_kernel(launch.plan), launch.plan.problem.target
    done = run(kernel, tensors, launch.arguments, target=target)
    _last[:] = [done.profile]
    return done.outputs
