"""The picture and the numbers of the README and of the documentation's home page."""

from configuration import configuration
from plots import plots

SUMMARY = "results-summary.svg"


def block(docs: str) -> str:
    """The block, for a page that reaches the documentation by the prefix `docs`."""
    alt = "What compression costs, measured, and what it wins, modelled"
    parts = [f"![{alt}]({docs}images/{SUMMARY})"] if SUMMARY in plots() else []
    introduction, *lines = configuration() or [""]
    parts += [introduction, "\n".join(lines)]
    parts.append(f"[All results]({docs}results.md), and the command behind each number.")
    return "\n\n".join(filter(None, parts))
