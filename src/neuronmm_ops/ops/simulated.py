"""The opt-in CPU implementation that runs the NKI kernels on the simulated NeuronCore.

`use_impl("simulated", target="trn1")` chooses it; `last_profile()` says what the last op moved and
how long it would have taken (modelled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from neuronmm_ops.hardware import resolve_target
from neuronmm_ops.ops.launch import (
    Kernels,
    Launch,
    Weights,
    kernels_of,
    launch_of,
    without_products,
)
from neuronmm_ops.ops.reference import rows

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore import Profile

_last: list[Profile] = []


def last_profile() -> Profile:
    """Return the profile of the last op that ran on the simulated NeuronCore.

    Raises:
        RuntimeError: none has run yet.
    """
    if not _last:
        raise RuntimeError('no op has been simulated; run one under use_impl("simulated")')
    return _last[0]


def implementation(target: str | None) -> Kernels:
    """The ops on the simulated core of `target`. Raises ValueError for no target."""
    chosen = resolve_target(target).target

    def simulate(op: str, x: Tensor, weights: Weights, activation: str | None) -> Tensor:
        return _simulate(launch_of(op, x, weights, activation, chosen), x, weights)

    return kernels_of(simulate)


def _simulate(launch: Launch | None, x: Tensor, weights: Weights) -> Tensor:
    """Run a launch on the simulated core and keep its profile."""
    from neuronmm_ops.kernels import nki_kernel
    from neuronmm_ops.neuroncore.kernel import run

    if launch is None:
        return without_products(x, weights)
    plan = launch.plan
    done = run(nki_kernel(plan), (rows(x), *weights), launch.arguments, target=plan.problem.target)
    _last[:] = [done.profile]
    return done.outputs.view(launch.shape)
