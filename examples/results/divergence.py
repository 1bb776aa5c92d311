"""docs/gallery/divergence.md: methods at equal kept parameters, on our models and another."""

from selection import Row, document, method_label
from writing import MARK, page, table

LISTED = "held_out"
"""Of the calibration's domain; the others' file names are shown as they are."""


def divergence_page() -> str:
    """Two tables a model and text: what methods lose, and what dense one byte does."""
    rows: list[Row] = [*(document("divergence") or []), *(document("stories") or [])]
    texts = dict.fromkeys((row["trial"], row["text"]) for row in rows)
    return page(
        MARK,
        "# Methods at equal parameters",
        "Measured: all Linears of the layers of two models of this repository, and of one of "
        "others, calibrated on 16,384 tokens. *demo* is trained for minutes on more than it can "
        "hold, which flatters low rank; *converged* has learned a table of facts whole; "
        "*stories260K* is A. Karpathy's Llama of 260 thousand parameters, trained on TinyStories "
        "and calibrated on stories of its own. Every cell: the divergence from the dense model's "
        "predictions in nats a token and its standard error, over SVD-LLM's, and what the cross "
        "entropy grows by. Others than SVD-LLM remove as much as it does, or more. *pruned*: MLPs "
        "of fewer inner features, a dense model; *pruned 0.75, then*: for this share of what "
        "goes; *compared*: what `compress --compare` takes by text kept apart.",
        *(block for key in texts for block in _blocks(*key, rows)),
    )


def _blocks(trial: str, text: str, rows: list[Row]) -> list[str]:
    rows = [row for row in rows if (row["trial"], row["text"]) == (trial, text)]
    dense = [row for row in rows if row["method"].startswith("dense")]
    rows = [row for row in rows if row not in dense]
    ratios = list(dict.fromkeys(row["ratio"] for row in rows))
    of = {(method_label(row), row["ratio"]): row for row in rows}
    removed = {row["ratio"]: row["effective_ratio"] for row in reversed(rows)}
    where = "" if text == LISTED else f", other text ({text})"
    stored = [
        f"{row['method']}, {row['bytes']:.3f} of bf16's bytes: {_nats(row)}, {_growth(row)}"
        for row in dense
    ]
    return [
        f"## {trial}{where}",
        f"Dense cross entropy {rows[0]['dense_ce']:.3f} over {rows[0]['tokens']:,} tokens. "
        + "; ".join(stored)
        + ".",
        table(
            ["method", *(f"{ratio:g} ({removed[ratio]:.3f} removed)" for ratio in ratios)],
            [
                [label, *(_cell(of.get((label, ratio))) for ratio in ratios)]
                for label in dict.fromkeys(map(method_label, rows))
            ],
        ),
    ]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{_nats(row)}, {row['kl_quotient']:.2f}x, {_growth(row)}"


def _nats(row: Row) -> str:
    return f"{row['kl']:.3g} ± {row['kl_error']:.1g}"


def _growth(row: Row) -> str:
    return f"{row['ce'] - row['dense_ce']:+.3g}"
