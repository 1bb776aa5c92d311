"""What is to be computed (`Problem`), how it runs (`Plan`), and modelled costs of its instructions.

Pure arithmetic on the facts of `hardware`: no torch, no simulation. All times modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from neuronmm_ops.hardware import DEFAULT_TARGET, Engine, Machine, resolve_target
from neuronmm_ops.kernels.stages.tiling import COLUMNS, P, tiles_in

Op = Literal["xw", "xuv", "svd_mlp"]
Form = Literal["prefill", "decode"]
Block = int | bool | str
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Problem:
    """What a plan is for: x [M, K] through one op on one target.

    Attributes:
        op: xw, xuv or svd_mlp.
        M: tokens.
        K: input features.
        ranks: of the low-rank pairs: () for xw, (r,) for xuv, (gate, up, down) for svd_mlp.
        N: output features.
        inner: I of svd_mlp, 0 for the others.
        dtype: of all tensors: bfloat16, float16 or float32.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores that share the launch, 1 or 2 (trn2 and trn3 only).
        packed: u of xuv lies in the order of `SVDLinear.pack_`.
        rounds: xuv may round partial sums in SBUF to dtype, which halves them.
    """

    op: Op
    M: int
    K: int
    ranks: tuple[int, ...]
    N: int
    inner: int = 0
    dtype: str = "bfloat16"
    target: str = DEFAULT_TARGET
    lnc: int = 1
    packed: bool = False
    rounds: bool = False

    def __post_init__(self) -> None:
        machine = resolve_target(self.target)
        object.__setattr__(self, "target", machine.target)
        sizes = (self.M, self.K, self.N, *self.ranks, *((self.inner,) if self.inner else ()))
        if min(sizes) < 1:
            raise ValueError(f"tokens, features and ranks must be at least 1; got {sizes}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}; got {self.dtype!r}")
        if self.packed and (self.op != "xuv" or self.K % P):
            raise ValueError(f"only u [K, r] with 128 | K can be packed; got {self.op}, K {self.K}")
        if self.lnc not in (1, 2) or (self.lnc == 2 and machine.generation < 3):
            raise ValueError(
                f"lnc must be 1, or 2 on trn2 and trn3; got {self.lnc} on {machine.target}"
            )

    @property
    def machine(self) -> Machine:
        """Facts of the target."""
        return resolve_target(self.target)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the weights in the order of the op's schema."""
        if self.op == "xw":
            return ((self.K, self.N),)
        if self.op == "xuv":
            return ((self.K, self.ranks[0]), (self.ranks[0], self.N))
        gate, up, down = self.ranks
        return (
            *((self.K, gate), (gate, self.inner), (self.K, up), (up, self.inner)),
            *((self.inner, down), (down, self.N)),
        )

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def core_tokens(self) -> list[int]:
        """Tokens of each core in prefill: whole tiles of 128, the first core has the most."""
        share = tiles_in(tiles_in(self.M, P), self.lnc) * P
        return [max(0, min(share, self.M - core * share)) for core in range(self.lnc)]

    @cached_property
    def weight_elements(self) -> int:
        """Elements of all weights or factors."""
        if self.op == "xw":
            return self.K * self.N
        if self.op == "xuv":
            return self.ranks[0] * (self.K + self.N)
        gate, up, down = self.ranks
        return (gate + up) * (self.K + self.inner) + down * (self.inner + self.N)

    @property
    def flops(self) -> int:
        """2 M for each weight."""
        return 2 * self.M * self.weight_elements

    @property
    def least_bytes(self) -> int:
        """x, the weights and the output, each moved once."""
        return self.item_bytes * (self.M * (self.K + self.N) + self.weight_elements)

    @property
    def limit_ms(self) -> float:
        """The longer of the matmuls at the calibrated efficiency and all bytes at the DMA peak.

        The efficiency is that of 512 moving columns: 512 / (512 + issue overhead in cycles).
        """
        machine = self.machine
        passes = 4 if self.dtype == "float32" else 1
        efficiency = COLUMNS / (COLUMNS + machine.matmul_overhead_cycles / passes)
        peak = machine.pe_peak_tflops * efficiency / passes
        matmul_ns = self.flops / peak / 1e3
        return max(matmul_ns, self.least_bytes / machine.dma_peak_gbps) / self.lnc / 1e6


@dataclass(frozen=True)
class Plan:
    """How one problem runs. Times and traffic are modelled by the plan's own formulas.

    Attributes:
        problem: what it is for.
        form: prefill (a strip of tokens stays in SBUF, weights stream) or decode (weights stream
            once).
        kernel: name of the kernel in `neuronmm_ops.kernels`.
        blocks: the kernel's compile-time arguments, in order.
        time_ms: predicted.
        hbm_bytes: predicted HBM traffic, all cores.
        sbuf_bytes: predicted peak per partition.
        psum_banks: predicted peak.
        bound: "PE" or "DMA", what takes longest.
    """

    problem: Problem
    form: Form
    kernel: str
    blocks: tuple[tuple[str, Block], ...]
    time_ms: float
    hbm_bytes: int
    sbuf_bytes: int
    psum_banks: int
    bound: str

    @property
    def phase(self) -> Form:
        """prefill or decode."""
        return self.form

    @property
    def launches(self) -> tuple[int, ...]:
        """Tokens of each launch."""
        return (self.problem.M,)

    @property
    def arguments(self) -> dict[str, Block]:
        """The kernel's compile-time arguments by name."""
        return dict(self.blocks)


def matmul_ns(machine: Machine, stationary: int, moving: int, passes: int = 1) -> float:
    """Modelled time of one matmul: max(min(64, stationary), moving) cycles a pass, and its issue.

    `stationary` and `moving` are free sizes. Source: SDK 2.26 `nki.isa`, and the fitted overhead.
    """
    cycles = max(min(64, stationary), moving) * passes
    return machine.ns(Engine.TENSOR, cycles) + machine.matmul_overhead_ns


def load_ns(machine: Machine, partitions: int, run_bytes: int, runs: int = 1) -> float:
    """Modelled DMA time of [partitions, runs x run_bytes]: 8 partitions an engine, 16 engines."""
    return min(8, partitions) * runs * machine.dma_row_ns(run_bytes)
