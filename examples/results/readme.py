"""The README's picture and numbers, between two marks."""

from plots import plots
from results_page import three_numbers

BEGIN, END = "<!-- results: written by `make results` -->", "<!-- /results -->"
SUMMARY = "results-summary.svg"


def readme(text: str) -> str:
    """The README with its block written anew.

    Raises:
        ValueError: a mark is missing, or there is more than one.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must have one {BEGIN!r} and one {END!r}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{block()}\n{END}{after}"


def block() -> str:
    """What stands between the marks."""
    alt = "What compression costs, measured, and what it wins, modelled"
    parts = [f"![{alt}](docs/images/{SUMMARY})"] if SUMMARY in plots() else []
    parts.append("\n".join(f"- {line}" for line in three_numbers()))
    parts.append("[All results](docs/results.md), and the command behind each number.")
    return "\n" + "\n\n".join(filter(None, parts)) + "\n"
