"""A profile as a picture: when engines and queues are busy, and how far it is from the roofline.

matplotlib is imported when the first picture is drawn. Times are modelled.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from neuroncore.files import replacing
from neuroncore.profile.metrics import ENGINE_NAMES, columns, disjoint
from neuroncore.timing.times import CoreSchedule

if TYPE_CHECKING:
    from neuroncore.profile.profile import Profile

_BINNED_ABOVE = 500
_BINS = 600


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches. Raises ImportError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; run: pip install 'neuroncore[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def check_format(path: str | os.PathLike[str]) -> None:
    """Raise ImportError without matplotlib, ValueError for a suffix that it cannot write."""
    known = new_figure(1, 1).canvas.get_supported_filetypes()
    if _format(path) not in known:
        raise ValueError(
            f"a plot ends in one of {', '.join(sorted(known))}; got {os.fspath(path)!r}"
        )


def _format(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(path)[1][1:].lower() or "png"


def save_figure(figure: Any, path: str | os.PathLike[str], dpi: int) -> None:
    """Write a figure in the format of the suffix (PNG without one): all of it, or nothing."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=_format(path), dpi=dpi)


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Draw timeline and roofline in the format of the suffix (PNG without one)."""
    check_format(path)
    rows = _rows(profile)
    figure = new_figure(10, 4.5 + 0.25 * len(rows))
    timeline, roofline = figure.subplots(2, 1, height_ratios=(max(len(rows), 4), 10))
    cores = "" if profile.lnc == 1 else f", {profile.lnc} cores"
    figure.suptitle(
        f"{profile.kernel_name} on {profile.target}{cores}: {profile.time_ms:.4g} ms modelled "
        f"({profile.model} model), bound by {profile.bound}"
    )
    _timeline(timeline, rows, profile.time_ms, profile.instructions > _BINNED_ABOVE)
    _roofline(roofline, profile)
    save_figure(figure, path, 120)


PlotRow = tuple[str, np.ndarray, np.ndarray]


def _rows(profile: Profile) -> list[PlotRow]:
    """Name, starts and ends (ms, disjoint and sorted) of each engine and queue that ran."""
    rows: list[PlotRow] = []
    for number, core in enumerate(profile.schedule.cores):
        prefix = f"{number}: " if profile.lnc > 1 else ""
        rows += [(prefix + name, start, end) for name, start, end in _rows_of(core)]
    return rows


def _rows_of(core: CoreSchedule) -> list[PlotRow]:
    engine, start, end = columns(core)
    by_name = {ENGINE_NAMES[e]: np.flatnonzero(engine == e) for e in range(5)}
    queues: dict[str, list[int]] = {}
    for i, name in core.queue.items():
        queues.setdefault(name, []).append(i)
    by_name.update({name: np.array(numbers) for name, numbers in queues.items()})
    rows: list[PlotRow] = []
    for name, numbers in by_name.items():
        if len(numbers):
            order = numbers[np.argsort(start[numbers], kind="stable")]
            rows.append((name, *disjoint(start[order] / 1e6, end[order] / 1e6)))
    return rows


def _timeline(axes: Any, rows: list[PlotRow], time_ms: float, binned: bool) -> None:
    edges = np.linspace(0.0, time_ms or 1.0, _BINS + 1)
    if binned:
        shares = [_shares(start, end, edges) for _, start, end in rows]
        places = np.arange(len(rows) + 1) - 0.5
        drawn = axes.pcolormesh(edges, places, np.array(shares), vmin=0, vmax=1, cmap="Blues")
        axes.figure.colorbar(drawn, ax=axes, label="busy share")
    else:
        for place, (name, start, end) in enumerate(rows):
            bars = np.stack([start, end - start], axis=1)
            color = "tab:blue" if name.rpartition(" ")[2] in ENGINE_NAMES else "tab:orange"
            axes.broken_barh(bars, (place - 0.4, 0.8), color=color)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(0, time_ms or 1.0)
    axes.set_xlabel("ms (modelled)")


def _shares(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Busy share of each bin."""
    done = np.concatenate([[0.0], np.cumsum(end - start)])
    moments = np.stack([start, end], axis=1).reshape(-1)
    busy = np.interp(edges, moments, np.stack([done[:-1], done[1:]], axis=1).reshape(-1))
    return np.clip(np.diff(busy) / np.diff(edges), 0, 1)


def _roofline(axes: Any, p: Profile) -> None:
    at, ridge = p.intensity or p.ridge_point, p.ridge_point
    low, high = min(ridge, at) / 8, max(ridge, at) * 8
    x = np.geomspace(low, high, 200)
    slope, peak = x * p.dma_peak_gbps / 1e3, p.pe_peak_tflops
    axes.loglog(x, np.minimum(peak, slope), color="black")
    compute = f"TensorE, bf16: {peak:.1f} TFLOP/s"
    axes.axhline(peak, ls=":", color="tab:blue", label=compute)
    axes.plot(x, slope, ls=":", color="tab:orange", label=f"DMA: {p.dma_peak_gbps:.0f} GB/s")
    axes.axvline(ridge, ls="--", lw=0.8, color="gray", label=f"ridge point: {ridge:.0f} FLOP/byte")
    if p.intensity and p.tflops:
        label = f"{p.kernel_name}: {p.tflops:.3g} TFLOP/s modelled, MFU {p.mfu:.1%}"
        axes.plot([at], [p.tflops], "o", color="tab:red", label=label)
    floor = min(p.tflops or peak, low * p.dma_peak_gbps / 1e3)
    axes.set_ylim(floor / 2, peak * 4)
    axes.set_xlim(low, high)
    axes.set_xlabel("FLOP per HBM byte")
    axes.set_ylabel("TFLOP/s (modelled)")
    axes.legend(loc="lower right", fontsize="small")
