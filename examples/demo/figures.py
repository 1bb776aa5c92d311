"""The figures of the demo's report."""

import base64
import io
import statistics
from typing import Any

import matplotlib as mpl
from results import BASELINE, OURS, Results, by_method, layers_of
from trainium import OnTrainium

from neuronmm_ops.measure.speed import TimedPhase

mpl.use("Agg")  # before pyplot is imported, or it may look for a display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
    ScalarFormatter,
    StrMethodFormatter,
)

INK = "#222222"
MUTED = "#5a6472"
# Okabe and Ito's palette, told apart under every common colour blindness; shapes differ too.
METHOD_STYLE: dict[str, dict[str, Any]] = {
    "plain": {"color": "#D55E00", "marker": "s"},
    "SVD-LLM": {"color": "#E69F00", "marker": "^"},
    "greedy": {"color": "#0072B2", "marker": "o"},
    "recovered": {"color": "#009E73", "marker": "D"},
}
RIVALS = {"fp8": "D", "int8": "v", "int4": "P"}
"""Markers of dense MLPs in a storage."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa3ae",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#e6e9ed",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "neuronmm-ops",
}


def draw(results: Results) -> dict[str, str]:
    """The figures by name, each as the address of an image that holds it.

    Until all points are measured, the perplexities' alone: drawing takes a second each.
    """
    with mpl.rc_context(STYLE):
        if results.trainium is None:
            return {"ppl": _svg(_perplexity_figure(results))}
        return {
            "ppl": _svg(_perplexity_figure(results)),
            "prefill": _svg(_speed_figure(results, "prefill")),
            "decode": _svg(_speed_figure(results, "decode")),
            "layers": _svg(_layers_figure(results)),
            "trainium": _svg(_trainium_figure(results.trainium)),
        }


def _perplexity_figure(results: Results) -> Figure:
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for method, points in by_method(results.points):
        x = [point.compression.effective_ratio for point in points]
        y = [point.ppl for point in points]
        axes.plot(x, y, label=method, **METHOD_STYLE[method])
    for rival in results.rivals:
        style: dict[str, Any] = {"color": INK, "linestyle": "", "marker": RIVALS[rival.storage]}
        label = f"dense, {rival.storage}"
        axes.plot([1 - rival.bytes], [rival.ppl], label=label, markerfacecolor="white", **style)
    axes.axhline(results.dense_ppl, color=INK, linestyle="--", linewidth=1.2)
    axes.annotate(
        f"dense {results.dense_ppl:.1f}",
        (1, results.dense_ppl),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        ha="right",
        va="top",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    # Room below the dense line for its label.
    axes.set_ylim(bottom=results.dense_ppl * 0.85)
    axes.set_ylabel("perplexity, held-out text (log)")
    _ratio_axis(axes)
    axes.set_xlabel("bytes of the MLPs removed, of two a number")
    axes.legend(loc="upper left")
    return figure


def _speed_figure(results: Results, phase: TimedPhase) -> Figure:
    figure, axes = plt.subplots(figsize=(4.4, 3.3), layout="constrained")
    dense = dense_speed(results, phase)
    # The others' ranks are those of one of these.
    for method, label in ((BASELINE, "one rank for all"), (OURS, "greedy ranks")):
        points = [point for point in results.points if point.method == method]
        x = [point.compression.effective_ratio for point in points]
        y = [dense * point.speed.speedup(phase) for point in points]
        axes.plot(x, y, label=label, **METHOD_STYLE[method])
    axes.axhline(dense, color=INK, linestyle="--", linewidth=1.2, label="dense")
    tokens = results.prefill_tokens if phase == "prefill" else results.decode_tokens
    axes.set_title(f"{phase.capitalize()}, {tokens} tokens")
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.set_ylabel("tokens/s, batch 1")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _ratio_axis(axes)
    axes.legend(loc="lower left")
    return figure


def dense_speed(results: Results, phase: TimedPhase) -> float:
    """The dense model's tokens per second: the median over all points, each timed next to it."""
    return statistics.median(point.speed.tokens_per_s("dense", phase) for point in results.points)


def _layers_figure(results: Results) -> Figure:
    """Ranks and losses of the default: each method states its loss of another quantity."""
    points = [point for point in results.points if point.method == OURS]
    projections = list(dict.fromkeys(_projection(layer.name) for layer in layers_of(points)))
    figure, axes = plt.subplots(
        2,
        len(projections),
        figsize=(8.2, 4.6),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    colors = mpl.colormaps["cividis"]
    for index, point in enumerate(points):
        color = colors(0.9 * index / max(1, len(points) - 1))
        for column, projection in enumerate(projections):
            layers = [x for x in point.compression.layers if _projection(x.name) == projection]
            depth = range(len(layers))
            ranks = [min(x.K, x.N) if x.r is None else x.r for x in layers]
            label = f"{point.ratio:.0%}"
            axes[0, column].plot(depth, ranks, color=color, marker="o", markersize=4, label=label)
            losses = [x.loss for x in layers]
            axes[1, column].plot(depth, losses, color=color, marker="o", markersize=4)
    for column, projection in enumerate(projections):
        axes[0, column].set_title(projection)
        axes[1, column].set_xlabel("layer")
        axes[1, column].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[1, column].yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes[0, 0].set_ylabel("rank r")
    axes[1, 0].set_ylabel("relative loss")
    for row in axes:
        row[0].set_ylim(bottom=0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="nominal ratio", loc="outside upper right", ncols=len(labels)
    )
    return figure


def _trainium_figure(modelled: OnTrainium) -> Figure:
    """Each model's and phase's modelled time, as a share of the dense one's."""
    times = modelled.times
    figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
    for place, row in enumerate(times):
        dense, own = row.dense_ms[0], row.low_rank_ms[0]
        axes.barh(place - 0.2, 1, 0.36, color="#b8c0ca", label="" if place else "dense")
        color = METHOD_STYLE[OURS]["color"]
        axes.barh(place + 0.2, own / dense, 0.36, color=color, label="" if place else "compressed")
        for offset, value, ink in ((-0.2, dense, INK), (0.2, own, "white")):
            axes.annotate(
                f"{value:.3g} ms", (0.01, place + offset), va="center", fontsize=8, color=ink
            )
    phases = ["decode" if row.tokens == 1 else f"prefill {row.tokens}" for row in times]
    names = [f"{row.model}\n{phase}" for row, phase in zip(times, phases, strict=True)]
    axes.set_yticks(range(len(times)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel("modelled time of all MLPs, of the dense ones'")
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def _ratio_axis(axes: Axes) -> None:
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel("compression ratio (MLP parameters removed)")


def _svg(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    # As an image, because the ids of two inline SVGs of one page would clash.
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _projection(name: str) -> str:
    return name.rsplit(".", 1)[-1]
