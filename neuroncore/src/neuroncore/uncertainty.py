"""What public sources do not determine, each with its two ends: what times would be at the other.

A time is given with one end of each, those of `hardware`'s machines. `Profile.uncertainties` has
the time with the other end of one at a time, and `Profile.time_range_ms` that at all worst and all
best ends together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from neuroncore.hardware import DMA_START_NS, Machine


@dataclass(frozen=True)
class Uncertainty:
    """One thing that is not known.

    Attributes:
        name: as `simulate(assume=...)` takes it.
        assumed: the end that times are given with.
        otherwise: the other end.
        source: what speaks for the two.
        other: the machine at the other end; as it is where that changes nothing.
    """

    name: str
    assumed: str
    otherwise: str
    source: str
    other: Callable[[Machine], Machine]


def _late_meetings(machine: Machine) -> Machine:
    return replace(machine, meeting_ns=DMA_START_NS) if machine.has("paired_cores") else machine


UNCERTAINTIES = (
    Uncertainty(
        "dma",
        "a queue starts one DMA an interval",
        "short rows move slowly",
        "the DMA overview's plot against the matmul tutorial (hardware.DMA_MODELS)",
        lambda machine: machine.under("rows"),
    ),
    Uncertainty(
        "dma-queues",
        "a queue for each HBM tensor and direction",
        "one for all loads and one for all stores",
        "the DMA overview's 16 queues; which the compiler takes is not said, and profiles of trn2 "
        "show 594 to 1,050 ns for two loads (aws-neuron/neuron-agentic-development)",
        lambda machine: replace(machine, shared_queues=True),
    ),
    Uncertainty(
        "matmul-issue",
        "what public figures of the generation say: profiles of trn2, trn1's best kernel",
        "trn2's best kernel, or trn2's profiles on trn1",
        "profiles with 521.7 cycles for 512 columns (aws-neuron/neuron-agentic-development); "
        "nki-autotune's 90.9 % of the peak",
        lambda machine: replace(machine, matmul_overhead_cycles=machine.other_overhead_cycles),
    ),
    Uncertainty(
        "throttling",
        "TensorE at half its rate where less than half of the last 3 us was used",
        "always at its full rate",
        "neuron-explorer's summary page and glossary name it (dI/dt), without the figures",
        lambda machine: replace(machine, throttle=None),
    ),
    Uncertainty(
        "column-groups",
        "matmuls on other columns of the PE array side by side",
        "one after the other",
        "nc_matmul's text describes column tiling and AWS's kernels use it; its parameters say "
        "that start_column must be 0",
        lambda machine: replace(machine, serial_columns=True),
    ),
    Uncertainty(
        "core-exchange",
        "two cores meet at once, and exchange as by a DMA",
        f"{DMA_START_NS / 1e3:g} us later, as what a semaphore lets start",
        "nothing is published",
        _late_meetings,
    ),
    Uncertainty(
        "hbm",
        "the core's share of HBM is its own",
        "all cores of the chip are busy",
        "the architecture guides' bandwidth",
        lambda machine: machine.with_cores_busy(machine.cores),
    ),
)


def assuming(machine: Machine, names: Iterable[str]) -> Machine:
    """The machine at the other end of the named uncertainties.

    Raises:
        ValueError: there is no such name.
    """
    known = {each.name: each for each in UNCERTAINTIES}
    for name in names:
        if name not in known:
            raise ValueError(f"assume must be of {', '.join(known)}; got {name!r}")
        machine = known[name].other(machine)
    return machine
