"""Every published measurement that the simulated core can be held against, beside its prediction.

The two rows marked `calibration` fixed the issue overhead of a matmul; all others are predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from neuronmm_ops.bench import published_kernels as kernels
from neuronmm_ops.bench import published_mlp
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.neuroncore import NkiValidationError, Profile, TensorSpec, simulate
from neuronmm_ops.neuroncore.dtypes import DType, bfloat16, float32

TUTORIAL = "AWS matmul tutorial, SDK 2.26"
GUIDE = "AWS kernel optimization guide, SDK 2.32"
AUTOTUNE = "awslabs/nki-autotune, kernel_library"
NEURONMM = "arXiv 2510.25977, Figure 1, read off the plot"
GIB = 1024**3


class Reading(NamedTuple):
    """What the figure shows at one number of tokens; None where another marker hides it."""

    ms: float | None
    gib: float | None = None

    @property
    def hbm_bytes(self) -> int | None:
        """The traffic in bytes."""
        return None if self.gib is None else round(self.gib * GIB)


FIGURE1: dict[str, dict[int, Reading]] = {
    "NeuronMM": {
        1024: Reading(2.8, 0.23),
        2048: Reading(5.3, 0.5),
        4096: Reading(10.5, 0.98),
        8192: Reading(21.2, 1.90),
        16384: Reading(42.1, 3.80),
        32768: Reading(84.15, 7.49),
    },
    "NKI XUV": {
        2048: Reading(7.0),
        4096: Reading(14.0),
        8192: Reading(26.0, 3.5),
        16384: Reading(56.5, 9.6),
        32768: Reading(117.2, 22.4),
    },
    "NKI XW": {
        1024: Reading(None, 0.7),
        2048: Reading(None, 1.15),
        4096: Reading(16.3, 2.0),
        8192: Reading(43.9, 4.3),
        16384: Reading(89.0, 15.6),
        32768: Reading(186.60, 35.8),
    },
}
"""The paper's fused, unfused and dense kernels by tokens (`NEURONMM`): K = 8192, r = 4096,
N = 16384, bf16, one core of trn1. At 32K, fused and dense times are in the text, not read off."""


@dataclass(frozen=True)
class Case:
    """One published figure and the run that predicts it.

    `engine` names the busy share, or "MFU", that was published instead of a time.
    """

    name: str
    target: str
    kernel: Any
    arguments: tuple[Any, ...]
    source: str
    published_ms: float | None = None
    published_bytes: int | None = None
    engine: str | None = None
    published_share: float | None = None
    calibration: bool = False


def _matrix(rows: int, columns: int, dtype: DType = bfloat16) -> TensorSpec:
    return TensorSpec((rows, columns), dtype)


def _tutorial(dtype: DType = bfloat16) -> tuple[TensorSpec, TensorSpec]:
    return _matrix(8192, 4096, dtype), _matrix(8192, 8192, dtype)


def cases() -> list[Case]:
    """All published figures, calibration first."""
    square = (_matrix(2048, 2048), _matrix(2048, 2048))
    shape = "[4096,8192]@[8192,8192] bf16"
    found = [
        Case(
            f"matmul, blocked M,N,K {shape}", "trn1", kernels.tutorial_blocked_k, _tutorial(),
            TUTORIAL, 6.97, calibration=True,
        ),
        Case(
            "lhs@rhs, hand-tuned 2048^3 bf16", "trn2", kernels.autotune_lhs_rhs, square,
            AUTOTUNE, 0.2442, calibration=True,
        ),
        Case(
            f"matmul, tiled {shape}", "trn1", kernels.tutorial_tiled, _tutorial(), TUTORIAL, 51.80,
        ),
        Case(
            f"matmul, hoisted loads {shape}", "trn1", kernels.tutorial_hoisted, _tutorial(),
            TUTORIAL, 42.96,
        ),
        Case(
            f"matmul, blocked M,N {shape}", "trn1", kernels.tutorial_blocked, _tutorial(),
            TUTORIAL, 22.07,
        ),
        Case(
            "lhsT@rhs, hand-tuned 2048^3 bf16: MFU", "trn2", kernels.autotune_transposed_lhs,
            square, AUTOTUNE, engine="MFU", published_share=0.9092,
        ),
    ]  # fmt: skip
    return found + _neuronmm() + _guide()


def _neuronmm() -> list[Case]:
    """The fused kernel and the unfused pair at K = 8192, r = 4096, N = 16384."""
    u, v = _matrix(8192, 4096), _matrix(4096, 16384)

    def case(name: str, kernel: Any, tokens: int, reading: Reading) -> Case:
        return Case(
            f"{name} X U V, M={tokens // 1024}K", "trn1", kernel, (_matrix(tokens, 8192), u, v),
            NEURONMM, reading.ms, reading.hbm_bytes,
        )  # fmt: skip

    fused, unfused = FIGURE1["NeuronMM"], FIGURE1["NKI XUV"]
    return [
        case("NeuronMM", published_mlp.neuronmm_xuv, tokens, fused[tokens]) for tokens in fused
    ] + [
        # above, all outputs of the unfused kernel do not fit in SBUF
        case("unfused", kernels.unfused_xuv, tokens, unfused[tokens])
        for tokens in (2048, 4096)
    ]


def _guide() -> list[Case]:
    """Active shares of the optimisation guide, fp32, trn2."""
    shares: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, float]]] = [
        ("tiled", kernels.tutorial_tiled, (), {"DMA": 0.9993, "TensorE": 0.8728}),
        ("hoisted", kernels.tutorial_hoisted, (), {"DMA": 0.9973, "TensorE": 0.9985}),
        ("blocked M,N", kernels.tutorial_blocked, (), {"DMA": 0.9570, "TensorE": 0.9952}),
        (
            "blocked M,N,K (8,2,8)",
            kernels.tutorial_blocked_k,
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


def run(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Predict every published figure under both cost models; a minute on one core.

    Args:
        progress: called with ("published", figures done, figures in all).

    Returns:
        One row a figure: `name`, `target`, `published_ms`, `modelled_ms` (calibrated),
        `documented_ms`, `error` (relative, of the calibrated model), `calibration`,
        `published_bytes`, `modelled_bytes`, `source`, and where a busy share was published instead
        of a time, `engine`, `published_share` and `modelled_share`. `refused` says why a kernel
        does not run here; its numbers are then None.
    """
    rows: list[dict[str, Any]] = []
    found = cases()
    last: tuple[Any, ...] = ()
    outcome: Profile | str = ""
    for done, case in enumerate(found):
        if progress is not None:
            progress("published", done, len(found))
        simulated = (case.kernel, case.arguments, case.target)
        if simulated != last:  # several shares come from one run
            last = simulated
            outcome = _simulated(case)
        rows.append(_row(case, outcome))
    return rows


def _simulated(case: Case) -> Profile | str:
    """The profile of a case, or why the simulated core refuses it."""
    try:
        return simulate(case.kernel, *case.arguments, target=case.target, mode="trace").profile
    except NkiValidationError as error:
        return str(error).partition(";")[0]


def _row(case: Case, outcome: Profile | str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": case.name,
        "target": case.target,
        "published_ms": case.published_ms,
        "modelled_ms": None,
        "documented_ms": None,
        "error": None,
        "calibration": case.calibration,
        "published_bytes": case.published_bytes,
        "modelled_bytes": None,
        "source": case.source,
        "engine": case.engine,
        "published_share": case.published_share,
        "modelled_share": None,
        "refused": None,
    }
    if isinstance(outcome, str):
        return row | {"refused": outcome}
    row["modelled_ms"] = outcome.time_ms
    row["documented_ms"] = outcome.documented_ms
    row["modelled_bytes"] = outcome.hbm_bytes
    if case.published_ms is not None:
        row["error"] = outcome.time_ms / case.published_ms - 1
    if case.published_share is not None:
        share = _share(outcome, case.engine)
        row["modelled_share"] = share
        row["error"] = share / case.published_share - 1
    return row


def _share(profile: Profile, engine: str | None) -> float:
    """Busy share of an engine, or "MFU"."""
    if engine == "MFU":
        return profile.mfu
    (core,) = profile.engines
    return next(use.share for use in core if use.engine == engine)


def mean_error(rows: list[dict[str, Any]]) -> float:
    """Mean absolute relative error of the times that were predicted, not fitted."""
    times = [r for r in rows if r["published_ms"] and not r["calibration"]]
    return sum([abs(r["error"]) for r in times]) / len(times)
