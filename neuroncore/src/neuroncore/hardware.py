"""Facts of the NeuronCore generations, each with its source, and the costs built from them.

A generation is added here alone: its `Machine`, and its name in `Target` and `MACHINES`.

Sources, by the names used below:
"arch" = Neuron SDK 2.32, NKI architecture guides of Trainium/Inferentia2, Trainium2 and Trainium3;
"cost" = Neuron SDK 2.26, `nki.isa` reference, the last release that printed a cost per instruction;
"dma" = Neuron SDK 2.32, NKI DMA overview and DMA bandwidth guide;
"hw" = Neuron SDK 2.32, hardware pages of Trn1, Trn2 and Trn3;
"isa" = NKI 0.6, `nki.isa` reference;
"nkilib" = aws-neuron/nki-library, what its MLP kernels reserve;
"nkipy" = aws-neuron/nkipy, HardwareConstants.h, which mirrors `target_info` of the package nki;
"perf" = Neuron SDK 2.32, NKI performance guide, profiles of trn1 among its figures;
"profile" = the two profiles of trn2 in "dma": exp of [128,128] and of [4,4096];
"lnc", "fn" = Neuron SDK, errors NCC_EVRF066 and NCC_EVRF051 of the compiler;
"explorer" = Neuron SDK, tools/neuron-explorer, summary page and glossary;
"agentic" = aws-neuron/neuron-agentic-development, profiles of matmuls on trn2;
"traces" = allenkchau/trainium-kernel-fusion, profiles of attention on trn2;
"fit" = a constant fitted here, on the measurement named next to it: trn1's issue of a matmul and,
for each of the two DMA models, one.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Literal, get_args

Target = Literal["trn1", "trn2", "trn3"]
Model = Literal["calibrated", "documented", "stationary_reuse"]
MODELS: tuple[Model, ...] = get_args(Model)
DmaModel = Literal["transfers", "rows"]
DMA_MODELS: tuple[DmaModel, ...] = get_args(DmaModel)
"""Two explanations of the published DMA times, which differ in what small transfers cost.

`transfers`: a queue starts one transfer an interval. `rows`: runs of less than 4 KiB move at a
lower rate, and a DMA transpose at the least rate that a published kernel needs. The first holds for
every published figure and is the one that times are given under; what both say is a range.
"""

PARTITIONS = 128
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
PSUM_ALIGN_BYTES = 4
"""Results of TensorE start at its multiples (nki.language.tile_size.psum_min_align)."""
DMA_ENGINES = 16
DMA_QUEUES = 16
FREE_ELEMENTS = 32_767
"""Elements per partition of an engine's operand that all sources allow: "arch" has 64K, nki-library
65,535, and AWS's neuron-agentic-development this."""
MIN_CYCLES = 64
"""Minimum initiation interval of an instruction, in engine cycles (cost: MIN_II)."""

_PLAN_RESERVE_BYTES = 16384 + 8 + 256
"""SBUF per partition that plans leave: dynamic DMA scratch and the identity matrix (nkilib, gen3
MLP). A kernel may use the last 256 bytes of it, on trn1 264."""

Feature = Literal[
    "double_row", "hardware_dge", "indirect_transposes", "wide_transposes",
    "native_transposes", "device_loops", "paired_cores", "bias_numbers",
    "scalar_copies", "gpsimd_random", "random_state", "nonzero_with_count", "range_select",
    "select_reduce",
    "abs_extremes", "activate2", "all_to_all_v", "bf16_psum", "cross_bank_psum",
    "exponential", "filled_psum",
    "float8_e4m3fn", "mx", "priority", "rand2", "tensor_indirection", "vector_random_state",
]  # fmt: skip
"""What some generations have and others lack."""
_FEATURES_TRN2: frozenset[Feature] = frozenset({
    "double_row",  # nc_matmul contracts two rows of fp8 a partition (arch, Trainium2)
    "hardware_dge",  # the hardware generates DMA descriptors (arch, Trainium2)
    "indirect_transposes",  # dma_transpose gathers rows by an index (isa)
    "wide_transposes",  # dma_transpose moves elements of 4 bytes (arch, Trainium2)
    "native_transposes",  # TensorE transposes bits: also into 16 bits, fp32 in 2 passes (isa)
    "device_loops",  # NKI 0.6, which has loops on the device, documents trn2 and trn3
    "paired_cores",  # two cores are one logical NeuronCore; sendrecv, core_barrier (lnc, isa)
    "bias_numbers",  # activation takes a number as bias, and nl.reciprocal takes a bias (isa)
    "scalar_copies",  # tensor_copy and tensor_scalar run on ScalarE (isa)
    "gpsimd_random",  # rng runs on GpSimdE (isa)
    "random_state",  # rand_get_state and rand_set_state (isa)
    "nonzero_with_count", "range_select", "select_reduce",  # instructions (isa)
})  # fmt: skip
_FEATURES_TRN3 = _FEATURES_TRN2 | frozenset[Feature]({
    "abs_extremes",  # nl.abs_max and nl.abs_min (isa)
    "activate2", "exponential", "rand2",  # instructions (isa)
    "all_to_all_v",  # within an instance (nki.collectives reference)
    "bf16_psum",  # a matmul writes bfloat16, then with twice the moving size (isa)
    "cross_bank_psum",  # a result of TensorE covers several PSUM banks (arch, Trainium3)
    "filled_psum",  # a matmul adds to what another engine wrote into PSUM (isa)
    "float8_e4m3fn",  # engines take it; before, only float8_e4m3 (isa, fn)
    "mx",  # quantize_mx and nc_matmul_mx (isa)
    "priority",  # of DMAs and collectives (isa)
    "tensor_indirection",  # NkiTensor.indirect (nki.language reference)
    "vector_random_state",  # rand_get_state and rand_set_state on VectorE (isa)
})  # fmt: skip


class Engine(IntEnum):
    """The engines that run an instruction stream in order."""

    TENSOR = 0
    VECTOR = 1
    SCALAR = 2
    GPSIMD = 3
    SYNC = 4
    DMA = 5


@dataclass(frozen=True)
class DmaCosts:
    """What a DMA costs beyond its bytes, under one of the `DMA_MODELS`.

    Attributes:
        model: its name.
        interval_ns: from the start of a transfer to that of the next on the same queue, at least.
        short_gbps: rate of an engine in runs of less than `DMA_SATURATED_BYTES`, bytes per ns.
        transpose_share: of the DMA rate that a transpose out of HBM reaches.
    """

    model: DmaModel
    interval_ns: float
    short_gbps: float
    transpose_share: float


@dataclass(frozen=True)
class Throttle:
    """TensorE runs at `rate` where it did less of late than `use` of what its full rate could do.

    A device counts what it does in windows of a clock of its own, and each count sets the rate of
    the next window. Where in a window a kernel starts is not known: here the rate follows the
    window that ended half of one ago, the mean.
    """

    window_ns: float
    use: float
    rate: float

    @property
    def delay_ns(self) -> float:
        """From the end of the time that counts until the rate that it sets."""
        return self.window_ns / 2


@dataclass(frozen=True)
class Links:
    """What connects the chips of a target.

    Attributes:
        chips: connected by NeuronLinks: an instance; on Trn3 an UltraServer (hw).
        chip_gbps: NeuronLink bandwidth of a chip, bytes per ns, taken to count both directions.
    """

    chips: int
    chip_gbps: float


@dataclass(frozen=True)
class Machine:
    """One generation of NeuronCore: sizes in bytes, clocks in GHz, rates in bytes per ns."""

    target: Target
    generation: int
    sbuf_bytes: int
    """SBUF per partition (arch: 24, 28, 32 MiB over 128 partitions)."""
    usable_sbuf_bytes: int
    """What a kernel may use of it (nkipy)."""
    clocks_ghz: tuple[float, float, float, float]
    """TensorE, VectorE, ScalarE, GpSimdE (arch)."""
    dma_engine_gbps: float
    """Practical rate of one of the 16 DMA engines, bytes per ns (dma: 17, 23, 33)."""
    other_dma_engine_gbps: float
    """The rate that profiles show; where none was seen, the practical one."""
    dma_models: tuple[DmaCosts, ...]
    """What small transfers and transposes cost under each of `DMA_MODELS`."""
    dma: DmaCosts
    """That of `dma_models` which times are given under."""
    hbm_gbps: float
    """HBM of the chip, bytes per ns (arch: 820, 2,900, 4,700)."""
    cores: int
    """NeuronCores that share it (arch)."""
    hbm_gib: int
    """Capacity of that HBM, GiB (arch: 32, 96, 144)."""
    hbm_stacks: int
    """Stacks that it is made of; cores that lie at one stack share it (arch: 2, 4, 4)."""
    links: Links
    """Between chips."""
    result_ns: tuple[float, float, float, float]
    """From the end of an instruction until another engine may use its result, by engine."""
    moving_max: int
    """Largest moving free size of a matmul with an fp32 result (isa: 512, 512, 4096)."""
    matmul_overhead_cycles: float
    """Issue overhead of a matmul in TensorE cycles."""
    other_overhead_cycles: float
    """The same by another published figure."""
    pe_tile: int
    """Rows and columns of TensorE's smallest tile; operands start at its multiples (isa)."""
    fast_modes: bool
    """VectorE runs 16-bit copies 2-4x faster (arch, Trainium2: performance modes)."""
    shared_ports: bool
    """VectorE and GpSimdE exclude each other on SBUF, VectorE and ScalarE on PSUM (arch, gen2)."""
    default_lnc: int
    """Physical cores of a logical NeuronCore where nothing is set (lnc: 2 on Trn2 and later)."""
    features: frozenset[Feature] = frozenset()
    """What it has of that which not all generations have."""
    aliases: tuple[str, ...] = ()
    """Other families of instances with these cores."""
    throttle: Throttle | None = None
    """What slows TensorE where it is used little; None where nothing does."""
    serial_columns: bool = False
    """Matmuls on tiles of other columns of the PE array wait for each other."""
    shared_queues: bool = False
    """All loads start in one queue, and all stores: not one of each HBM tensor."""
    sbuf_reserve_bytes: int = _PLAN_RESERVE_BYTES
    """SBUF per partition that loads ahead of their use leave free."""
    reorders: bool = False
    """Its compiler issues instructions as list scheduling orders them, where that is quicker."""
    engine_issue_cycles: float = 0.0
    """What an instruction of VectorE or ScalarE takes beyond its columns before the next starts."""
    hbm_engine_gbps: float = math.inf
    """What HBM has for a DMA engine while other cores use it."""
    meeting_ns: float = 0.0
    """What a barrier or an exchange of two cores takes beyond its own cost."""

    def has(self, feature: Feature) -> bool:
        """Whether it has what not all generations have."""
        return feature in self.features

    @property
    def names(self) -> tuple[str, ...]:
        """What the target may be called: its families of instances, and its generation."""
        return (self.target, *self.aliases, f"gen{self.generation}")

    @property
    def slow_short_runs(self) -> bool:
        """Whether an engine moves short runs of bytes at less than half its rate (trn1 only)."""
        return min([costs.short_gbps for costs in self.dma_models]) < self.dma_engine_gbps / 2

    @property
    def casting_mhz(self) -> tuple[int, ...]:
        """Clocks of the engines that cast together: ScalarE, GpSimdE, VectorE if ports allow."""
        engines = (Engine.SCALAR, Engine.GPSIMD, Engine.VECTOR)[: 2 if self.shared_ports else 3]
        return tuple([round(self.clocks_ghz[engine] * 1000) for engine in engines])

    def check_lnc(self, lnc: int, name: str = "lnc") -> None:
        """Check a number of cores that share a launch.

        Raises:
            ValueError: the machine has no such logical NeuronCore.
        """
        if lnc != 1 and not (lnc == 2 and self.has("paired_cores")):
            paired = [
                machine.target for machine in MACHINES.values() if machine.has("paired_cores")
            ]
            targets = f"{', '.join(paired[:-1])} and {paired[-1]}"
            raise ValueError(f"{name} must be 1, or 2 on {targets}; got {lnc} on {self.target}")

    @property
    def planned_sbuf_bytes(self) -> int:
        """SBUF bytes per partition that plans use, and that loads ahead of their use fill."""
        return self.sbuf_bytes - self.sbuf_reserve_bytes

    @property
    def pe_peak_tflops(self) -> float:
        """bf16 peak of TensorE: 128 x 128 multiply-adds a cycle (arch: 92, 79, 79 TFLOP/s)."""
        return PARTITIONS * PARTITIONS * 2 * self.clocks_ghz[Engine.TENSOR] / 1e3

    @property
    def dma_peak_gbps(self) -> float:
        """All 16 DMA engines together, bytes per ns (dma: 272, 368, 528 GB/s)."""
        return DMA_ENGINES * self.dma_engine_gbps

    def ns(self, engine: Engine, cycles: float) -> float:
        """Nanoseconds of `cycles` cycles of a compute engine."""
        return cycles / self.clocks_ghz[engine]

    def result_of(self, engine: Engine, on_psum: bool) -> float:
        """ns from the end of an instruction until another engine may use its result."""
        if on_psum and engine in (Engine.VECTOR, Engine.SCALAR):
            return max(self.result_ns[engine], self.ns(engine, PSUM_RESULT_CYCLES))
        return self.result_ns[engine]

    def dma_run_ns(self, run_bytes: int) -> float:
        """Time of one contiguous run of bytes on one DMA engine.

        Short runs move at `dma.short_gbps`; none takes longer than 4 KiB, which saturate the engine
        (dma).
        """
        most = DMA_SATURATED_BYTES / self.dma_engine_gbps
        return max(run_bytes / self.dma_engine_gbps, min(run_bytes / self.dma.short_gbps, most))

    def dma_transpose_gbps(self, memory: str) -> float:
        """Rate of a DMA transpose out of "hbm" or "sbuf", all engines together, bytes per ns."""
        share = self.dma.transpose_share if memory == "hbm" else DMA_TRANSPOSE_SBUF_SHARE
        return self.dma_peak_gbps * min(share, self.dma.transpose_share)

    def rank_hbm_bytes(self, lnc: int, ranks: int) -> float:
        """HBM of each of some ranks of `lnc` cores: a stack, or its share of one.

        Both cores at a stack of Trainium2 reach all of it, also where each is a rank of its own
        (Neuron SDK, logical NeuronCore configuration).
        """
        sharing = max(1, min(self.cores // self.hbm_stacks // lnc, ranks))
        return self.hbm_gib * 2**30 / self.hbm_stacks / sharing

    def under(self, model: DmaModel) -> Machine:
        """This machine under one of the `DMA_MODELS`."""
        return replace(self, dma=next(c for c in self.dma_models if c.model == model))

    def with_cores_busy(self, cores: int) -> Machine:
        """This machine where so many cores of the chip share its HBM at the same time.

        Raises:
            ValueError: the chip has fewer cores.
        """
        if not 1 <= cores <= self.cores:
            raise ValueError(f"cores_busy must be 1 to {self.cores} on {self.target}; got {cores}")
        share = self.hbm_gbps / cores / DMA_ENGINES
        return replace(self, hbm_engine_gbps=share).with_dma_engine(self.dma_engine_gbps)

    def with_dma_engine(self, gbps: float) -> Machine:
        """This machine where a DMA engine has so many bytes per ns, as far as HBM has them."""
        return replace(self, dma_engine_gbps=min(gbps, self.hbm_engine_gbps))

    @property
    def matmul_overhead_ns(self) -> float:
        """The issue overhead of a matmul, which the calibrated model adds."""
        return self.ns(Engine.TENSOR, self.matmul_overhead_cycles)


DMA_SATURATED_BYTES = 4096
"""Contiguous bytes from which on an engine reaches its rate (dma: "target for saturation")."""
DMA_START_NS = 1300.0
"""From the semaphore that lets a DMA go to its first byte (dma; profile: 940 and 1,500)."""
DMA_DONE_NS = 305.0
"""From the last byte until an engine that waits for it starts (profile: 290 and 320)."""
HWDGE_NS = 600.0
"""Descriptor generation of one DMA by the hardware, on one of two instances (arch, Trainium2)."""
_LATENCIES_TRN1 = (142.0, 89.3, 142.9, 71.4)
"""Result latencies by engine, ns (perf: a matmul of 128 columns takes 188 ns and streams 46;
dependent activations start every 264 ScalarE cycles, of which an instruction takes 64; arch: about
100 cycles of VectorE; GpSimdE: the same)."""
_LATENCIES_TRN2 = (164.0, 104.2, 297.0, 83.3)
"""The same (profile: activations of 128 and 4096 columns take 400 and 3,714 ns and stream 107 and
3,413; traces: matmuls of 128 and 512 columns take 217 and 377 ns and stream 53 and 213, in fp32
272 and 591). trn3's clocks are higher, its latencies taken from here."""
ACCESS_CYCLES = 60.0
"""What an engine takes to start to access a tensor (arch; traces: VectorE's instructions of 512
columns start every 568 to 573 cycles, ScalarE's copies of 128 and 512 every 187 and 572)."""
DMA_SPREAD_NS = 371.0
"""From the first engine's start of a transfer to the last's (profile: 468 of a transfer, 97 of an
engine). What a profiler shows as active, and part of `DMA_START_NS` here."""
PSUM_RESULT_CYCLES = 135
"""Result latency of VectorE and ScalarE at least, in their cycles, where they read or write PSUM
(agentic: copies of 512 columns out of PSUM are active for 645 to 660)."""
_THROTTLE = Throttle(window_ns=8192 / 2.4, use=3 / 8, rate=0.5)
"""TensorE by the columns that it streamed (traces: of 154 windows of 3,413 ns all that follow 0.375
or more of what it could stream are at the full rate, and after 0.369 and less at half of it)."""
DMA_TRANSPOSE_SBUF_SHARE = 0.5
"""Share of the DMA rate that a transpose within SBUF reaches at best (arch, Trainium2)."""
TABLE_LOAD_NS = 1300.0
"""ScalarE loads the table of another activation function (profile: 1,290 and 1,310)."""


def _dma_models(
    interval_ns: float, short_gbps: tuple[float, float], transpose_shares: tuple[float, float]
) -> tuple[DmaCosts, ...]:
    """The constants of `transfers` and `rows`, which leaves transfers no interval."""
    (rate, rows_rate), (share, rows_share) = short_gbps, transpose_shares
    return (
        DmaCosts("transfers", interval_ns, rate, share),
        DmaCosts("rows", 0.0, rows_rate, rows_share),
    )


_DMA_TRN1 = _dma_models(1275.0, (17.0, 6.6), (0.25, 0.25))
"""fit: the matmul tutorial's hoisted and blocked steps, whose 128-KiB loads take the interval (the
guide says about 1,300 ns from semaphore to start); the loads of its steps, 256-byte and 1-KiB rows
at 7.1 and 6.4 bytes per ns, for which only `rows` needs a lower rate; NeuronMM's unfused pair,
which transposes x twice (no share of a transpose is documented)."""
_DMA_TRN2 = _dma_models(830.0, (21.0, 21.0), (0.9, 0.5))
"""fit: throughput against row size in "dma", where 128 rows of up to 1 KiB take the interval (the
profile of [128,128] has 739 ns from trigger to first byte and 97 ns of transfer); that profile,
2 KiB in 97 ns. Transposes at "up to" 90 % (arch, Trainium2): with less than 50 % the model no
longer reaches nki-autotune's lhs @ rhs, which transposes 32 MiB in its 0.2442 ms."""
_DMA_TRN3 = _dma_models(830.0, (30.1, 30.1), (0.9, 0.5))
"""Nothing is published: trn2's interval and shares, and its share of the rate for short runs."""


_PROFILED_ISSUE = 9.7
"""Cycles of a matmul beyond its columns (agentic: 521.6 and 521.8 for 512)."""
_AUTOTUNED_ISSUE = 512 / 0.9092 - 512
"""The same where all of a kernel's gap to the peak is charged to it, an upper bound: nki-autotune,
lhsT @ rhs, hand-tuned, 2048 x 2048 x 2048 on trn2, 90.92 % of the peak."""
_TUTORIAL_ISSUE = 6.97e6 * 2.8 / (32 * 64 * 16) - 512
"""fit: the same of the matmul tutorial on trn1, blocked M, N and K, [4096,8192] @ [8192,8192]."""


TRN1 = Machine(
    target="trn1",
    generation=2,
    sbuf_bytes=192 * 1024,
    usable_sbuf_bytes=180_224,
    clocks_ghz=(2.8, 1.12, 1.4, 1.4),
    dma_engine_gbps=17.0,
    other_dma_engine_gbps=17.0,
    dma_models=_DMA_TRN1,
    dma=_DMA_TRN1[0],
    hbm_gbps=820.0,
    cores=2,
    hbm_gib=32,
    hbm_stacks=2,
    links=Links(chips=16, chip_gbps=384 * 1.073741824),  # trn1.32xlarge: 384 GiB/s (hw)
    result_ns=_LATENCIES_TRN1,
    moving_max=512,
    matmul_overhead_cycles=_TUTORIAL_ISSUE,
    other_overhead_cycles=_PROFILED_ISSUE,  # trn2's
    pe_tile=64,
    fast_modes=False,
    shared_ports=True,
    default_lnc=1,
    aliases=("inf2",),
)
TRN2 = Machine(
    target="trn2",
    generation=3,
    sbuf_bytes=224 * 1024,
    usable_sbuf_bytes=212_984,
    clocks_ghz=(2.4, 0.96, 1.2, 1.2),
    dma_engine_gbps=23.0,
    other_dma_engine_gbps=4096 / 158,  # 4 KiB in 158 ns (traces)
    dma_models=_DMA_TRN2,
    dma=_DMA_TRN2[0],
    hbm_gbps=2900.0,
    cores=8,
    hbm_gib=96,
    hbm_stacks=4,
    links=Links(chips=16, chip_gbps=1024.0),  # (hw)
    result_ns=_LATENCIES_TRN2,
    moving_max=512,
    matmul_overhead_cycles=_PROFILED_ISSUE,
    other_overhead_cycles=_AUTOTUNED_ISSUE,
    pe_tile=32,
    fast_modes=True,
    shared_ports=False,
    default_lnc=2,
    features=_FEATURES_TRN2,
    throttle=_THROTTLE,
)
TRN3 = replace(  # what is not named is not published either: taken from trn2
    TRN2,
    target="trn3",
    generation=4,
    sbuf_bytes=256 * 1024,
    usable_sbuf_bytes=245_752,
    clocks_ghz=(2.4, 1.2, 1.2, 1.2),
    dma_engine_gbps=33.0,
    other_dma_engine_gbps=33.0,
    dma_models=_DMA_TRN3,
    dma=_DMA_TRN3[0],
    hbm_gbps=4700.0,
    hbm_gib=144,
    # 2,048 GiB/s (hw; 2.56 TB/s on the chip's own page, and 704 GB/s by the sum of its links on the
    # connectivity page)
    links=Links(chips=64, chip_gbps=2048 * 1.073741824),
    moving_max=4096,
    aliases=("trn3pre",),  # before it was on sale; what is still set for its compiler
    features=_FEATURES_TRN3,
)
MACHINES: dict[Target, Machine] = {"trn1": TRN1, "trn2": TRN2, "trn3": TRN3}


DEFAULT_TARGET: Target = "trn2"
"""The first target of NKI 0.6's documentation; trn1 needs an older toolchain."""
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Names the target for AWS's tools, and for these."""
PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"
"""Holds the EC2 instance type (source: aws-neuron/nkipy, which detects the target by it)."""


@dataclass(frozen=True)
class DetectedTarget:
    """The machine that is meant where nobody names one.

    Attributes:
        machine: its facts.
        source: what said so.
        known: the environment or the instance type did; otherwise it is the default.
    """

    machine: Machine
    source: str
    known: bool


def resolve_target(target: str | None = None) -> Machine:
    """The machine of a target name or alias; None is what `find_target` finds.

    Raises:
        ValueError: a name that is none.
    """
    if target is None:
        return find_target().machine
    for machine in MACHINES.values():
        if target.lower() in machine.names:
            return machine
    names = [name for machine in MACHINES.values() for name in machine.names]
    raise ValueError(f"target must be one of {', '.join(names)}; got {target!r}")


def find_target() -> DetectedTarget:
    """The machine by the environment, else by the instance type, else `DEFAULT_TARGET`.

    The environment is read at every call: the Neuron tools read it late, too.

    Raises:
        ValueError: the environment names no target.
    """
    return _find_target(os.environ.get(TARGET_VARIABLE), PRODUCT_NAME)


@cache
def _find_target(override: str | None, product_name: str) -> DetectedTarget:
    if override:
        try:
            return DetectedTarget(resolve_target(override), TARGET_VARIABLE, known=True)
        except ValueError as error:
            raise ValueError(f"{TARGET_VARIABLE}: {error}") from None
    instance = instance_type(product_name)
    families = "|".join([name for m in MACHINES.values() for name in (m.target, *m.aliases)])
    family = re.search(rf"\b({families})(?!\d)", instance)  # trn1n.32xlarge, trn3-dev0
    if family:
        return DetectedTarget(resolve_target(family[1]), f"instance type {instance}", known=True)
    source = f"no Neuron instance found; set {TARGET_VARIABLE}"
    return DetectedTarget(resolve_target(DEFAULT_TARGET), source, known=False)


def instance_type(path: str | None = None) -> str:
    """The EC2 instance type that a file names, by default `PRODUCT_NAME`; empty without one."""
    try:
        return Path(path or PRODUCT_NAME).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
