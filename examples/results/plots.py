"""The plots of the page of results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from selection import (
    Quality,
    Row,
    document,
    front,
    methods,
    models,
    setting,
    storages,
    tradeoff_models,
    tradeoffs,
    variant,
)
from sources import DATA, SHOWN

from benchmarks import figure1_plot
from neuroncore.files import replacing
from neuronmm_ops.models import SHAPES

mpl.use("Agg")  # before pyplot is imported, or it may look for a display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

IMAGES = DATA.with_name("images")
# Okabe and Ito's palette, told apart under every common colour blindness; shapes differ too.
BLUE, ORANGE, GREEN, RED, PINK, SKY, GREY = (
    *("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#5a6472"),
)
HOLLOW: dict[str, Any] = {"linestyle": "", "markerfacecolor": "white", "markersize": 7}
"""Of dense matrices in a storage: what low rank must beat."""
LINES: dict[str, dict[str, Any]] = {
    "plain, uniform": {"color": RED, "marker": "s"},
    "SVD-LLM": {"color": ORANGE, "marker": "^"},
    "default": {"color": BLUE, "marker": "o"},
    "bf16": {"color": BLUE, "marker": "o"},
    "fp8": {"color": GREEN, "marker": "D"},
    "fp8, equal ranks": {"color": GREEN, "marker": "D"},
    "fp8, equal bytes": {"color": GREEN, "marker": "D", "linestyle": "--"},
    "int8, equal ranks": {"color": PINK, "marker": "v"},
    "int8, equal bytes": {"color": PINK, "marker": "v", "linestyle": "--"},
    "int4, equal ranks": {"color": SKY, "marker": "P"},
    "int4, equal bytes": {"color": SKY, "marker": "P", "linestyle": "--"},
    "dense, fp8": {"color": GREEN, "marker": "D", **HOLLOW},
    "dense, int8": {"color": PINK, "marker": "v", **HOLLOW},
    "dense, int4": {"color": SKY, "marker": "P", **HOLLOW},
}
DENSE = [label for label in LINES if label.startswith("dense, ")]
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.color": "#e6e9ed",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4.5,
    "savefig.facecolor": "white",  # readable on a dark page
    "svg.hashsalt": "neuronmm-ops",
}
SMALLEST = 1e-3
"""Of an excess: what is below lies on a linear part of the axis, and so may be negative."""


def plots() -> dict[str, Callable[[Path], None]]:
    """What draws each plot whose data are there, by its file's name."""
    drawn: dict[str, Callable[[Path], None]] = {}
    if storages() or tradeoff_models():
        drawn["results-summary.svg"] = _saved(_summary)
    if methods() and storages():
        drawn["results-quality.svg"] = _saved(_quality)
    if tradeoffs():
        drawn["results-pareto.svg"] = _saved(_pareto)
    if any(models(name) for name in SHAPES):
        drawn["results-models.svg"] = _saved(_models)
    if rows := document("figure1"):
        drawn["results-figure1.svg"] = lambda path: figure1_plot.save(rows, path)
    return drawn


def draw() -> list[Path]:
    """Draw every plot into docs/images and remove those that have no data any more."""
    with mpl.rc_context(STYLE):
        savers = plots()
        for name, save in savers.items():
            save(IMAGES / name)
    for path in IMAGES.glob("results-*"):
        if path.name not in savers:
            path.unlink()
    return [IMAGES / name for name in savers]


def _saved(figure: Callable[[], Figure]) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        drawn = figure()
        with replacing(path) as temporary:
            drawn.savefig(temporary, metadata={"Date": None})
        plt.close(drawn)

    return save


def _summary() -> Figure:
    """What it costs next to what it wins; a panel each, for they are of different models."""
    drawn = [
        panel for panel, is_there in ((_cost, storages()), (_win, tradeoff_models())) if is_there
    ]
    width = 4.6 * len(drawn)
    figure, panels = plt.subplots(
        1, len(drawn), figsize=(width, 3.4), squeeze=False, layout="constrained"
    )
    for panel, axes in zip(drawn, panels[0], strict=True):
        panel(axes)
        axes.legend(ncols=2)
    return figure


def _cost(axes: Axes) -> None:
    chosen = [each for each in methods() if each.label in LINES]
    chosen += [each for each in storages() if each.label in ("fp8, equal ranks", *DENSE)]
    _lines(axes, chosen)
    excesses = [each.excess for each in chosen]
    axes.set_ylim(min([0, *excesses]) - SMALLEST / 4, 50 * max(excesses))  # room for the legend
    axes.set_title("What it costs: the demo's model, measured")


def _win(axes: Axes) -> None:
    _speeds(axes, tradeoff_models())
    axes.set_title(f"What it wins: {SHOWN}, modelled")


def _quality() -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    _lines(panels[0], methods())
    panels[0].set_title("Methods, factors of the model's dtype")
    _lines(panels[1], storages())
    panels[1].set_title("Storages, method kfac")
    panels[1].set_ylabel("")
    for axes in panels:
        axes.legend()
    return figure


def _lines(axes: Axes, qualities: list[Quality]) -> None:
    """A line a label: what the logarithm of the perplexity grows by, against bytes."""
    others = iter(mpl.colormaps["tab10"].colors[4:] * 2)  # pyright: ignore
    for label in dict.fromkeys(each.label for each in qualities):
        points = sorted((each.bytes, each.excess) for each in qualities if each.label == label)
        style = LINES.get(label) or {"color": next(others), "linewidth": 0.9, "marker": "."}
        x, y = zip(*points, strict=True)
        axes.plot(x, y, label=label, **style)
    axes.axhline(0, color=GREY, linewidth=0.8)
    _excess_axis(axes)
    axes.set_xlabel("bytes of the MLPs, of the dense bf16 ones'")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlim(1, 0)


def _excess_axis(axes: Axes) -> None:
    axes.set_yscale("symlog", linthresh=SMALLEST)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("excess log-perplexity, held-out text")


def _speeds(axes: Axes, speeds: list[tuple[str, float, Row]]) -> None:
    dense = variant(speeds[0][2], "dense")["tokens_per_s"]
    for storage in dict.fromkeys(storage for storage, _, _ in speeds):
        points = [
            (ratio, variant(one, "low_rank")["tokens_per_s"])
            for own, ratio, one in speeds
            if own == storage
        ]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, label=f"low rank, {storage}", **LINES[storage])
    axes.axhline(dense, color=GREY, linestyle="--", linewidth=1, label="dense, bf16, our kernels")
    if (rival := document("rival")) is not None:
        one_byte = variant(rival, "dense_one_byte")["tokens_per_s"]
        label = "dense, fp8, with the head"
        axes.axhline(one_byte, color=RED, linestyle=":", linewidth=1.5, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("compression ratio (MLP parameters removed)")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_ylabel("decode, tokens/s, one trn2 core, batch 1")


def _pareto() -> Figure:
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    points = tradeoffs()
    for point in (point for point in points if not point.ratio):
        style: dict[str, Any] = {
            **LINES[point.storage],
            "marker": "*",
            "markersize": 11,
            "linestyle": "",
        }
        label = f"dense, {point.storage}"
        axes.plot([point.tokens_per_s], [point.excess], label=label, **style)
    for storage in dict.fromkeys(point.storage for point in points):
        own = [point for point in points if point.storage == storage and point.ratio]
        x, y = [p.tokens_per_s for p in own], [p.excess for p in own]
        axes.plot(x, y, label=f"low rank, {storage}", **LINES[storage])
        for point in own:
            axes.annotate(
                f"{point.ratio:g}",
                (point.tokens_per_s, point.excess),
                xytext=(5, -9),
                textcoords="offset points",
                fontsize=8,
            )
    best = front(points)
    x, y = [point.tokens_per_s for point in best], [point.excess for point in best]
    axes.plot(x, y, color=GREY, linewidth=6, alpha=0.25, zorder=0, label="Pareto front")
    _excess_axis(axes)
    axes.set_ylabel("excess log-perplexity of the demo's model, measured")
    axes.set_xlabel(f"decode of {SHOWN} on a trn2 core, tokens/s, modelled")
    axes.set_title("Two models: the labels are the ratio of both")
    axes.legend()
    return figure


def _models() -> Figure:
    """Speed-ups over our own dense kernels, a group a model, a bar a setting.

    Dense matrices in the setting's storage are marked on its bar.
    """
    by_model = {name: models(name) for name in SHAPES if models(name)}
    figure, panels = plt.subplots(
        1, 2, figsize=(9, 0.9 + 0.45 * len(by_model)), sharey=True, layout="constrained"
    )
    colors = (BLUE, GREEN, PINK, ORANGE)
    for axes, phase in zip(panels, ("decode", "prefill"), strict=True):
        for place, documents in enumerate(by_model.values()):
            for number, one in enumerate(documents):
                speedup = one["speedups"]["ours"][phase]
                middle, low, high = (speedup[end] for end in ("middle", "low", "high"))
                height = 0.8 / len(documents)
                y = place + (number - (len(documents) - 1) / 2) * height
                axes.barh(y, middle, 0.9 * height, color=colors[number], label=setting(one))
                axes.plot([low, high], [y, y], color="black", linewidth=1)
                if stored := one["speedups"].get("storage"):
                    label = f"dense, {one['storage']}"
                    axes.plot(stored[phase]["middle"], y, "dk", label=label, **HOLLOW)
        axes.axvline(1, color=GREY, linewidth=1)
        axes.set_title(f"{phase}, modelled")
        axes.set_xlabel("speed-up over our dense bf16")
        axes.grid(visible=False, axis="y")
    panels[0].set_yticks(range(len(by_model)), list(by_model))
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown))
    return figure


def image(name: str, alt: str) -> str:
    """A plot on a page, where its data are there."""
    return f"![{alt}](images/{name})" if name in plots() else ""
