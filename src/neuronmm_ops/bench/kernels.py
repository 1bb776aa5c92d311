"""The package's NKI kernels beside NeuronMM's published ones, on the simulated NeuronCore.

All times are modelled. A published kernel runs with the blocks that its authors published: at the
paper's shape its signature defaults, with which the traffic of the paper's plots agrees; at a
model's shape whichever is faster here of these defaults and the table that ships with the code,
which the number of tokens alone indexes. Below 128 tokens, and above 512 but for 1024, that table
loads rows of 256 bytes, and what those cost on trn1 is what the DMA model knows least: no
comparison should rest on them.
X U V alone has no table of its own; it runs with the one of the up and gate kernel, whose loop
nest is the same with two branches.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from neuronmm_ops.bench import published, published_mlp
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.rank import aligned_rank
from neuronmm_ops.hardware import resolve_target
from neuronmm_ops.kernels import Plan, Problem, nki_kernel, plan_svd_mlp, plan_xuv, plan_xw
from neuronmm_ops.models import SHAPES, model_shape
from neuronmm_ops.neuroncore import NkiValidationError, Profile, TensorSpec, simulate
from neuronmm_ops.neuroncore.dtypes import bfloat16

PAPER = "paper"
"""The shape of the paper's Figure 1 among the models' names."""
_PAPER_SIZES = (8192, 4096, 16384)
DTYPE = "bfloat16"
RATIO = 0.2
TOKENS = (1, 8, 64, 128, 512, 1024, 4096)
FIGURE1_TOKENS = tuple(published.FIGURE1["NeuronMM"])
REGIMES = {"M <= 8": (1, 8), "8 < M < 1K": (9, 1023), "M >= 1K": (1024, 2**62)}
"""Numbers of tokens, first and last, that a summary takes together."""
COMPARED = (
    ("xuv", "neuronmm_published", "M >= 1K"),
    ("svd_mlp", "neuronmm_published_mlp", "M >= 1K"),
    ("svd_mlp", "neuronmm_published_mlp", "M <= 8"),
)
"""Ours, theirs and the regime of the speed-ups that a summary names."""

_PUBLISHED_NAMES = {
    "xw": "NKI XW",
    "xuv_unfused": "NKI XUV",
    "neuronmm_published": "NeuronMM",
}
_POOLED_FROM = 24  # launches; below it, starting a process takes longer than they do


@dataclass(frozen=True)
class Run:
    """One simulated launch: a kernel at x [M, K], rank r and N outputs.

    An MLP has K hidden and N intermediate features. `blocks` are a published kernel's.
    """

    kernel: str
    M: int
    K: int
    r: int
    N: int
    target: str
    lnc: int = 1
    blocks: published_mlp.Blocks | None = None


@dataclass(frozen=True)
class Entry:
    """One row to be: launches that follow each other, each the fastest of its alternatives."""

    kernel: str
    model: str
    problem: Problem
    r: int | None
    N: int
    parts: tuple[tuple[Run, ...], ...]


class Measured(NamedTuple):
    """What one launch takes."""

    time_ms: float
    hbm_bytes: int
    sbuf_peak_bytes: int
    psum_peak_banks: int
    bound: str


def run(
    models: Sequence[str] = (),
    tokens: Sequence[int] = (),
    *,
    target: str | None = None,
    lnc: int = 1,
    figure1: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Simulate the kernels in bfloat16 at the shapes of models, ratio 0.2, or at the paper's.

    Args:
        models: names of model shapes, or "paper"; default the paper's and all of the registry.
        tokens: values of M; default `TOKENS`, and `FIGURE1_TOKENS` at the paper's shape.
        target: trn1, trn2 or trn3.
        lnc: NeuronCores that share a launch. The published kernels know one only: with 2 they
            are left out.
        figure1: the kernels of the paper's Figure 1 at its shape alone.
        workers: processes, if there is enough to do.
        progress: called with ("kernels", launches done, launches in all).

    Returns:
        One row a kernel and shape: `kernel`, `model`, `target`, `lnc`, `M`, `K`, `r`, `N`,
        `dtype`, `time_ms`, `limit_ms`, `limit_share`, `bound`, `hbm_bytes`, `mfu`,
        `sbuf_peak_bytes`, `psum_peak_banks`, `published_ms`, `published_bytes`. Times are
        modelled, but for `published_ms`, which like `published_bytes` the paper measured on
        trn1. `limit_ms` is the op's own (`Problem.roofline_ms`), and `mfu` counts the op's FLOPs,
        not those of padding. An MLP's K and N are its hidden and intermediate sizes. Where a
        published kernel does not fit on the core, what would be modelled is None.

    Raises:
        ValueError: an unknown model or target, or numbers out of range.
    """
    entries = _entries(_models(models, figure1), _tokens(tokens), target, lnc)
    runs = list(dict.fromkeys([run for e in entries for part in e.parts for run in part]))
    measured: dict[Run, Measured | None] = {}
    for done, outcome in enumerate(_outcomes(runs, workers)):
        measured[runs[done]] = outcome
        if progress is not None:
            progress("kernels", done + 1, len(runs))
    return [_row(entry, measured) for entry in entries]


# --- what to run


def _models(names: Sequence[str], figure1: bool) -> list[str]:
    if figure1 and any(name != PAPER for name in names):
        raise ValueError("figure 1 has one shape, the paper's; leave out the model")
    if figure1:
        return [PAPER]
    found = [PAPER if name == PAPER else model_shape(name).name for name in names]
    return list(dict.fromkeys(found)) or [PAPER, *SHAPES]


def _tokens(tokens: Sequence[int]) -> list[int]:
    if any(M < 1 for M in tokens):
        raise ValueError(f"tokens must be at least 1, got {min(tokens)}")
    return list(dict.fromkeys(tokens))


def _entries(models: list[str], tokens: list[int], target: str | None, lnc: int) -> list[Entry]:
    target = resolve_target(target).target
    entries: list[Entry] = []
    for model in models:
        for M in tokens or (FIGURE1_TOKENS if model == PAPER else TOKENS):
            if model == PAPER:
                entries += _projection(PAPER, M, *_PAPER_SIZES, target, lnc)
                continue
            shape = SHAPES[model]
            H, I = shape.hidden_size, shape.intermediate_size  # noqa: E741
            r = aligned_rank(H, I, RATIO)
            assert r is not None, f"{model} would be dense at ratio {RATIO}"
            entries += _projection(model, M, H, r, I, target, lnc)
            entries += _projection(model, M, I, r, H, target, lnc)
            entries += _mlp(model, M, H, r, I, target, lnc)
    return entries


def _projection(model: str, M: int, K: int, r: int, N: int, target: str, lnc: int) -> list[Entry]:
    """One Linear: dense, unfused at the paper's shape, NeuronMM's X U V on one core, ours."""

    def entry(kernel: str, op: str, *parts: tuple[Run, ...]) -> Entry:
        matrices = ((K, N),) if op == "xw" else ((K, r), (r, N))
        problem = Problem(op, M, matrices, DTYPE, target, lnc)
        return Entry(kernel, model, problem, None if op == "xw" else r, N, parts)

    found = [entry("xw", "xw", (Run("xw", M, K, 0, N, target, lnc),))]
    if model == PAPER:
        halves = [(Run("xw", M, a, 0, b, target, lnc),) for a, b in ((K, r), (r, N))]
        found.append(entry("xuv_unfused", "xuv", *halves))
    if lnc == 1:
        blocks = {published_mlp.UP_DEFAULTS: None}
        if model != PAPER:
            blocks[published_mlp.up_blocks(M)] = None
        part = tuple([Run("neuronmm_xuv", M, K, r, N, target, 1, b) for b in blocks])
        found.append(entry("neuronmm_published", "xuv", part))
    return [*found, entry("xuv", "xuv", (Run("xuv", M, K, r, N, target, lnc),))]


def _mlp(model: str, M: int, H: int, r: int, I: int, target: str, lnc: int) -> list[Entry]:  # noqa: E741
    """One MLP: ours in one launch, ours as three launches of X U V, NeuronMM's pair."""
    problem = Problem("svd_mlp", M, (*[(H, r), (r, I)] * 2, (I, r), (r, H)), DTYPE, target, lnc)

    def entry(kernel: str, *parts: tuple[Run, ...]) -> Entry:
        return Entry(kernel, model, problem, r, I, parts)

    up, down = Run("xuv", M, H, r, I, target, lnc), Run("xuv", M, I, r, H, target, lnc)
    found = [
        entry("svd_mlp", (Run("svd_mlp", M, H, r, I, target, lnc),)),
        entry("svd_mlp_3xuv", (up,), (up,), (down,)),
    ]
    if lnc == 2:
        return found
    choices = {
        "neuronmm_mlp_up": (published_mlp.up_blocks(M), published_mlp.UP_DEFAULTS),
        "neuronmm_mlp_down": (published_mlp.down_blocks(M), published_mlp.DOWN_DEFAULTS),
    }
    pair = [
        tuple([Run(kernel, M, H, r, I, target, 1, b) for b in blocks])
        for kernel, blocks in choices.items()
    ]
    return [*found, entry("neuronmm_published_mlp", *pair)]


# --- how it is run


def _outcomes(runs: list[Run], workers: int) -> Iterator[Measured | None]:
    """What each launch takes, in order."""
    if workers == 1 or len(runs) < _POOLED_FROM:
        yield from map(measure, runs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_follow_parent) as pool:
        yield from pool.map(measure, runs)


def _follow_parent() -> None:
    """An interrupt ends the parent alone, which ends its workers; killed, it takes them along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def measure(run: Run) -> Measured | None:
    """Simulate one launch without values; None where a published kernel does not fit."""
    if run.blocks is not None:
        kernel = getattr(published_mlp, run.kernel)
        try:
            profile = _simulated(kernel, run, run.blocks._asdict())
        except NkiValidationError:
            return None
    else:
        plan = _plan(run)
        profile = _simulated(nki_kernel(plan), run, plan.arguments)
    return Measured(
        profile.time_ms,
        profile.hbm_bytes,
        profile.sbuf_peak_bytes,
        profile.psum_peak_banks,
        profile.bound,
    )


def _simulated(kernel: Any, run: Run, arguments: dict[str, Any]) -> Profile:
    operands = [TensorSpec(shape, bfloat16) for shape in _shapes(run)]
    return simulate(kernel, *operands, target=run.target, mode="trace", **arguments).profile


def _plan(run: Run) -> Plan:
    M, K, r, N, options = run.M, run.K, run.r, run.N, (DTYPE, run.target, run.lnc)
    if run.kernel == "xw":
        return plan_xw(M, K, N, *options)
    if run.kernel == "xuv":
        return plan_xuv(M, K, r, N, *options)
    return plan_svd_mlp(M, K, (r, r, r), N, K, *options)


def _shapes(run: Run) -> list[tuple[int, int]]:
    """Shapes of a kernel's tensors, in order."""
    M, K, r, N = run.M, run.K, run.r, run.N
    up, down = [(K, r), (r, N)], [(N, r), (r, K)]
    shapes = {
        "xw": [(M, K), (K, N)],
        "svd_mlp": [(M, K), *up, *up, *down],
        "neuronmm_mlp_up": [(M, K), *up, *up],
        "neuronmm_mlp_down": [(N, M), *down],
    }
    return shapes.get(run.kernel, [(M, K), *up])


# --- rows


def _row(entry: Entry, measured: dict[Run, Measured | None]) -> dict[str, Any]:
    problem = entry.problem
    row: dict[str, Any] = {
        "kernel": entry.kernel,
        "model": entry.model,
        "target": problem.target,
        "lnc": problem.lnc,
        "M": problem.M,
        "K": problem.K,
        "r": entry.r,
        "N": entry.N,
        "dtype": problem.dtype,
        "time_ms": None,
        "limit_ms": problem.roofline_ms,
        "limit_share": None,
        "bound": None,
        "hbm_bytes": None,
        "mfu": None,
        "sbuf_peak_bytes": None,
        "psum_peak_banks": None,
    }
    row.update(_modelled(problem, _fastest(entry, measured)))
    reading = _reading(entry)
    row["published_ms"] = reading.ms
    row["published_bytes"] = reading.hbm_bytes
    return row


def _fastest(entry: Entry, measured: dict[Run, Measured | None]) -> list[Measured] | None:
    """Of each part the fastest alternative that fits; None where none does."""
    found: list[Measured] = []
    for part in entry.parts:
        fitting = [m for m in (measured[run] for run in part) if m is not None]
        if not fitting:
            return None
        found.append(min(fitting))
    return found


def _modelled(problem: Problem, parts: list[Measured] | None) -> dict[str, Any]:
    """Times and bytes of the parts added, peaks of the largest, bound of the longest."""
    if parts is None:
        return {}
    time_ms = sum(part.time_ms for part in parts)
    peak_tflops = problem.machine.pe_peak_tflops * problem.lnc
    return {
        "time_ms": time_ms,
        "limit_share": problem.roofline_ms / time_ms,
        "bound": max(parts).bound,
        "hbm_bytes": sum(part.hbm_bytes for part in parts),
        "mfu": problem.flops / time_ms / 1e9 / peak_tflops,
        "sbuf_peak_bytes": max(part.sbuf_peak_bytes for part in parts),
        "psum_peak_banks": max(part.psum_peak_banks for part in parts),
    }


def _reading(entry: Entry) -> published.Reading:
    """What the paper measured with this kernel, on one core of trn1."""
    problem = entry.problem
    measured = published.FIGURE1.get(_PUBLISHED_NAMES.get(entry.kernel, ""), {})
    if entry.model != PAPER or problem.target != "trn1":
        return published.Reading(None)
    return measured.get(problem.M, published.Reading(None))


# --- what rows say together


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean of positive numbers; None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def speedup(rows: list[dict[str, Any]], ours: str, theirs: str, regime: str) -> float | None:
    """Geometric mean of their modelled time over ours, over the shapes that have both."""
    times: dict[str, dict[tuple[Any, ...], float]] = {ours: {}, theirs: {}}
    for row in rows:
        if row["kernel"] in times and row["time_ms"] is not None and _within(row, regime):
            shape = (row["model"], row["M"], row["K"], row["N"])
            times[row["kernel"]][shape] = row["time_ms"]
    both = times[ours].keys() & times[theirs].keys()
    return geometric_mean(times[theirs][shape] / times[ours][shape] for shape in sorted(both))


def worst_shares(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The row with the smallest `limit_share` of each kernel and regime."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["limit_share"] is None:
            continue
        for regime in REGIMES:
            key = (row["kernel"], regime)
            if _within(row, regime) and (
                key not in found or row["limit_share"] < found[key]["limit_share"]
            ):
                found[key] = row
    return found


def _within(row: dict[str, Any], regime: str) -> bool:
    first, last = REGIMES[regime]
    return first <= row["M"] <= last
