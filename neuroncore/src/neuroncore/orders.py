"""Values of a launch whose cores ran in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from neuroncore.boundary import is_torch, torch_array
from neuroncore.checks.base import placed
from neuroncore.checks.races import races

if TYPE_CHECKING:
    from neuroncore.kernel import Simulation


def same_values(found: Simulation, other: Simulation, order: int) -> None:
    """Compare the outputs of two runs, to the bit.

    Raises:
        ValueError: the launch has one core.
        NkiValidationError: an output differs; says the lines of the cores that meet in it.
    """
    launch = other.profile.launch
    if len(launch.cores) == 1:
        raise ValueError(
            "schedules compares orders of cores that run at once, and the kernel runs on one, "
            "whose engines wait for the data they share; use kernel[2] (--lnc 2) or ranks"
        )
    pairs = zip(_arrays(found.outputs), _arrays(other.outputs), strict=True)
    for number, (a, b) in enumerate(pairs):
        if a.tobytes() == b.tobytes():
            continue
        traces = [core.trace for core in launch.cores]
        starts = range(0, len(traces), 2) if launch.lnc == 2 else ()
        where = [race for i in starts for race in races(traces[i], traces[i + 1])]
        unexplained = "no two accesses to HBM were found that explain it", ("", 0)
        text, place = where[0] if where else unexplained
        raise placed(
            f"output {number} has other values in order {order} of the cores: a race; {text}",
            *place,
        )


def _arrays(outputs: Any) -> list[np.ndarray]:
    if isinstance(outputs, tuple | list):
        return [array for output in outputs for array in _arrays(output)]
    return [torch_array("output", outputs) if is_torch(outputs) else np.asarray(outputs)]
