"""The paper's Figure 1 from modelled rows: time and HBM traffic of X U V against tokens.

matplotlib is imported when the picture is drawn.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from benchmarks.cases.figure1 import GIB, KERNELS
from neuroncore.hardware import DMA_MODELS
from neuroncore.profile.plot import check_format, new_figure, save_figure


class Line(NamedTuple):
    """A kernel's line, and the marker of what the paper measured."""

    label: str
    color: str
    width: float
    marker: str


LINES = {
    "xw": Line("X W, dense (neuronmm-ops)", "tab:gray", 1.5, "s"),
    "xuv_unfused": Line("X U then (X U) V (neuronmm-ops)", "tab:orange", 1.5, "^"),
    "neuronmm_published": Line("X U V (NeuronMM's loop nest)", "skyblue", 6.0, "o"),
    "xuv": Line("X U V (neuronmm-ops)", "tab:red", 1.5, ""),
}


def save(rows: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the rows of `kernels.run(figure1=True)` in the format of the suffix, PNG without one."""
    check_format(path)
    figure = new_figure(10, 5.2)
    times, traffic = figure.subplots(1, 2)
    _panel(times, rows, "time, ms", "time_ms", "published_ms", 1)
    _panel(traffic, rows, "HBM traffic, GiB", "hbm_bytes", "published_bytes", GIB)
    cores = "one NeuronCore" if rows[0]["lnc"] == 1 else f"{rows[0]['lnc']} NeuronCores"
    figure.suptitle(
        f"X [M, 8192] at rank 4096 to 16384 outputs, bf16, {cores} of {rows[0]['target']}\n"
        f"lines: modelled on the simulated core, DMA model {DMA_MODELS[0]}"
        + ("; markers: published by NeuronMM" if any(r["published_bytes"] for r in rows) else "")
    )
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, path, 150)


def _panel(
    axes: Any, rows: list[dict[str, Any]], quantity: str, modelled: str, published: str, unit: int
) -> None:
    """A line of each kernel's modelled values, and markers where the paper measured it."""
    for kernel, line in LINES.items():
        tokens, values = _points(rows, kernel, modelled, unit)
        # A wide line stays visible under one that coincides with it.
        style: dict[str, Any] = {"color": line.color, "linewidth": line.width}
        if tokens:
            single = "." if len(tokens) < 2 else ""
            axes.plot(tokens, values, marker=single, label=f"{line.label}, modelled", **style)
    for kernel, name in KERNELS.items():
        tokens, values = _points(rows, kernel, published, unit)
        color = "tab:blue" if name == "NeuronMM" else LINES[kernel].color
        style = {"color": color, "marker": LINES[kernel].marker, "fillstyle": "none"}
        style |= {"linestyle": "", "markersize": 8, "markeredgewidth": 1.5}
        if tokens:
            axes.plot(tokens, values, label=f"{name}, published", **style)
    _label(axes, sorted({row["M"] for row in rows}), quantity)


def _points(
    rows: list[dict[str, Any]], kernel: str, key: str, unit: int
) -> tuple[list[int], list[float]]:
    """Tokens of a kernel's rows that have a value, and the values in the unit."""
    points = [row for row in rows if row["kernel"] == kernel and row[key] is not None]
    points.sort(key=lambda row: row["M"])
    return [row["M"] for row in points], [row[key] / unit for row in points]


def _label(axes: Any, tokens: list[int], quantity: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(M) if M % 1024 else f"{M // 1024}K" for M in tokens])
    low, high = axes.get_ylim()
    ticks = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("tokens M")
    axes.set_ylabel(quantity)
