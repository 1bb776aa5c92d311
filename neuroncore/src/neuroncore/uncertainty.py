"""What public sources do not determine, each with its two ends: what times would be at the other.

A time is given with one end of each, those of `hardware`'s machines. `Profile.uncertainties` has
the time with the other end of one at a time, and `Profile.time_range_ms` that at all worst and all
best ends together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from neuroncore.hardware import ACCESS_CYCLES, DMA_START_NS, Machine


@dataclass(frozen=True)
class Uncertainty:
    """One thing that is not known.

    Attributes:
        name: as `simulate(assume=...)` takes it.
        assumed: the end that times are given with.
        otherwise: the other end.
        source: what speaks for the two.
        other: the machine at the other end; as it is where that changes nothing.
        only_quicker: no launch is slower at the other end.
    """

    name: str
    assumed: str
    otherwise: str
    source: str
    other: Callable[[Machine], Machine]
    only_quicker: bool = False


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
        "dma-rate",
        "an engine at the rate that the DMA overview calls practical",
        "at that of long rows in profiles of trn2, 13 % more",
        "368 GB/s in the overview; 4 KiB in 158 ns, 415 GB/s by 16 engines "
        "(allenkchau/trainium-kernel-fusion), and 414 in kernels of Jerry2423/kda-for-trainium",
        lambda machine: machine.with_dma_engine(machine.other_dma_engine_gbps),
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
        "engine-issue",
        "VectorE and ScalarE start an instruction when the last has read its columns",
        f"{ACCESS_CYCLES:g} cycles later",
        "costs by instruction of the SDK 2.26 reference; profiles of trn2 "
        "(allenkchau/trainium-kernel-fusion), where activations take 171 to 221",
        lambda machine: replace(machine, engine_issue_cycles=ACCESS_CYCLES),
    ),
    Uncertainty(
        "throttling",
        "TensorE at half its rate after 3.4 us with less than 3/8 of its full use",
        "always at its full rate",
        "neuron-explorer's summary page names it (dI/dt); profiles of trn2 show the windows "
        "(allenkchau/trainium-kernel-fusion); of trn3 nothing is published",
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
        "instruction-order",
        "engines take instructions in the order of the program",
        "as list scheduling has them, where that is quicker",
        "five attention kernels of KevGomes1403/nki-moe-megakernel take on trn2 what the second "
        "says, 4 to 8 % more or less, and experts next to them what the first says",
        lambda machine: replace(machine, reorders=True),
        only_quicker=True,
    ),
    Uncertainty(
        "sbuf-reserve",
        "16 KiB of SBUF a partition stay free for descriptors of dynamic DMAs",
        "loads ahead of their use fill all of it",
        "nki-library's budgets; nki-autotune's matmuls of 8,192 rows, which took on trn1 "
        "21 to 25 % less than with a reserve",
        lambda machine: replace(machine, sbuf_reserve_bytes=0),
    ),
    Uncertainty(
        "core-exchange",
        "two cores meet at once, and exchange as by a DMA",
        f"{DMA_START_NS / 1e3:g} us later, as what a semaphore lets start",
        "97 times that nki-library's tests store: 0.7 us later, 0.7 either way",
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
