"""Facts of the three NeuronCore generations, each with its source, and the costs built from them.

Sources, by the names used below:
"arch" = Neuron SDK 2.32, NKI architecture guides of Trainium/Inferentia2, Trainium2 and Trainium3;
"cost" = Neuron SDK 2.26, `nki.isa` reference, the last release that printed a cost per instruction;
"dma" = Neuron SDK 2.32, NKI DMA overview and DMA bandwidth guide;
"nkilib" = aws-neuron/nki-library, what its MLP kernels reserve;
"lnc" = Neuron SDK, error NCC_EVRF066 of the compiler;
"fit" = the one constant per generation fitted here, on the kernel named beside it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Literal, get_args

Target = Literal["trn1", "trn2", "trn3"]
Model = Literal["calibrated", "documented", "stationary_reuse"]
MODELS: tuple[Model, ...] = get_args(Model)

PARTITIONS = 128
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
DMA_ENGINES = 16
DMA_QUEUES = 16
MIN_CYCLES = 64
"""Minimum initiation interval of an instruction, in engine cycles (cost: MIN_II)."""

_RESERVED_BYTES = 16384 + 8 + 256
"""SBUF per partition kept for dynamic DMA scratch and the identity matrix (nkilib, gen3 MLP)."""

_ALIASES: dict[str, Target] = {
    "trn1": "trn1", "inf2": "trn1", "gen2": "trn1",
    "trn2": "trn2", "gen3": "trn2",
    "trn3": "trn3", "gen4": "trn3",
}  # fmt: skip


class Engine(IntEnum):
    """The engines that run an instruction stream in order."""

    TENSOR = 0
    VECTOR = 1
    SCALAR = 2
    GPSIMD = 3
    SYNC = 4
    DMA = 5


@dataclass(frozen=True)
class Machine:
    """One generation of NeuronCore: sizes in bytes, clocks in GHz, rates in bytes per ns."""

    target: Target
    generation: int
    sbuf_bytes: int
    """SBUF per partition (arch: 24, 28, 32 MiB over 128 partitions)."""
    clocks_ghz: tuple[float, float, float, float]
    """TensorE, VectorE, ScalarE, GpSimdE (arch)."""
    dma_engine_gbps: float
    """Practical rate of one of the 16 DMA engines, bytes per ns (dma: 17, 23, 33)."""
    moving_max: int
    """Largest moving free size of a matmul with an fp32 result (isa: 512, 512, 4096)."""
    matmul_overhead_cycles: float
    """Issue overhead of a matmul in TensorE cycles: the only fitted number (fit)."""
    fast_modes: bool
    """VectorE runs 16-bit copies 2-4x faster (arch, Trainium2: performance modes)."""
    shared_ports: bool
    """VectorE and GpSimdE exclude each other on SBUF, VectorE and ScalarE on PSUM (arch, gen2)."""
    hardware_dge: bool
    """The hardware generates DMA descriptors (arch: Trainium2 and later)."""
    bf16_psum: bool
    """A matmul may write bfloat16 (isa: NeuronCore-v4)."""
    default_lnc: int
    """Physical cores of a logical NeuronCore where nothing is set (lnc: 2 on Trn2 and later)."""

    @property
    def usable_sbuf_bytes(self) -> int:
        """SBUF bytes per partition that a kernel may use: the total less what is reserved."""
        return self.sbuf_bytes - _RESERVED_BYTES

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

    def dma_row_ns(self, row_bytes: int) -> float:
        """Time of one contiguous run of bytes on one DMA engine.

        (dma) digitised throughput against bytes per partition row is fitted by a time in
        proportion to max(2430, bytes + 150): 2 KiB rows reach 82 % of the peak, 256 B rows 11 %.
        """
        return max(DMA_MIN_ROW_BYTES, row_bytes + DMA_ROW_OVERHEAD_BYTES) / self.dma_engine_gbps

    @property
    def matmul_overhead_ns(self) -> float:
        """The issue overhead of a matmul, which the calibrated model adds."""
        return self.ns(Engine.TENSOR, self.matmul_overhead_cycles)


DMA_MIN_ROW_BYTES = 2430
DMA_ROW_OVERHEAD_BYTES = 150
DMA_START_NS = 1300.0
"""From the semaphore that lets a DMA go to its first byte (dma)."""
HWDGE_NS = 600.0
"""Descriptor generation of one DMA by the hardware, on one of two instances (arch, Trainium2)."""
DMA_TRANSPOSE_SHARE = {"hbm": 0.9, "sbuf": 0.5}
"""Share of the DMA throughput that a DMA transpose reaches, by where it reads (arch: "up to")."""
RESULT_CYCLES = {Engine.TENSOR: 64.0, Engine.VECTOR: 100.0, Engine.SCALAR: 100.0}
"""From the end of an instruction until another may use its result, in the engine's cycles.

(arch) MM_INIT_LATENCY of 64 TensorE cycles; about 100 cycles of static overhead on Vector and
Scalar engines when each instruction depends on the one before. GpSimdE: taken as VectorE's.
"""


def _issue_overhead(published_ms: float, matmuls: int, clock_ghz: float) -> float:
    """Cycles that a published matmul kernel spends per matmul beyond its 512 columns.

    All of the kernel's gap to the peak is charged to the issue of matmuls: an upper bound.
    """
    return published_ms * 1e6 * clock_ghz / matmuls - 512


TRN1 = Machine(
    target="trn1",
    generation=2,
    sbuf_bytes=192 * 1024,
    clocks_ghz=(2.8, 1.12, 1.4, 1.4),
    dma_engine_gbps=17.0,
    moving_max=512,
    # fit: matmul tutorial, blocked M, N and K, [4096,8192] @ [8192,8192]
    matmul_overhead_cycles=_issue_overhead(6.97, 32 * 64 * 16, 2.8),
    fast_modes=False,
    shared_ports=True,
    hardware_dge=False,
    bf16_psum=False,
    default_lnc=1,
)
TRN2 = Machine(
    target="trn2",
    generation=3,
    sbuf_bytes=224 * 1024,
    clocks_ghz=(2.4, 0.96, 1.2, 1.2),
    dma_engine_gbps=23.0,
    moving_max=512,
    # fit: nki-autotune lhs @ rhs, hand-tuned, 2048 x 2048 x 2048
    matmul_overhead_cycles=_issue_overhead(0.2442, 16 * 16 * 4, 2.4),
    fast_modes=True,
    shared_ports=False,
    hardware_dge=True,
    bf16_psum=False,
    default_lnc=2,
)
TRN3 = Machine(
    target="trn3",
    generation=4,
    sbuf_bytes=256 * 1024,
    clocks_ghz=(2.4, 1.2, 1.2, 1.2),
    dma_engine_gbps=33.0,
    moving_max=4096,
    # no published kernel to fit on: taken from trn2
    matmul_overhead_cycles=TRN2.matmul_overhead_cycles,
    fast_modes=True,
    shared_ports=False,
    hardware_dge=True,
    bf16_psum=True,
    default_lnc=2,
)
MACHINES: dict[Target, Machine] = {"trn1": TRN1, "trn2": TRN2, "trn3": TRN3}


DEFAULT_TARGET: Target = "trn2"
"""The first target of NKI 0.6's documentation; trn1 needs an older toolchain."""
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""Names the target for AWS's tools, and for these."""
PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"
"""Holds the EC2 instance type (source: aws-neuron/nkipy, which detects the target by it)."""


@dataclass(frozen=True)
class Found:
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
    found = _ALIASES.get(target.lower())
    if found is None:
        raise ValueError(f"target must be one of {', '.join(_ALIASES)}; got {target!r}")
    return MACHINES[found]


def find_target() -> Found:
    """The machine by the environment, else by the instance type, else `DEFAULT_TARGET`.

    The environment is read at every call: the Neuron tools read it late, too.

    Raises:
        ValueError: the environment names no target.
    """
    return _find_target(os.environ.get(TARGET_VARIABLE), PRODUCT_NAME)


@cache
def _find_target(override: str | None, product_name: str) -> Found:
    if override:
        try:
            return Found(resolve_target(override), TARGET_VARIABLE, known=True)
        except ValueError as error:
            raise ValueError(f"{TARGET_VARIABLE}: {error}") from None
    instance = _instance_type(product_name)
    family = re.search(r"\b(trn[123]|inf2)(?!\d)", instance)  # trn1n.32xlarge, trn3-dev0
    if family:
        return Found(resolve_target(family[1]), f"instance type {instance}", known=True)
    source = f"no Neuron instance found; set {TARGET_VARIABLE}"
    return Found(resolve_target(DEFAULT_TARGET), source, known=False)


def _instance_type(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
