"""NeuronMM's figures of block sizes, naive fusion and traffic next to the simulated core's."""

from typing import Any

from benchmarks.cases import paper
from benchmarks.cases.figure1 import TARGET
from benchmarks.runner import run_all
from neuroncore import NkiValidationError, Profile
from neuroncore.hardware import DMA_MODELS
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.estimate.launches import of_op
from neuronmm_ops.plan.launches import PlannedKernel, TensorShape

RATIOS = {"time_ratio": "time_ms", "dma_ratio": "dma_ms", "hbm_ratio": "hbm_bytes"}
FIELDS = (
    "section", "name", "against", "target", "M", "K", "r", "N", "launches", "source", "note",
    "refused", "time_ms", "times_ms", "dma_ms", "hbm_bytes", "sbuf_share", "time_ratios", *RATIOS,
    *[f"published_{name}" for name in paper.Published._fields],
)  # fmt: skip


def run(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Model every case of `cases.paper` on one core of trn1; a minute.

    Args:
        progress: called with ("paper", cases done, cases in all).

    Returns:
        One row a case, with `FIELDS`: what was published begins with `published_`, all else is
        modelled; None is unknown. `times_ms` is under each DMA model, `time_ms` under the first;
        `dma_ms` is for how long any DMA engine moves bytes; `sbuf_share` is of what a kernel may
        take. Ratios are over the row `against`. A kernel that does not fit has only `refused`,
        which says why.
    """
    figures = paper.cases()
    rows = list(map(_row, figures, run_all("paper", _modelled, figures, progress)))
    by_name = {(row["section"], row["name"]): row for row in rows}
    for row in rows:
        base = by_name.get((row["section"], row["against"]), {})
        for name, of in RATIOS.items():
            row[name] = _ratio(row, base, of)
            row[f"published_{name}"] = row[f"published_{name}"] or _ratio(
                row, base, f"published_{of}"
            )
        if row["time_ratio"]:
            both = row["times_ms"], base["times_ms"]
            row["time_ratios"] = {model: _ratio(*both, model) for model in DMA_MODELS}
    return rows


def _ratio(row: dict[str, Any], base: dict[str, Any], key: str) -> float | None:
    return row[key] / base[key] if row.get(key) and base.get(key) else None


def _row(case: paper.Figure, modelled: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(case, name, None) for name in FIELDS}
    row |= dict(zip("MKrN", case.sizes, strict=True), target=TARGET)
    row |= {"source": paper.SOURCES[case.section], "note": paper.NOTES[case.section]}
    row |= {f"published_{name}": value for name, value in case.published._asdict().items()}
    return row | modelled


def _modelled(case: paper.Figure) -> dict[str, Any]:
    """What the profiles of a case's launches add up to, or why the core refuses one."""
    try:
        profiles = _profiles(case)
    except NkiValidationError as error:
        return {"refused": str(error).partition(";")[0]}
    launches = 1 if case.run is None else case.run.launches
    times = {model: launches * sum([p.times_ms[model] for p in profiles]) for model in DMA_MODELS}
    return {
        "launches": launches * len(profiles),
        "time_ms": times[DMA_MODELS[0]],
        "times_ms": times,
        "dma_ms": launches * sum([p.dma_active_ms for p in profiles]),
        "hbm_bytes": launches * sum([p.hbm_bytes for p in profiles]),
        "sbuf_share": max([p.sbuf_peak_bytes / p.machine.usable_sbuf_bytes for p in profiles]),
    }


def _profiles(case: paper.Figure) -> list[Profile]:
    """Of the launches that differ, and of all in our plan."""
    if case.run is not None:
        kernel, shapes, blocks, _ = case.run
        operands = tuple([TensorShape(shape, "bfloat16") for shape in shapes])
        launch = PlannedKernel(kernel, operands, {"blocks": blocks} if blocks else {})
        return [launch.profile(TARGET)]
    M, K, _, N = case.sizes
    return [p.profile(TARGET) for p in of_op("xw", M, ((K, N),), "bfloat16", TARGET, 1)]
