"""What is to be computed (`Problem`) and how it runs (`Plan`).

Pure arithmetic on the facts of `hardware`: no simulation. All times modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Literal

from neuroncore.hardware import DEFAULT_TARGET, Machine, resolve_target
from neuronmm_ops.kernels.stages.tiling import BANK_COLUMNS, core_span
from neuronmm_ops.storages import BY_DTYPE, COMPUTES, WeightStorage, matrix_bytes

Phase = Literal["prefill", "decode"]
Block = int | bool | str | tuple[int, ...]
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}

SEVERAL = "/"
"""Between the dtypes of weights that are not stored alike."""

Matrices = tuple[tuple[int, ...], ...]
Other = tuple[str, tuple[int, ...], str]
"""A kernel's parameter, its shape, in which -1 stands for the tokens, its dtype, empty for x's."""


def several(dtypes: Sequence[str]) -> str:
    """A problem's `weight_dtype`, of that of each of its weights."""
    return SEVERAL.join(dtypes if len({*dtypes}) > 1 else dtypes[:1])


@dataclass(frozen=True)
class Problem:
    """What a plan is for: x [M, K] through one op on one target.

    Attributes:
        op: name of the op, and of its folder in `kernels`.
        M: tokens.
        matrices: shapes of the op's weights in the order of its schema, what is contracted first;
            packed ones have more than two dimensions.
        dtype: of x, the result and, where `weight_dtype` names no other, the weights: bfloat16,
            float16 or float32.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores that share the launch, 1 or 2 (trn2 and trn3 only).
        bf16_partial_sums: a kernel may round partial sums in SBUF to dtype, which halves them.
        weight_dtype: of weights in a storage, as `storages.dtype_name`; empty where they are of
            `dtype`; of weights in several, that of each, as `several` joins them.
        compute: "x", or "fp8" where prefill may round activations to fp8, token by token.
        others: tensors that the op is given besides x, its matrices, scales and biases; x itself
            where there is no matrix.
        tp: ranks of tensor parallel that sum with each other in the launch; sizes are of one.
    """

    op: str
    M: int
    matrices: Matrices
    dtype: str = "bfloat16"
    target: str = DEFAULT_TARGET
    lnc: int = 1
    bf16_partial_sums: bool = False
    weight_dtype: str = ""
    compute: str = "x"
    others: tuple[Other, ...] = ()
    tp: int = 1

    def __post_init__(self) -> None:
        machine = resolve_target(self.target)
        object.__setattr__(self, "target", machine.target)
        sizes = (self.M, *[size for shape in self.matrices for size in shape])
        if min(sizes) < 1:
            raise ValueError(f"tokens, features and ranks must be at least 1; got {sizes}")
        if self.dtype not in ITEMSIZES:
            raise ValueError(f"dtype must be one of {', '.join(ITEMSIZES)}; got {self.dtype!r}")
        self._check_precision()
        machine.check_lnc(self.lnc)

    def _check_precision(self) -> None:
        is_text = isinstance(self.weight_dtype, str)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_text or not {*self.weight_dtypes} <= {"", *BY_DTYPE}:
            raise ValueError(
                f"weight_dtype must be one of {', '.join(BY_DTYPE)}, or empty for that of "
                f"x; got {self.weight_dtype!r}"
            )
        if self.compute not in COMPUTES:
            raise ValueError(f"compute must be one of {', '.join(COMPUTES)}; got {self.compute!r}")
        if self.compute not in (self.storage.computes if self.storage else COMPUTES[:1]):
            able = [each.dtype for each in BY_DTYPE.values() if self.compute in each.computes]
            raise ValueError(
                f"compute {self.compute} needs {' or '.join(able)} weights, "
                f"got {self.weight_dtype or self.dtype}; use compute x"
            )

    @property
    def weight_dtypes(self) -> list[str]:
        """`weight_dtype` of each of the weights."""
        names = self.weight_dtype.split(SEVERAL)
        return names if len(names) > 1 else names * len(self.matrices)

    @property
    def storage(self) -> WeightStorage | None:
        """Of the weights; None where they are of `dtype`, or of several."""
        return BY_DTYPE.get(self.weight_dtype)

    @property
    def machine(self) -> Machine:
        """Facts of the target."""
        return resolve_target(self.target)

    @property
    def K(self) -> int:  # noqa: N802 - the shape letter
        """Input features: what the first weight contracts, or those of an x that none does."""
        return self.matrices[0][0] if self.matrices else self.others[0][1][-1]

    @property
    def inputs(self) -> int:
        """Activations that the op is given: x, and those of `others` that have the tokens."""
        return 1 + len([shape for _, shape, _ in self.others if -1 in shape])

    @property
    def outputs(self) -> tuple[int, ...]:
        """Output features: of the last weight, or of the `OUTPUTS` that the op's folder names."""
        places = getattr(self._folder, "OUTPUTS", (-1,)) if self.matrices else ()
        return tuple([self.matrices[place][-1] for place in places])

    @property
    def _folder(self) -> ModuleType:
        return import_module(f"neuronmm_ops.kernels.{self.op}")

    @property
    def N(self) -> int:  # noqa: N802
        """Output features in all."""
        return sum(self.outputs)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the low-rank pairs, if the weights are pairs."""
        return tuple([columns for _, columns in self.matrices[:-1:2]])

    @property
    def inner(self) -> int:
        """Features between gate and down of a gated MLP: what its second weight makes, else 0."""
        later = self.matrices[1:]
        return later[0][-1] if len(self.outputs) == 1 and len(later) > 1 else 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element of x and the result."""
        return ITEMSIZES[self.dtype]

    @property
    def casts(self) -> bool:
        """Whether weights are cast on the chip, where a DMA may do so."""
        stored = self.storage
        if stored is None or stored.group is not None:
            return False
        return not (stored.is_multiplied and self.itemsize == 2)

    @property
    def doubles_rows(self) -> bool:
        """Whether prefill may multiply two rows of fp8 at a time: `double_row`."""
        return self.compute == "fp8" and self.machine.has("double_row")

    @cached_property
    def core_tokens(self) -> list[int]:
        """Tokens of each core in prefill."""
        return [core_span(self.M, core, self.lnc).size for core in range(self.lnc)]

    @cached_property
    def weight_elements(self) -> int:
        """Elements of all weights or factors."""
        return sum([math.prod(shape) for shape in self.matrices])

    @property
    def flops(self) -> int:
        """2 M for each weight."""
        return 2 * self.M * self.weight_elements

    @property
    def least_bytes(self) -> int:
        """Activations, the weights, their scales and the output, each moved once."""
        out = getattr(self._folder, "RESULT_BYTES", self.itemsize * self.N)
        features = self.K + sum([math.prod(s[1:]) for _, s, _ in self.others if -1 in s])
        activations = self.M * (self.itemsize * features + out)
        each = zip(self.matrices, self.weight_dtypes, strict=True)
        return activations + sum([matrix_bytes(s, self.itemsize, stored) for s, stored in each])

    @property
    def roofline_ms(self) -> float:
        """The longer of the matmuls at the calibrated efficiency and all bytes at the DMA peak.

        The efficiency is that of 512 moving columns: 512 / (512 + issue overhead in cycles). Rows
        of fp8 count half where they may be doubled.
        """
        machine = self.machine
        passes = 4.0 if self.dtype == "float32" else 1.0
        efficiency = BANK_COLUMNS / (BANK_COLUMNS + machine.matmul_overhead_cycles / passes)
        peak = machine.pe_peak_tflops * efficiency / passes * (2 if self.doubles_rows else 1)
        matmul_ns = self.flops / peak / 1e3
        return max(matmul_ns, self.least_bytes / machine.dma_peak_gbps) / self.lnc / 1e6


@dataclass(frozen=True)
class Plan:
    """How one problem runs. Times and traffic are those of its kernel on the simulated core.

    Attributes:
        problem: what it is for.
        phase: prefill (a block of tokens stays in SBUF, weights stream) or decode (weights stream
            once).
        kernel: name of the kernel in `neuronmm_ops.kernels`.
        blocks: the kernel's compile-time arguments, in order.
        time_ms: modelled under the first of `hardware.DMA_MODELS`, the sum over the launches.
        times_ms: the same under each of `hardware.DMA_MODELS`.
        regret: share by which it is slower than the quickest of those traced, in the model where
            it is most, or with serial column groups where these would hold decode up.
        hbm_bytes: HBM traffic, all cores and launches.
        sbuf_bytes: peak per partition.
        psum_banks: peak.
        bound: "PE" or "DMA", what is busy longest.
        instructions: that a compiler is given, all cores and launches.
        launches: tokens of each launch; more than one where a launch would be too long.
    """

    problem: Problem
    phase: Phase
    kernel: str
    blocks: tuple[tuple[str, Block], ...]
    time_ms: float
    hbm_bytes: int
    sbuf_bytes: int
    psum_banks: int
    bound: str
    instructions: int
    launches: tuple[int, ...]
    times_ms: tuple[float, ...] = ()
    regret: float = 0.0

    @property
    def time_low_ms(self) -> float:
        """The least of `times_ms`."""
        return min(self.times_ms)

    @property
    def time_high_ms(self) -> float:
        """The greatest of `times_ms`."""
        return max(self.times_ms)

    @property
    def arguments(self) -> dict[str, Block]:
        """The kernel's compile-time arguments by name."""
        return dict(self.blocks)
