"""Published figures of NKI kernels next to what the simulated core predicts, and its score."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple, get_args

from benchmarks.cases import end_to_end, published
from benchmarks.runner import run_all
from neuroncore import NkiValidationError, Profile, simulate
from neuroncore.hardware import DMA_MODELS, DmaModel, Engine
from neuroncore.profile.metrics import active_ns
from neuronmm_ops.compress.calibrate import Progress

FIELDS = (
    "name", "fact", "target", "measure", "engine", "group", "naive", "source",
    "published_ms", "modelled_ms", "range_ms", "documented_ms", "published_share", "modelled_share",
    "error", "errors", "published_bytes", "modelled_bytes", "launches", "launch_us", "refused",
)  # fmt: skip
ENGINES = {"TensorE": Engine.TENSOR, "VectorE": Engine.VECTOR, "DMA": Engine.DMA}
"""Engines of which a published share is active."""


def run(progress: Progress | None = None, workers: int = 1) -> list[dict[str, Any]]:
    """Predict every published figure under every DMA model; five minutes on one core.

    Args:
        progress: called with ("published", launches done, launches in all).
        workers: processes.

    Returns:
        One row a figure, with `FIELDS`. `modelled_ms` or `modelled_share` is under the first DMA
        model, and so is `error` (relative); `errors` has every model's by name. `group` says what
        the figure was to the model, as `Evidence` of `cases`; times that were held out have their
        `range_ms` over all that is not known. `documented_ms` leaves the fitted issue of matmuls
        out. `measure` says what is compared; of a "bound", `modelled_ms` must not exceed what was
        published, and there is no error: `launch_us` is what is missing by each of its `launches`.
        `refused` says why a kernel does not run here; its numbers are None.
    """
    cases = published.cases()
    # several figures are published of one run, its time first
    launches: dict[tuple[Any, ...], tuple[int, DmaModel]] = {}
    for (number, case), model in product(enumerate(cases), DMA_MODELS):
        launches.setdefault((case.kernel, case.arguments, case.target, model), (number, model))
    outcomes = run_all("published", _simulated, list(launches.values()), progress, workers)
    of_launch = dict(zip(launches, outcomes, strict=True))
    rows: list[dict[str, Any]] = []
    for case in cases:
        launch = (case.kernel, case.arguments, case.target)
        rows.append(_row(case, {model: of_launch[*launch, model] for model in DMA_MODELS}))
    return [*rows, *map(_bound, end_to_end.served())]


class Score(NamedTuple):
    """How far off the figures of a group are under one DMA model."""

    group: published.Group
    model: DmaModel
    figures: int
    facts: int
    mean: float
    """Absolute relative error, the mean of the facts' means."""
    worst: float
    """Relative error of the figure where it is largest."""


def scores(rows: list[dict[str, Any]]) -> list[Score]:
    """The score of each group under each DMA model, of the rows of `run`."""
    scored: list[Score] = []
    for group, model in product(get_args(published.Group), DMA_MODELS):
        of_fact = defaultdict[str, list[float]](list)
        for row in rows:
            if row["error"] is not None and row["group"] == group:
                of_fact[row["fact"]].append(row["errors"][model])
        if of_fact:
            means = [fmean(map(abs, errors)) for errors in of_fact.values()]
            errors = [error for of_one in of_fact.values() for error in of_one]
            worst = max(errors, key=abs)
            scored.append(Score(group, model, len(errors), len(means), fmean(means), worst))
    return scored


def _simulated(launch: tuple[int, DmaModel]) -> dict[str, float] | str:
    """What the profile of a case, by its number, says by measure, or why the core refuses it."""
    number, model = launch
    case = published.cases()[number]
    try:
        simulation = simulate(
            case.kernel, *case.arguments, target=case.target, mode="trace", dma_model=model
        )
    except NkiValidationError as error:
        return str(error).partition(";")[0]
    profile: Profile = simulation.profile
    measures: dict[str, float] = {}
    for name, engine in ENGINES.items():
        measures[f"active {name}, share"] = share = _active(profile, engine)
        measures[f"active {name}"] = share * profile.time_ms
    measures |= {"time": profile.time_ms, "MFU": profile.mfu, "bytes": float(profile.hbm_bytes)}
    if model == DMA_MODELS[0]:
        measures["documented"] = profile.documented_ms
        if case.group == "held out":
            measures["low"], measures["high"] = profile.time_range_ms
    return measures | _single(profile)


def _active(profile: Profile, engine: Engine) -> float:
    """Share of the time that a profiler shows an engine active."""
    (core,) = profile.schedule.cores
    return min(1.0, active_ns(core, engine) / profile.schedule.time_ns)


def _single(profile: Profile) -> dict[str, float]:
    """Times of single instructions: the first DMA and the last activation."""
    (core,) = profile.schedule.cores
    engines = [template.engine for template, *_ in core.trace.records]
    measures: dict[str, float] = {}
    if Engine.DMA in engines:
        first = engines.index(Engine.DMA)
        measures["transfer"] = (core.end[first] - core.start[first]) / 1e6
        measures["trigger to done"] = core.end[first] / 1e6
    scalar = [i for i, engine in enumerate(engines) if engine is Engine.SCALAR]
    if scalar:
        latency = profile.machine.result_ns[Engine.SCALAR]
        measures["instruction"] = (core.end[scalar[-1]] - core.start[scalar[-1]] + latency) / 1e6
    if len(scalar) > 1:
        measures["interval"] = (core.start[scalar[-1]] - core.start[scalar[-2]]) / 1e6
    return measures


def _row(
    case: published.Evidence, outcomes: dict[DmaModel, dict[str, float] | str]
) -> dict[str, Any]:
    row: dict[str, Any] = {field: getattr(case, field, None) for field in FIELDS}
    values: dict[DmaModel, dict[str, float]] = {}
    for model, outcome in outcomes.items():
        if isinstance(outcome, str):
            return row | {"refused": outcome}
        values[model] = outcome
    first = values[DMA_MODELS[0]]
    measure = f"active {case.engine}" if case.engine else case.measure
    as_share = case.published_share is not None
    if case.engine and as_share:
        measure += ", share"
    row["modelled_share" if as_share else "modelled_ms"] = first[measure]
    row["documented_ms"] = first["documented"] if measure == "time" else None
    if measure == "time" and "low" in first:
        row["range_ms"] = [first["low"], first["high"]]
    row["modelled_bytes"] = round(first["bytes"]) if measure == "time" else None
    figure = case.published_share or case.published_ms
    assert figure is not None, case
    row["errors"] = {model: measures[measure] / figure - 1 for model, measures in values.items()}
    return row | {"error": row["errors"][DMA_MODELS[0]]}


def _bound(served: end_to_end.Served) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(FIELDS)
    modelled = served.modelled()
    rest_ms = served.published_ms - modelled["time_ms"]
    return row | {
        "name": f"{served.name}: {served.phase}",
        "fact": f"{served.shape.name}, {served.target}, {served.phase}",
        "target": served.target,
        "measure": "bound",
        "group": served.group,
        "naive": False,
        "source": served.source,
        "published_ms": served.published_ms,
        "modelled_ms": modelled["time_ms"],
        "launches": modelled["launches"],
        "launch_us": 1e3 * rest_ms / modelled["launches"],
    }
