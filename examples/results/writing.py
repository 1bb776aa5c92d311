"""What the generated pages share: tables, numbers as text, and the mark that they are generated."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MARK = "<!-- Written by `make results` from docs/results/*.json. Do not edit: a test compares. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def page(*blocks: str) -> str:
    """A page of blocks, without empty ones."""
    return "\n\n".join([*filter(None, blocks)]) + "\n"


def span(low: float, high: float, digits: int = 2, unit: str = "x") -> str:
    """A range, or one number where both ends print alike."""
    ends = dict.fromkeys(f"{value:.{digits}f}" for value in (low, high))
    return "-".join(ends) + unit


def ranged(speedup: Mapping[str, Any]) -> str:
    """A speed-up and its range: `middle`, `low` and `high`."""
    shown, low, high = (f"{speedup[end]:.2f}" for end in ("middle", "low", "high"))
    return f"{shown}x" if low == high else f"{shown}x ({low}-{high}x)"


def number(value: float) -> str:
    """Three significant digits, with commas."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def count(value: float) -> str:
    """A number of bytes or parameters, in G or M."""
    return f"{value / 1e9:.2f} G" if value >= 1e9 else f"{value / 1e6:.1f} M"
