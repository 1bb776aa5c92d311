"""The demo's report: one HTML page with its figures inside, readable without network or script."""

import base64
import html
import io
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

from neuronmm_ops import CompressionReport, LayerReport
from neuronmm_ops.bench.speed import PairedSpeed, Phase

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
    "swift": {"color": "#0072B2", "marker": "o"},
    "plain": {"color": "#D55E00", "marker": "s"},
}
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


@dataclass(frozen=True)
class Point:
    """One compressed model: how it was made and what was measured of it."""

    method: str
    ratio: float
    compression: CompressionReport
    ppl: float
    speed: PairedSpeed
    sample: str


@dataclass(frozen=True)
class Results:
    """All that the report shows."""

    dense_ppl: float
    dense_sample: str
    """What the model wrote after `prompt`; likewise in each point."""
    prompt: str
    block: int
    """Ranks are multiples of it."""
    points: tuple[Point, ...]
    prefill_tokens: int
    decode_tokens: int
    provenance: dict[str, str]


def write_report(results: Results, path: Path) -> None:
    """Write the page to `path`: no file beside it is needed to read it."""
    with mpl.rc_context(STYLE):
        figures = {
            "ppl": _svg(_perplexity_figure(results)),
            "prefill": _svg(_speed_figure(results, "prefill")),
            "decode": _svg(_speed_figure(results, "decode")),
            "layers": _svg(_layers_figure(results)),
        }
    path.write_text(_page(results, figures), encoding="utf-8")


def _perplexity_figure(results: Results) -> Figure:
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for method, points in _by_method(results.points):
        x = [point.compression.effective_ratio for point in points]
        y = [point.ppl for point in points]
        axes.plot(x, y, label=method, **METHOD_STYLE[method])
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
    axes.legend(loc="upper left")
    return figure


def _speed_figure(results: Results, phase: Phase) -> Figure:
    figure, axes = plt.subplots(figsize=(4.4, 3.3), layout="constrained")
    dense = _dense_speed(results, phase)
    # Every method's points carry the same speeds.
    method, points = _by_method(results.points)[0]
    x = [point.compression.effective_ratio for point in points]
    y = [dense * point.speed.speedup(phase) for point in points]
    axes.plot(x, y, label="low-rank", **METHOD_STYLE[method])
    axes.axhline(dense, color=INK, linestyle="--", linewidth=1.2, label="dense")
    tokens = results.prefill_tokens if phase == "prefill" else results.decode_tokens
    axes.set_title(f"{phase.capitalize()}, {tokens} tokens")
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
    axes.set_ylabel("tokens/s, batch 1")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _ratio_axis(axes)
    axes.legend(loc="lower left")
    return figure


def _dense_speed(results: Results, phase: Phase) -> float:
    """The median over all points: each was timed beside the dense model anew."""
    return statistics.median(point.speed.tokens_per_s("dense", phase) for point in results.points)


def _layers_figure(results: Results) -> Figure:
    """Ranks and losses of `swift`: `plain` states its loss of another quantity (the weights)."""
    points = [point for point in results.points if point.method == "swift"]
    projections = list(dict.fromkeys(_projection(layer.name) for layer in _layers(points)))
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
    axes[1, 0].set_ylabel("relative loss of the\nlayer's output energy")
    for row in axes:
        row[0].set_ylim(bottom=0)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="nominal ratio", loc="outside upper right", ncols=len(labels)
    )
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


def _page(results: Results, figures: dict[str, str]) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>neuronmm-ops demo</title>
<style>{CSS}</style>
</head>
<body>
<main>
<h1>A small Llama, compressed</h1>
<p class="lead">{_summary(results)}</p>

<h2>Perplexity</h2>
<div class="single">
{_figure(figures["ppl"], "Perplexity against compression ratio, by method")}
</div>
<p class="note">Lower is better. <b>plain</b> truncates the SVD of each weight; <b>swift</b> keeps
what the layer puts out on calibration text. Token perplexity over non-overlapping blocks of
{_text(results.provenance["perplexity block"])}: the tokenizer and text are this demo's, so the
values compare with nothing outside this page. So short a training leaves more of the MLPs unused
than a real model's; expect real ones to lose more at the same ratio.</p>

<h2>Speed</h2>
<div class="pair">
{_figure(figures["prefill"], "Tokens per second of prefill, dense and compressed")}
{_figure(figures["decode"], "Tokens per second of decode, dense and compressed")}
</div>
<p class="note">Measured on {_text(results.provenance["CPU"])},
{_text(results.provenance["threads"])} threads, {_text(results.provenance["dtype"])}, batch 1, in
this process; dense and compressed runs alternate and medians are taken. Compressed values are the
dense median times the median speedup of paired runs. Every method gives the same shapes, so one
measurement a ratio serves them all. A model this small spends much of a step in
Python and in attention, neither of which compression touches: it says little about the speed of a
large one.</p>

<h2>Layers</h2>
<div class="scroll">
{_figure(figures["layers"], "Rank and relative loss of every layer, by projection", wide=True)}
</div>
<p class="note">Method swift. The loss is the exact share of the layer's output energy on the
calibration text that its rank cannot represent.</p>

<h2>All numbers</h2>
<div class="scroll">{_table(results)}</div>
<p class="note">Nominal ratio: what was asked for. Effective: what ranks in whole blocks of
{results.block} removed. Mean loss: for swift of the layers' output energy, for
plain of the weights' energy, so the two do not compare. Speedups are medians of paired runs;
tokens/s of a compressed model are the dense model's times the speedup.</p>

<h2>Samples</h2>
<p class="note">The same prompt, in bold, and the same seed for every model; temperature 0.7,
top 20.</p>
{_samples(results)}

<h2>Provenance</h2>
<div class="scroll">{_provenance(results.provenance)}</div>
</main>
</body>
</html>
"""


def _summary(results: Results) -> str:
    by_key = {(point.method, point.ratio): point for point in results.points}
    ratio = min((p.ratio for p in results.points), key=lambda value: abs(value - 0.2))
    plain, swift = by_key["plain", ratio], by_key["swift", ratio]
    return _text(
        f"With {swift.compression.effective_ratio:.0%} of its MLP parameters removed, the model's "
        f"perplexity goes from {results.dense_ppl:.1f} to {swift.ppl:.1f} with swift, and to "
        f"{plain.ppl:.1f} with a plain SVD. Nothing is fine-tuned afterwards."
    )


def _table(results: Results) -> str:
    head = (
        "method",
        "nominal ratio",
        "effective ratio",
        "ranks",
        "mean loss",
        "perplexity",
        "× dense",
        "prefill tokens/s",
        "speedup",
        "decode tokens/s",
        "speedup",
    )
    prefill = _dense_speed(results, "prefill")
    decode = _dense_speed(results, "decode")
    rows = [
        (
            *("dense", "0 %", "0 %", "–", "–"),
            *(f"{results.dense_ppl:.2f}", "1.00"),
            *(f"{prefill:,.0f}", "1.00", f"{decode:,.0f}", "1.00"),
        )
    ]
    for point in results.points:
        layers = point.compression.layers
        ranks = sorted({layer.r for layer in layers if layer.r is not None})
        rank_text = "all dense" if not ranks else f"{ranks[0]}"
        if len(ranks) > 1:
            rank_text += f" to {ranks[-1]}"
        rows.append(
            (
                point.method,
                f"{point.ratio:.0%}".replace("%", " %"),
                f"{100 * point.compression.effective_ratio:.1f} %",
                rank_text,
                f"{100 * sum(layer.loss or 0 for layer in layers) / len(layers):.1f} %",
                f"{point.ppl:.2f}",
                f"{point.ppl / results.dense_ppl:.2f}",
                f"{prefill * point.speed.speedup('prefill'):,.0f}",
                f"{point.speed.speedup('prefill'):.2f}",
                f"{decode * point.speed.speedup('decode'):,.0f}",
                f"{point.speed.speedup('decode'):.2f}",
            )
        )
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead><tbody>\n{body}</tbody></table>"


def _samples(results: Results) -> str:
    title = f"dense, perplexity {results.dense_ppl:.1f}"
    parts = [_sample(title, results.prompt, results.dense_sample)]
    for point in results.points:
        ratio = f"{point.ratio:.0%}".replace("%", " %")
        title = f"{point.method} at {ratio}, perplexity {point.ppl:.1f}"
        parts.append(_sample(title, results.prompt, point.sample))
    return f'<div class="samples">{"".join(parts)}</div>'


def _sample(title: str, prompt: str, continuation: str) -> str:
    return (
        f"<figure><figcaption>{_text(title)}</figcaption>"
        f"<pre><b>{_text(prompt)}</b>{_text(continuation.rstrip())}</pre></figure>"
    )


def _provenance(provenance: dict[str, str]) -> str:
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>\n"
        for name, value in provenance.items()
    )
    return f'<table class="facts"><tbody>\n{rows}</tbody></table>'


def _figure(source: str, alt: str, *, wide: bool = False) -> str:
    wide_class = ' class="wide"' if wide else ""
    return f'<img{wide_class} src="{source}" alt="{_text(alt)}">'


def _text(value: object) -> str:
    return html.escape(str(value))


def _by_method(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    methods = dict.fromkeys(point.method for point in points)
    return [(method, [p for p in points if p.method == method]) for method in methods]


def _layers(points: Iterable[Point]) -> list[LayerReport]:
    return [layer for point in points for layer in point.compression.layers]


def _projection(name: str) -> str:
    return name.rsplit(".", 1)[-1]


CSS = """
body { margin: 0; background: #fff; color: #222;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .8rem; padding-top: .9rem; border-top: 1px solid #e1e5ea; }
.lead { font-size: 1.1rem; margin: 0; }
.note { color: #4d5763; font-size: .9rem; }
.single { max-width: 700px; }
.pair { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
img.wide { min-width: 620px; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums;
  width: 100%; }
th, td { padding: .35rem .5rem; text-align: right; border-bottom: 1px solid #e9ecf0; }
td { white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; line-height: 1.25; }
thead th { border-bottom: 1.5px solid #9aa3ae; }
th:first-child, td:first-child, .facts th, .facts td { text-align: left; }
.facts th { white-space: nowrap; vertical-align: top; width: 1%; padding-right: 1.2rem; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.samples { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); }
figure { margin: 0; min-width: 0; }
.samples figure:first-child { grid-column: 1 / -1; }
figcaption { font-size: .85rem; font-weight: 600; margin-bottom: .25rem; }
pre { margin: 0; padding: .7rem .8rem; background: #f6f7f9; border-radius: 4px; font-size: .78rem;
  line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
"""
