"""The paper's Figure 1 from modelled rows: time and HBM traffic of X U V against tokens.

matplotlib is imported when the picture is drawn.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from neuronmm_ops.bench.cases.figure1 import GIB, KERNELS, READINGS, TARGET
from neuronmm_ops.neuroncore.files import replacing
from neuronmm_ops.neuroncore.plot import check_format, new_figure


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
    target = rows[0]["target"]
    _lines(times, rows, "time_ms", 1.0)
    _lines(traffic, rows, "hbm_bytes", GIB)
    if target == TARGET:
        _markers(times, traffic, {row["M"] for row in rows})
    for axes, quantity in ((times, "time, ms"), (traffic, "HBM traffic, GiB")):
        _label(axes, sorted({row["M"] for row in rows}), quantity)
    cores = "one NeuronCore" if rows[0]["lnc"] == 1 else f"{rows[0]['lnc']} NeuronCores"
    figure.suptitle(
        f"X [M, 8192] at rank 4096 to 16384 outputs, bf16, {cores} of {target}\n"
        "lines: modelled on the simulated core; a ratio of two hangs on its DMA row model"
        + ("; markers: published by NeuronMM" if target == TARGET else "")
    )
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    with replacing(path) as temporary:
        name = os.path.splitext(path)[1][1:].lower() or "png"
        figure.savefig(temporary, format=name, dpi=150)


def _lines(axes: Any, rows: list[dict[str, Any]], key: str, unit: float) -> None:
    for kernel, line in LINES.items():
        points = sorted(
            (r["M"], r[key] / unit) for r in rows if r["kernel"] == kernel and r[key] is not None
        )
        if points:
            tokens, values = zip(*points, strict=True)
            axes.plot(
                tokens,
                values,
                color=line.color,
                linewidth=line.width,  # a wide line stays visible under one that coincides
                marker="." if len(points) < 2 else "",
                label=f"{line.label}, modelled",
            )


def _markers(times: Any, traffic: Any, tokens: set[int]) -> None:
    """What the paper measured at these tokens."""
    for kernel, published in KERNELS.items():
        line = LINES[kernel]
        chosen = {M: reading for M, reading in READINGS[published].items() if M in tokens}
        how: dict[str, Any] = {
            "color": "tab:blue" if published == "NeuronMM" else line.color,
            "marker": line.marker,
            "linestyle": "",
            "fillstyle": "none",
            "markersize": 8,
            "markeredgewidth": 1.5,
        }
        ms = {M: reading.ms for M, reading in chosen.items() if reading.ms is not None}
        gib = {M: reading.gib for M, reading in chosen.items() if reading.gib is not None}
        if ms or gib:
            times.plot(list(ms), list(ms.values()), label=f"{published}, published", **how)
            traffic.plot(list(gib), list(gib.values()), **how)


def _label(axes: Any, tokens: list[int], quantity: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [_short(M) for M in tokens])
    low, high = axes.get_ylim()
    ticks = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlabel("tokens M")
    axes.set_ylabel(quantity)


def _short(tokens: int) -> str:
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}K"
