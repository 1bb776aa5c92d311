"""Rows, gamma, and what people read: Markdown and HTML."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronmm_ops import SVDConfig
from neuronmm_ops.recover import RecoverConfig
from neuronmm_ops.reproduce import config as c
from neuronmm_ops.reproduce.cells import Cell
from neuronmm_ops.reproduce.plan import Study, Variant
from neuronmm_ops.reproduce.published import published, published_for
from neuronmm_ops.reproduce.render import markdown, page
from neuronmm_ops.reproduce.table import document_of, gamma

TITLE = 'A | "title" <script>alert(1)</script> & *more*\n# not a heading'


def test_gamma_by_hand():
    assert gamma(0.05, 1.5) == pytest.approx(0.1)
    assert gamma(0.0525, 1.21) == pytest.approx(0.25)
    assert gamma(0.03, 1.74) == pytest.approx(0.03 / 0.74)
    assert gamma(-0.01, 2.0) == pytest.approx(-0.01)
    assert gamma(0.0, 1.1) == 0
    for speedup in (1.0, 0.9, None):
        assert gamma(0.05, speedup) is None
    assert gamma(None, 2.0) is None


def cells(name: str) -> tuple[Cell, ...]:
    return (
        Cell("perplexity", name, {"of": name, "text": 0}, "wikitext2"),
        Cell("task", name, {"of": name, "task": 0}, "piqa"),
        Cell("task", name, {"of": name, "task": 1}, "arc_easy"),
        Cell("task", name, {"of": name, "task": 2}, "lambada"),
    )


def variants() -> tuple[Variant, ...]:
    step = Cell("compress", "a|b 0.2", {"of": "dense"})
    times = Cell("modelled", "mlp 0.2", {"ratio": 0.2}), Cell("measured", "a|b 0.2", {"of": "a"})
    config = SVDConfig(ratio=0.2)
    return (
        Variant("dense", None, None, False, (), cells("dense")),
        Variant("a|b 0.2", "a|b", config, False, (step,), (*cells("a|b 0.2"), *times)),
    )


def reproduction(**changes: Any) -> c.Reproduction:
    fields: dict[str, Any] = {
        "title": TITLE,
        "model": c.Model("org/name"),
        "compress": c.Compress(ratios=(0.2,), calibration="a.txt"),
        "methods": {"a|b": SVDConfig()},
        "evaluate": c.Evaluate(
            texts=("wikitext2",), tasks=("piqa", "arc_easy", "lambada"), limit=5
        ),
        "recovery": c.Recovery("b.txt", RecoverConfig(steps=3)),
        "modelled": c.Modelled(),
        "measured": c.Measured(),
        "published": "Llama-3.2-1B",
    }
    return c.Reproduction(**{**fields, **changes})


def results(speed: float = 1.5) -> dict[str, dict[str, Any]]:
    """Results by hand: 0.7 and 0.65 of 0.75 are right, and two thirds of the time are taken."""
    dense, low = variants()
    found: dict[str, dict[str, Any]] = {}
    for variant, ppl, scores in ((dense, 8.0, (0.8, 0.6)), (low, 9.5, (0.75, 0.55))):
        found[variant.cells[0].key] = {"ppl_token": ppl}
        for cell, score in zip(variant.cells[1:4], (*scores, None), strict=True):
            found[cell.key] = {"accuracy": score}
    found[low.steps[0].key] = {"effective_ratio": 0.219, "bytes": 781, "dense_bytes": 1000}
    times = [("dense", 100 * speed, 1.0), ("low_rank", 100.0, 2.0)]
    rates = {"tokens_per_s": 1.8, "tokens_per_s_low": 1.7, "tokens_per_s_high": 1.9}
    served = {"middle": 1.4, "low": 1.2, "high": 1.45}
    found[low.cells[4].key] = {
        "variants": [
            {"name": name, "end_to_end_ms": ms, "tokens_per_s": rate}
            | {"phases": {"decode": {"as_served": rates}}}
            for name, ms, rate in times
        ],
        "speedups": {
            "ours": {
                "end_to_end": {"middle": speed, "low": speed, "high": 1.25 * speed},
                "decode": {"as_served": served},
            }
        },
        "left_out": ["the host"],
    }
    found[low.cells[5].key] = {"speedup": {"prefill": 1.0, "decode": 1.0, "end_to_end": 1.25}}
    return found


def document(speed: float = 1.5, **changes: Any) -> dict[str, Any]:
    planned = Study(variants(), ("x recovered: because",), None, None, {"sha256": "0"})
    asked = reproduction(**changes)
    return document_of(asked, planned, results(speed), set(), {}, set())


def test_rows():
    found = json.loads(json.dumps(document(), allow_nan=False))
    dense, low = found["rows"]
    assert dense["ppl"] == {"wikitext2": 8.0}
    assert low["ppl"] == {"wikitext2": 9.5}
    # lambada has no accuracy, and so no part in the mean.
    assert low["accuracy"] == {"piqa": 0.75, "arc_easy": 0.55, "lambada": None}
    assert dense["mean_accuracy"] == pytest.approx(0.7)
    assert low["mean_accuracy"] == pytest.approx(0.65)
    assert low["accuracy_drop"] == pytest.approx(0.05)
    assert low["modelled"]["speedup"] == pytest.approx(1.5)
    assert low["gamma_modelled"] == pytest.approx(0.1)
    assert low["gamma_measured"] == pytest.approx(0.2)
    assert dense["modelled"]["end_to_end_ms"] == pytest.approx(150)
    assert dense["modelled"]["speedup"] == 1
    assert dense["gamma_modelled"] is None
    others = dict.fromkeys(("reused", "failed", "not run", "to do"), 0)
    assert found["counts"] == {"cells": 11, "computed": 11, **others}


def test_a_row_without_all_accuracies_has_no_mean():
    known = results()
    dense, low = variants()
    del known[low.cells[1].key]
    planned = Study((dense, low), (), None, None, {"sha256": "0"})
    failed = {low.cells[1].key: "why"}
    found = document_of(reproduction(), planned, known, {dense.cells[0].key}, failed, set())
    assert found["rows"][1]["mean_accuracy"] is None
    assert found["rows"][1]["gamma_modelled"] is None
    assert found["counts"]["failed"] == found["counts"]["reused"] == 1
    assert "| task a\\|b 0.2 piqa | failed | why |" in markdown(found)


def table_of(text: str, heading: str) -> list[list[str]]:
    """Return the cells of a Markdown table, split where a bar is not escaped."""
    lines = text.partition(f"## {heading}")[2].partition("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]


def test_markdown():
    text = markdown(document())
    assert text.startswith('# A \\| "title" \\<script\\>alert(1)\\</script\\> & \\*more\\* \\# not')
    rows = table_of(text, "Our results")
    assert len({len(row) for row in rows}) == 1
    head, _, dense, low = [[cell.strip() for cell in row] for row in rows]
    shown = dict(zip(head, low, strict=True))
    assert (
        shown.items()
        >= {
            "model": "a\\|b 0.2",
            "wikitext2 PPL": "9.50",
            "bytes": "0.781",
            "mean %": "65.00",
            "speed-up": "1.50x",
            "its range": "1.50-1.88x",
            "as served": "1.8 (1.7-1.9)",
            "decode as served": "1.40x (1.20-1.45x)",
            "published setting": "",
            "lambada %": "",
            "gamma %": "10.00",
            "gamma % measured": "20.00",
        }.items()
    )
    assert dict(zip(head, dense, strict=True))["gamma %"] == ""
    notes = ("our reading", "Modelled: 2048 prompt", "As served: ", "Measured: on cpu")
    for words in (*notes, "the host", "3 steps"):
        assert words in text
    assert all(len(row) == 7 for row in table_of(text, "Published by others"))


def test_gamma_is_undefined_where_nothing_is_faster():
    low = table_of(markdown(document(speed=0.9)), "Our results")[3]
    assert "undefined" in [cell.strip() for cell in low]


class Checked(HTMLParser):
    """Collects tags, and fails where they do not close in order."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onclick"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html():
    text = page(document())
    parsed = Checked()
    parsed.feed(text)
    assert parsed.open == []
    assert "script" not in parsed.tags
    assert TITLE in parsed.text
    assert parsed.text.count("a|b 0.2") == 1
    assert "url(" not in text
    assert "@import" not in text


@given(st.text(max_size=40))
def test_any_title_is_escaped(title):
    found = document(title=title, published=None)
    parsed = Checked()
    parsed.feed(page(found))
    assert parsed.open == []
    assert parsed.tags.count("h1") == 1
    assert "script" not in parsed.tags
    lines = markdown(found).splitlines()
    assert sum(line.startswith("#") for line in lines) == 2


def test_every_published_number_has_its_source():
    for number in published():
        fields = ["model", "what", "method", "ratio", "value", "unit", "source", "note"]
        assert list(number) == fields
        assert set(number["source"]) == {"title", "url", "kind"}
        assert number["source"]["kind"] in ("authors", "second hand", "users")
        assert isinstance(number["value"], (int, float))
        assert number["ratio"] is None or 0 <= number["ratio"] < 1


def test_published_numbers_are_of_the_model_or_of_no_named_one():
    found = published_for("Qwen3-1.7B")
    assert {number["model"] for number in found} == {None, "Qwen3-1.7B"}
    assert [n["value"] for n in found if n["model"]] == [1.74, 0.03]
    assert published_for(None) == []
    assert document(published=None)["published"] == []
