"""Values of a launch whose cores ran in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuroncore.boundary import as_arrays
from neuroncore.checks.base import placed
from neuroncore.checks.races import races

if TYPE_CHECKING:
    from neuroncore.kernel import Simulation


def same_values(simulation: Simulation, other: Simulation, order: int) -> None:
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
    pairs = zip(as_arrays(simulation.outputs), as_arrays(other.outputs), strict=True)
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
