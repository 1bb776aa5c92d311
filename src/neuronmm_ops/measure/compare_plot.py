"""Rows of `compare.run` as a picture: what every text loses, and what is gained in speed.

matplotlib is imported when the picture is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neuroncore.profile.plot import check_format, new_figure, save_figure

__all__ = ["check_format", "save"]

# Okabe and Ito's palette, told apart under every common colour blindness; shapes differ too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
MARKERS = "os^DvPX*"
COLUMNS = 3


class Series(NamedTuple):
    """Checkpoints that are one line, by effective ratio."""

    label: str
    rows: list[dict[str, Any]]


def save(rows: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the rows in the format of the suffix, PNG without one."""
    check_format(path)
    dense, *compressed = rows
    series = series_of(compressed)
    texts = list(dense["ppl_token"])
    count = len(texts) + 1
    columns, lines = min(count, COLUMNS), -(-count // COLUMNS)
    figure = new_figure(4.6 * columns, 4.1 * lines + 0.9)
    panels = list(np.ravel(figure.subplots(lines, columns, squeeze=False)))
    for text, axes in zip(texts, panels, strict=False):
        _perplexity(axes, series, text, dense["ppl_token"][text])
    _speed(panels[len(texts)], series, dense)
    for axes in panels[count:]:
        axes.remove()
    figure.suptitle(
        f"Checkpoints of {Path(dense['dir']).name}, computed in {dense['compute_dtype']} on "
        f"{dense['device']}, threads: {dense['threads']}"
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path, 150)


def series_of(rows: Sequence[dict[str, Any]]) -> list[Series]:
    """Join the checkpoints whose configs differ in the ratio alone; others are points by name.

    Recovered checkpoints and others are not joined.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(_config(row) or row["dir"]), []).append(row)
    lines = {k: g for k, g in groups.items() if len({row["ratio"] for row in g}) == len(g) > 1}
    configs = [_config(group[0]) for group in lines.values()]
    names = configs[0] if configs else {}
    differing = [name for name in names if len({str(c.get(name)) for c in configs}) > 1]
    series: list[Series] = []
    for key, group in groups.items():
        if key in lines:
            config = _config(group[0])
            values = [str(config.get(name)) for name in differing or ["method"]]
            label = ", ".join(filter(None, values)) or "as compressed"
            series.append(Series(label, sorted(group, key=lambda row: row["effective_ratio"])))
        else:
            series += [Series(Path(row["dir"]).resolve().name, [row]) for row in group]
    return series


def _config(row: dict[str, Any]) -> dict[str, Any]:
    """Return what joins a row with others, by name; nothing where its options are unknown."""
    if row["config"] is None:
        return {}
    config = {key: value for key, value in row["config"].items() if key != "ratio"}
    return {**config, "recovered": "recovered" if row["recovered"] else ""}


def _perplexity(axes: Any, series: Sequence[Series], text: str, dense: float) -> None:
    """Draw a text's excess log-perplexity, with the perplexity it stands for on the left."""
    for index, (label, rows) in enumerate(series):
        y = [row["excess_log_ppl"][text] for row in rows]
        axes.plot(_ratios(rows), y, label=label, **_style(index))
    axes.axhline(0, color="black", linestyle="--", linewidth=1)
    axes.margins(y=0.08)
    axes.annotate(
        f"dense {dense:.2f}",
        (1, 0),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
    )
    axes.yaxis.set_label_position("right")
    axes.yaxis.tick_right()
    axes.set_ylabel("excess log-perplexity, nats a token")
    perplexity = axes.secondary_yaxis(
        "left",
        functions=(
            lambda excess: dense * np.exp(excess),
            lambda ppl: np.log(np.maximum(ppl, 1e-9) / dense),
        ),
    )
    perplexity.set_ylabel("perplexity")
    _frame(axes, Path(text).name)


def _speed(axes: Any, series: Sequence[Series], dense: dict[str, Any]) -> None:
    """Draw the measured speed-ups: decode as filled markers, prefill as hollow ones."""
    for index, (_, rows) in enumerate(series):
        for phase, look in _PHASES.items():
            y = [row["speedup"][phase] for row in rows]
            axes.plot(_ratios(rows), y, **{**_style(index), **look})
    for phase, look in _PHASES.items():
        tokens = f"{phase} of {dense[f'{phase}_tokens']} tokens"
        speed = f"dense {dense['tokens_per_s'][phase]:,.0f}/s"
        style = {"color": "gray", "marker": "o", **look}
        axes.plot([], [], label=f"{tokens}, {speed}", **style)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.set_ylabel("speed-up over dense, measured")
    axes.legend(frameon=False, fontsize="small")
    _frame(axes, "tokens/s, batch 1")


_PHASES: dict[str, dict[str, Any]] = {
    "decode": {},
    "prefill": {"linestyle": ":", "fillstyle": "none"},
}


def _ratios(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["effective_ratio"] for row in rows]


def _style(index: int) -> dict[str, Any]:
    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    # Later markers are smaller, so that what coincides stays visible.
    return {
        "color": color,
        "marker": marker,
        "linewidth": 1.6,
        "markersize": max(5, 10 - 2 * index),
    }


def _frame(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("effective ratio: parameters removed")
    axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
    axes.grid(color="#e6e9ed")
    axes.set_axisbelow(True)
    axes.spines[["top"]].set_visible(False)
