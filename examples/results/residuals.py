"""docs/gallery/residuals.md: a coarse matrix and a low-rank correction next to finer matrices."""

from selection import Row, document
from writing import MARK, page, table

from benchmarks.residuals import label


def residuals_page() -> str:
    """A table a model and text, by bytes."""
    rows: list[Row] = document("residuals") or []
    texts = dict.fromkeys((row["trial"], row["text"]) for row in rows)
    least = min((row["quotient"] for row in rows if row["rank"] and row["quotient"]), default=1.0)
    return page(
        MARK,
        "# Rank and bits at equal bytes",
        "Measured: all Linears of the layers of the [two models](divergence.md), calibrated on "
        "16,384 tokens. `int2 + rank 8` is y = x Q + (x u) v, u and v in int8: the best correction "
        "of what rounding left, in the metric of the inputs; with *rounds*, the best of as many in "
        "which Q is rounded again, of what u v leaves. g128: rows that share a scale. int2, int3 "
        "and int5 are rounded to, not stored. The quotient is by the best of dense int2, int3, "
        "int4, int5, int8 and fp8 at as many bytes, log-linear between them. Corrected matrices "
        f"diverge at least **{least:.1f}x** as much. `auto` is `--storage auto --budget bytes`, of "
        "fp8, int8, int4, bfloat16 and pairs of each: where int5 and int3 would do, it has none. "
        "*Narrower*: so much of it by narrower MLPs, as `--compare` tries.",
        *(block for key in texts for block in _blocks(*key, rows)),
    )


def _blocks(trial: str, text: str, rows: list[Row]) -> list[str]:
    shown = [row for row in rows if (row["trial"], row["text"]) == (trial, text)]
    return [
        f"## {trial}, {text}",
        table(
            ["what", "bytes, of bf16's", "KL, nats a token", "quotient"],
            [_cells(row) for row in sorted(shown, key=lambda row: row["bytes"])],
        ),
    ]


def _cells(row: Row) -> list[str]:
    quotient = row["quotient"]
    return [
        label(row),
        f"{row['bytes']:.3f}",
        f"{row['kl']:.3g} ± {row['kl_error']:.1g}",
        "" if quotient is None else f"{quotient:.3g}x",
    ]
