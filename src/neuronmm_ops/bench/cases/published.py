"""Every published measurement that the simulated core can be held against, and its run.

The two cases marked `calibration` fixed the issue overhead of a matmul; all others are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm_ops.bench.baselines import matmul, neuronmm
from neuronmm_ops.bench.cases import figure1
from neuronmm_ops.neuroncore import Kernel, TensorSpec
from neuronmm_ops.neuroncore.dtypes import DType, bfloat16, float32

TUTORIAL = "AWS matmul tutorial, SDK 2.26"
GUIDE = "AWS kernel optimization guide, SDK 2.32"
AUTOTUNE = "awslabs/nki-autotune, kernel_library"


@dataclass(frozen=True)
class Case:
    """One published figure and the run that predicts it.

    Attributes:
        name: what was measured.
        target: on which core.
        kernel: rewritten in `baselines`.
        arguments: its operands, and its blocks.
        source: where the figure was published.
        published_ms: the time.
        published_bytes: the HBM traffic.
        engine: the engine whose busy share, or "MFU", was published instead of a time.
        published_share: that share.
        calibration: the figure fixed the issue overhead of a matmul.
    """

    name: str
    target: str
    kernel: Kernel
    arguments: tuple[Any, ...]
    source: str
    published_ms: float | None = None
    published_bytes: int | None = None
    engine: str | None = None
    published_share: float | None = None
    calibration: bool = False


def cases() -> list[Case]:
    """All published figures, calibration first."""
    return [*_calibration(), *_matmuls(), *_neuronmm(), *_guide()]


def _matrix(rows: int, columns: int, dtype: DType = bfloat16) -> TensorSpec:
    return TensorSpec((rows, columns), dtype)


def _tutorial(dtype: DType = bfloat16) -> tuple[TensorSpec, TensorSpec]:
    return _matrix(8192, 4096, dtype), _matrix(8192, 8192, dtype)


_SHAPE = "[4096,8192]@[8192,8192] bf16"
_SQUARE = (_matrix(2048, 2048), _matrix(2048, 2048))


def _calibration() -> list[Case]:
    return [
        Case(
            f"matmul, blocked M,N,K {_SHAPE}", "trn1", matmul.tutorial_blocked_k, _tutorial(),
            TUTORIAL, 6.97, calibration=True,
        ),
        Case(
            "lhs@rhs, hand-tuned 2048^3 bf16", "trn2", matmul.autotune_lhs_rhs, _SQUARE,
            AUTOTUNE, 0.2442, calibration=True,
        ),
    ]  # fmt: skip


def _matmuls() -> list[Case]:
    steps = (
        ("tiled", matmul.tutorial_tiled, 51.80),
        ("hoisted loads", matmul.tutorial_hoisted, 42.96),
        ("blocked M,N", matmul.tutorial_blocked, 22.07),
    )
    found = [
        Case(f"matmul, {name} {_SHAPE}", "trn1", kernel, _tutorial(), TUTORIAL, ms)
        for name, kernel, ms in steps
    ]
    hand_tuned = Case(
        "lhsT@rhs, hand-tuned 2048^3 bf16: MFU", "trn2", matmul.autotune_transposed_lhs, _SQUARE,
        AUTOTUNE, engine="MFU", published_share=0.9092,
    )  # fmt: skip
    return [*found, hand_tuned]


def _neuronmm() -> list[Case]:
    """The fused kernel and the unfused pair at the shape of the paper's Figure 1."""
    K, r, N = figure1.SIZES
    fused, unfused = figure1.READINGS["NeuronMM"], figure1.READINGS["NKI XUV"]
    runs = [("NeuronMM", neuronmm.neuronmm_xuv, M, fused[M]) for M in fused]
    # From 8K tokens on, the outputs of the unfused kernel do not fit in SBUF.
    runs += [("unfused", matmul.unfused_xuv, M, unfused[M]) for M in (2048, 4096)]
    return [
        Case(
            f"{name} X U V, M={M // 1024}K", figure1.TARGET, kernel,
            (_matrix(M, K), _matrix(K, r), _matrix(r, N)),
            figure1.SOURCE, reading.ms, reading.hbm_bytes,
        )
        for name, kernel, M, reading in runs
    ]  # fmt: skip


def _guide() -> list[Case]:
    """Busy shares of the optimization guide, fp32, trn2."""
    shares: list[tuple[str, Kernel, tuple[int, ...], dict[str, float]]] = [
        ("tiled", matmul.tutorial_tiled, (), {"DMA": 0.9993, "TensorE": 0.8728}),
        ("hoisted", matmul.tutorial_hoisted, (), {"DMA": 0.9973, "TensorE": 0.9985}),
        ("blocked M,N", matmul.tutorial_blocked, (), {"DMA": 0.9570, "TensorE": 0.9952}),
        (
            "blocked M,N,K (8,2,8)",
            matmul.tutorial_blocked_k,
            (8, 2, 8),
            {"DMA": 0.2154, "TensorE": 0.9950, "VectorE": 0.1055},
        ),
    ]
    return [
        Case(
            f"guide, {name} fp32: {engine} active", "trn2", kernel, (*_tutorial(float32), *blocks),
            GUIDE, engine=engine, published_share=share,
        )
        for name, kernel, blocks, engines in shares
        for engine, share in engines.items()
    ]  # fmt: skip
