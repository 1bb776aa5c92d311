"""Which implementation runs the ops on CPU tensors. Never a silent fallback.

`reference` is the composite kernel. `simulated` is installed under the CPU key, which outranks the
composite, and removed again; so the choice costs nothing per call.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import torch

from neuronmm_ops.ops.backends import simulated

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
    kernels = simulated.implementation(target) if name == "simulated" else {}
    if _override is not None:
        _override._destroy()
        _override = None
    if kernels:
        _override = torch.library.Library("neuronmm", "IMPL")
        for op, kernel in kernels.items():
            _override.impl(op, kernel, "CPU")
    _active = (name, target)
