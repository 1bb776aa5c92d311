"""The study's plot: what each method loses, as a multiple of what the baseline does."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.methods import BASELINE, DEFAULT

mpl.use("Agg")  # before pyplot is imported, or it may look for a display
import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

# A plain SVD loses several times what the others do.
LARGEST = 2.0
# Okabe and Ito's palette, told apart under every common colour blindness.
BASELINE_STYLE = {"color": "#E69F00", "linewidth": 2.2, "marker": "^"}
DEFAULT_STYLE = {"color": "#0072B2", "linewidth": 2.2, "marker": "o"}
OTHERS = ("#D55E00", "#CC79A7", "#56B4E9", "#009E73", "#999999", "#F0E442", "#000000", "#7f4f24")


def save_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the rows of `methods.run`, a panel a text."""
    compressed = [row for row in rows if row["method"] != "dense"]
    texts = list(dict.fromkeys(row["text"] for row in compressed))
    figure, panels = plt.subplots(
        1, len(texts), figsize=(4 * len(texts), 4.2), sharey=True, squeeze=False
    )
    for axes, text in zip(panels[0], texts, strict=True):
        others = iter(OTHERS)
        for candidate in dict.fromkeys(map(_candidate, compressed)):
            of_text = [row for row in compressed if row["text"] == text]
            line = [row for row in of_text if _candidate(row) == candidate]
            quotients = [row["excess_quotient"] for row in line]
            y = [float("nan") if quotient is None else quotient for quotient in quotients]
            x = [row["ratio"] for row in line]
            axes.plot(x, y, label=_label(candidate), **_style(candidate, others))
        axes.set_title(f"{Path(text).stem}", loc="left", fontweight="bold")
        axes.set_xlabel("nominal ratio")
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        axes.set_xlim(0, 1)
        axes.grid(color="#e6e9ed")
        axes.set_axisbelow(True)
        axes.set_ylim(0, LARGEST)
    panels[0, 0].set_ylabel("excess log-perplexity,\nof whiten's with uniform ranks")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _candidate(row: dict[str, Any]) -> tuple[str, str, str | None]:
    return row["method"], row["allocation"], row["importance"]


def _label(candidate: tuple[str, str, str | None]) -> str:
    method, allocation, importance = candidate
    return f"{method}, {allocation}" + (f" by {importance}" if importance else "")


def _style(candidate: tuple[str, str, str | None], others: Any) -> dict[str, Any]:
    if candidate[:2] == (BASELINE.method, BASELINE.allocation):
        return BASELINE_STYLE
    if candidate[:2] == (DEFAULT.method, DEFAULT.allocation):
        return DEFAULT_STYLE
    return {"color": next(others), "linewidth": 1.1, "marker": ".", "zorder": 1}
