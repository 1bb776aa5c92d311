"""Which implementation runs the ops on CPU tensors. Never a silent fallback.

`reference` is the composite kernel. Any other one is installed under the CPU key, which outranks
the composite, and removed again; so the choice costs nothing per call.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import torch

from neuronmm_ops.ops import simulated
from neuronmm_ops.ops.launch import OPS, Kernels

_kernels: dict[str, Kernels | None] = {"reference": None}
_active: tuple[str, str | None] = ("reference", None)
_override: torch.library.Library | None = None


def register_impl(name: str, kernels: Kernels) -> None:
    """Make `use_impl(name)` run `kernels`: a callable for each of `OPS`.

    Raises:
        ValueError: the name is taken, or an op is missing.
    """
    if name in (*_kernels, "simulated"):
        raise ValueError(f"implementation {name!r} is already registered; choose another name")
    missing = [op for op in OPS if op not in kernels]
    if missing:
        raise ValueError(
            f"implementation {name!r} lacks {', '.join(missing)}; it must have all ops"
        )
    _kernels[name] = kernels


def use_impl(name: str, target: str | None = None) -> AbstractContextManager[None]:
    """Run the ops on CPU tensors through `name`, from now on or for a `with` block.

    Args:
        name: `reference`; `simulated`, the NKI kernels on the simulated NeuronCore; or the name of
            a registered implementation.
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
    kernels = _kernels_of(name, target)
    if _override is not None:
        _override._destroy()
        _override = None
    if kernels is not None:
        _override = torch.library.Library("neuronmm", "IMPL")
        for op in OPS:
            _override.impl(op, kernels[op], "CPU")
    _active = (name, target)


def _kernels_of(name: str, target: str | None) -> Kernels | None:
    """An implementation's kernels, None for the composite. Raises ValueError for an unknown one."""
    if name == "simulated":
        return simulated.implementation(target)
    if name not in _kernels:
        names = ", ".join(["simulated", *_kernels])
        raise ValueError(f"implementation must be one of {names}; got {name!r}")
    if target is not None:
        raise ValueError(f"only the simulated implementation takes a target; got {target!r}")
    return _kernels[name]
