"""The package's NKI kernels next to NeuronMM's published ones, on the simulated NeuronCore.

All times are modelled. A published kernel runs with the blocks that its authors published: at the
paper's shape its signature defaults, with which the traffic of the paper's plots agrees; at a
model's shape whichever is faster here of these defaults and the table that ships with the code,
which the number of tokens alone indexes. Below 128 tokens, and above 512 but for 1024, that table
loads rows of 256 bytes. What such DMAs cost is what the simulated core knows least, so every time
is given under each of its DMA models, and every speed-up is a range over them.
X U V alone has no table of its own; it runs with the one of the up and gate kernel, whose loop
nest is the same with two branches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.cases import figure1 as paper
from benchmarks.runner import run_all
from neuroncore import NkiValidationError
from neuroncore.hardware import resolve_target
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.estimate.baselines import neuronmm
from neuronmm_ops.estimate.ends import ENDS, ratios_of, spread, times_at
from neuronmm_ops.kernels.stages.tiling import PARTITIONS
from neuronmm_ops.models import SHAPES, ModelShape, resolve_shape
from neuronmm_ops.plan import Matrices, Problem, plan_problem
from neuronmm_ops.plan.launches import PlannedKernel, TensorShape, planned_kernels
from neuronmm_ops.rank import aligned_rank
from neuronmm_ops.storages import STORAGES, dtype_name

PAPER = "paper"
"""The shape of the paper's Figure 1 among the models' names."""
DTYPE = "bfloat16"
RATIO = 0.2
TOKENS = (1, 8, 64, 128, 512, 1024, 4096)
REGIMES = {"M <= 8": (1, 8), "8 < M < 1K": (9, 1023), "M >= 1K": (1024, 2**62)}
"""Numbers of tokens, first and last, that a summary takes together."""
COMPARED = (
    ("xuv", "neuronmm_published", "M >= 1K"),
    ("svd_mlp", "neuronmm_published_mlp", "M >= 1K"),
    ("svd_mlp", "neuronmm_published_mlp", "M <= 8"),
    *[
        (f"{op}_{storage}", op, regime)
        for storage in STORAGES
        for op in ("xuv", "svd_mlp")
        for regime in ("M <= 8", "M >= 1K")
    ],
    ("xuv_fp8_double_row", "xuv", "M >= 1K"),
    ("svd_mlp_fp8_double_row", "svd_mlp", "M >= 1K"),
)
"""The kernels and the regime of the speed-ups that a summary names, the faster first."""
FIELDS = (
    "kernel", "model", "target", "lnc", "M", "K", "r", "N", "dtype", "weight_dtype", "compute",
    "time_ms", "time_low_ms", "time_high_ms", "times_ms", "regret", "limit_ms", "limit_share",
    "limit_share_low", "bound", "hbm_bytes", "mfu", "sbuf_peak_bytes", "psum_peak_banks",
    "published_ms", "published_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class KernelChoice:
    """A kernel that computes a problem: the planned one, or one of NeuronMM's.

    Attributes:
        problem: what is computed; for a half of NeuronMM's MLP, the whole MLP.
        published: name of a kernel in `baselines.neuronmm`; "" is the planned kernel.
        blocks: of the published kernel.
    """

    problem: Problem
    published: str = ""
    blocks: neuronmm.Blocks | None = None


@dataclass(frozen=True)
class Entry:
    """What one row reports: launches that follow each other, each of its fastest candidate."""

    kernel: str
    model: str
    problem: Problem
    parts: tuple[tuple[KernelChoice, ...], ...]


class LaunchTimes(NamedTuple):
    """What launches take, under the names of the row's fields."""

    times_ms: tuple[float, ...]
    """At each of `ENDS`; what follows is at the first."""
    hbm_bytes: int
    sbuf_peak_bytes: int
    psum_peak_banks: int
    bound: str
    regret: float | None = None
    """Of a planned kernel: see `Plan.regret`."""


def run(
    models: Sequence[str] = (),
    tokens: Sequence[int] = (),
    *,
    target: str | None = None,
    lnc: int = 1,
    figure1: bool = False,
    storage: Sequence[str] = (),
    workers: int = 1,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Simulate the kernels in bfloat16 at the shapes of models, ratio 0.2, or at the paper's.

    Args:
        models: as `models.resolve_shape` takes them, or "paper"; default the paper's and all of the
            registry.
        tokens: values of M; default `TOKENS`, and the figure's own at the paper's shape.
        target: trn1, trn2 or trn3; None is trn1 for `figure1`, otherwise as
            `hardware.resolve_target`.
        lnc: NeuronCores that share a launch. The published kernels know one only: with 2 they
            are left out.
        figure1: the kernels of the paper's Figure 1 at its shape alone. The paper measured them on
            trn1: rows of another target have nothing published.
        storage: `fp8`, `int8`: also our kernels on factors of one byte, and of fp8 with
            activations in fp8 where TensorE then multiplies two rows at a time.
        workers: processes, if there is enough to do.
        progress: called with ("kernels", kernels done, kernels in all).

    Returns:
        One row a kernel and shape, with `FIELDS`. Times are modelled, but for `published_ms`, which
        like `published_bytes` the paper measured on trn1. `times_ms` has the time under each DMA
        model, `time_ms` under the first; a published kernel has its fastest blocks under each.
        `limit_ms` is the op's roofline bound (`Problem.roofline_ms`), `limit_share_low` its share
        of the greatest time, and `mfu` counts the op's FLOPs, not those of padding. An MLP's K and
        N are its hidden and intermediate sizes. Where a published kernel does not fit on the core,
        what would be modelled is None.

    Raises:
        ValueError: an unknown model, target or storage, or numbers out of range.
    """
    for name in storage:
        if name not in STORAGES:
            raise ValueError(f"storage must be of {', '.join(STORAGES)}; got {name!r}")
    if figure1 and target is None:
        target = paper.TARGET
    entries = _entries(_models(models, figure1), tuple(dict.fromkeys(tokens)), target, lnc)
    low_rank = [entry for entry in entries if entry.kernel in ("xuv", "svd_mlp")]
    for entry in low_rank:
        own = [stored for name in storage for stored in _in_one_byte(entry, name)]
        place = entries.index(entry) + 1
        entries[place:place] = own
    candidates = list(dict.fromkeys([part for e in entries for parts in e.parts for part in parts]))
    measured = run_all("kernels", measure, candidates, progress, workers)
    of_candidate = dict(zip(candidates, measured, strict=True))
    return [_row(entry, of_candidate) for entry in entries]


# --- what to run


def _models(names: Sequence[str], figure1: bool) -> dict[str, ModelShape | None]:
    """The shapes by their names; None for the paper's, which is of one projection."""
    if figure1 and any(name != PAPER for name in names):
        raise ValueError("figure 1 has one shape, the paper's; leave out the model")
    if figure1:
        return {PAPER: None}
    shapes = [None if name == PAPER else resolve_shape(name) for name in names]
    models = {shape.name if shape else PAPER: shape for shape in shapes}
    if len(models) < len(set(shapes)):
        raise ValueError(f"models must have names that differ, got {', '.join(names)}")
    return models or {PAPER: None, **SHAPES}


def _entries(
    models: Mapping[str, ModelShape | None],
    tokens: tuple[int, ...],
    target: str | None,
    lnc: int,
) -> list[Entry]:
    core = (resolve_target(target).target, lnc)
    entries: list[Entry] = []
    for model, shape in models.items():
        for M in tokens or (TOKENS if shape else paper.TOKENS):
            if shape is None:
                entries += _projection(PAPER, M, *paper.SIZES, *core)
                continue
            H, I = shape.hidden_size, shape.intermediate_size  # noqa: E741
            r = aligned_rank(H, I, RATIO)
            if r is None:
                raise ValueError(f"{model}: [{H}, {I}] stays dense at ratio {RATIO}")
            entries += _projection(model, M, H, r, I, *core)
            entries += _projection(model, M, I, r, H, *core)
            entries += _mlp(model, M, H, r, I, *core)
    return entries


def _projection(model: str, M: int, K: int, r: int, N: int, target: str, lnc: int) -> list[Entry]:
    """One Linear: dense, unfused at the paper's shape, NeuronMM's X U V on one core, ours."""

    def dense(K: int, N: int) -> Problem:
        return Problem("xw", M, ((K, N),), DTYPE, target, lnc)

    pair = Problem("xuv", M, ((K, r), (r, N)), DTYPE, target, lnc)
    entries = [Entry("xw", model, dense(K, N), ((KernelChoice(dense(K, N)),),))]
    if model == PAPER:
        halves = ((KernelChoice(dense(K, r)),), (KernelChoice(dense(r, N)),))
        entries.append(Entry("xuv_unfused", model, pair, halves))
    if lnc == 1:
        shipped = () if model == PAPER else (neuronmm.up_blocks(M),)
        part = _published(pair, "neuronmm_xuv", neuronmm.UP_DEFAULTS, *shipped)
        entries.append(Entry("neuronmm_published", model, pair, (part,)))
    return [*entries, Entry("xuv", model, pair, ((KernelChoice(pair),),))]


def _mlp(model: str, M: int, H: int, r: int, I: int, target: str, lnc: int) -> list[Entry]:  # noqa: E741
    """One MLP: ours in one launch, ours as three launches of X U V, NeuronMM's pair."""
    up, down = ((H, r), (r, I)), ((I, r), (r, H))
    mlp = Problem("svd_mlp", M, up + up + down, DTYPE, target, lnc)
    three = [
        (KernelChoice(Problem("xuv", M, pair, DTYPE, target, lnc)),) for pair in (up, up, down)
    ]
    entries = [
        Entry("svd_mlp", model, mlp, ((KernelChoice(mlp),),)),
        Entry("svd_mlp_3xuv", model, mlp, tuple(three)),
    ]
    if lnc == 1:
        parts = (
            _published(mlp, "neuronmm_mlp_up", neuronmm.up_blocks(M), neuronmm.UP_DEFAULTS),
            _published(mlp, "neuronmm_mlp_down", neuronmm.down_blocks(M), neuronmm.DOWN_DEFAULTS),
        )
        entries.append(Entry("neuronmm_published_mlp", model, mlp, parts))
    return entries


def _in_one_byte(entry: Entry, storage: str) -> list[Entry]:
    """The same with factors in one byte; of fp8 also with products in fp8, where they are faster.

    Decode ignores them, for it waits for bytes.
    """
    problem = replace(entry.problem, weight_dtype=dtype_name(storage) or "")
    problems = {f"{entry.kernel}_{storage}": problem}
    doubled = replace(problem, compute="fp8") if storage == "fp8" else problem
    if doubled.doubles_rows and problem.M > PARTITIONS:
        problems[f"{entry.kernel}_{storage}_double_row"] = doubled
    return [Entry(n, entry.model, own, ((KernelChoice(own),),)) for n, own in problems.items()]


def _published(problem: Problem, kernel: str, *blocks: neuronmm.Blocks) -> tuple[KernelChoice, ...]:
    """One published kernel with each of its blocks."""
    return tuple([KernelChoice(problem, kernel, choice) for choice in blocks])


# --- one kernel


def measure(candidate: KernelChoice) -> LaunchTimes | None:
    """Simulate a kernel without values; None where a published one does not fit.

    A plan of several launches is their sum.
    """
    problem = candidate.problem
    if candidate.blocks is not None:
        kernel, blocks = getattr(neuronmm, candidate.published), {"blocks": candidate.blocks}
        try:
            shapes = [TensorShape(shape, DTYPE) for shape in _published_shapes(candidate)]
            return _simulated(PlannedKernel(kernel, tuple(shapes), blocks), problem.target)
        except NkiValidationError:
            return None
    plan = plan_problem(problem)
    launches = planned_kernels(plan)
    of_tokens: dict[int, LaunchTimes] = {}
    for tokens, launch in dict(zip(plan.launches, launches, strict=True)).items():
        of_tokens[tokens] = _simulated(launch, problem.target)
    return _added([of_tokens[tokens] for tokens in plan.launches])._replace(regret=plan.regret)


def _simulated(launch: PlannedKernel, target: str) -> LaunchTimes:
    profile = launch.profile(target)
    fields = [getattr(profile, field) for field in LaunchTimes._fields[1:-1]]
    return LaunchTimes(times_at(profile), *fields)


def _published_shapes(candidate: KernelChoice) -> Matrices:
    """Shapes of the tensors of one of NeuronMM's kernels, in order."""
    problem, matrices = candidate.problem, candidate.problem.matrices
    if candidate.published == "neuronmm_mlp_up":
        return ((problem.M, problem.K), *matrices[:4])
    if candidate.published == "neuronmm_mlp_down":
        return ((problem.inner, problem.M), *matrices[4:])
    return ((problem.M, problem.K), *matrices)


def _added(launches: Sequence[LaunchTimes]) -> LaunchTimes:
    """Launches that follow each other: peaks of the largest, bound of the longest."""
    return LaunchTimes(
        times_ms=tuple([sum(times) for times in zip(*[m.times_ms for m in launches], strict=True)]),
        hbm_bytes=sum(launch.hbm_bytes for launch in launches),
        sbuf_peak_bytes=max(launch.sbuf_peak_bytes for launch in launches),
        psum_peak_banks=max(launch.psum_peak_banks for launch in launches),
        bound=max(launches).bound,
    )


# --- rows


def _row(entry: Entry, measured: dict[KernelChoice, LaunchTimes | None]) -> dict[str, Any]:
    problem = entry.problem
    row: dict[str, Any] = {field: getattr(problem, field, None) for field in FIELDS}
    row["kernel"], row["model"] = entry.kernel, entry.model
    row["r"] = problem.ranks[0] if problem.ranks else None
    row["N"] = problem.inner or problem.N
    row["limit_ms"] = problem.roofline_ms
    modelled = _fastest(entry, measured)
    if modelled is not None:
        peak_tflops = problem.machine.pe_peak_tflops * problem.lnc
        times = modelled.times_ms
        row |= modelled._asdict()
        low, high = spread(times)
        row["times_ms"] = dict(zip(ENDS, times, strict=True))
        row |= {"time_ms": times[0], "time_low_ms": low, "time_high_ms": high}
        row["limit_share"] = problem.roofline_ms / times[0]
        row["limit_share_low"] = problem.roofline_ms / high
        row["mfu"] = problem.flops / times[0] / 1e9 / peak_tflops
    if entry.model == PAPER and problem.target == paper.TARGET:
        readings = paper.READINGS.get(paper.KERNELS.get(entry.kernel, ""), {})
        reading = readings.get(problem.M, paper.Reading(None))
        row["published_ms"], row["published_bytes"] = reading.ms, reading.hbm_bytes
    return row


def _fastest(entry: Entry, measured: dict[KernelChoice, LaunchTimes | None]) -> LaunchTimes | None:
    """The fastest candidate of each part, added; None where none of a part fits.

    Its times are those of the fastest at each end.
    """
    quickest: list[LaunchTimes] = []
    for part in entry.parts:
        fitting = [m for m in (measured[candidate] for candidate in part) if m is not None]
        if not fitting:
            return None
        times = [min(times) for times in zip(*[m.times_ms for m in fitting], strict=True)]
        quickest.append(min(fitting)._replace(times_ms=tuple(times)))
    return _added(quickest) if len(quickest) > 1 else quickest[0]


# --- summaries


def speedup(rows: list[dict[str, Any]], ours: str, theirs: str, regime: str) -> dict[str, float]:
    """Geometric mean of their modelled time over ours at each end of what is not known.

    Over the shapes that have both; nothing where there are none.
    """
    of_rows = _ratios(rows, ours, theirs, regime)
    ends = of_rows[0] if of_rows else ()
    return {end: geometric_mean([ratios[end] for ratios in of_rows]) for end in ends}


def least_speedup(rows: list[dict[str, Any]], ours: str, theirs: str, regime: str) -> float:
    """The least of the shapes that `speedup` is the mean over, where all is against it.

    Raises:
        ValueError: no shape has both.
    """
    of_rows = _ratios(rows, ours, theirs, regime)
    return min([spread([*ratios.values()])[0] for ratios in of_rows])


def _ratios(
    rows: list[dict[str, Any]], ours: str, theirs: str, regime: str
) -> list[dict[str, float]]:
    """Their time over ours at each end, of each shape that has both."""
    times: dict[str, dict[tuple[Any, ...], dict[str, float]]] = {ours: {}, theirs: {}}
    for row in rows:
        if row["kernel"] in times and row["time_ms"] is not None and _within(row, regime):
            shape = (row["model"], row["M"], row["K"], row["N"])
            times[row["kernel"]][shape] = row["times_ms"]
    both = sorted(times[ours].keys() & times[theirs].keys())
    return [ratios_of(times[ours][shape], times[theirs][shape]) for shape in both]


def worst_shares(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The row with the smallest `limit_share_low` of each kernel and regime."""
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["limit_share_low"] or math.inf, reverse=True):
        for regime in REGIMES:
            if row["limit_share_low"] is not None and _within(row, regime):
                worst[row["kernel"], regime] = row
    return worst


def _within(row: dict[str, Any], regime: str) -> bool:
    first, last = REGIMES[regime]
    return first <= row["M"] <= last
