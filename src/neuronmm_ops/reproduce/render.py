"""The document as people read it: sections of one table each, in Markdown and in HTML."""

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuronmm_ops.reproduce.cells import Store
from neuronmm_ops.reproduce.notes import notes

Row = Mapping[str, Any]
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
.scroll { overflow-x: auto; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .text td, .text th { text-align: left; white-space: normal; }
thead th { border-bottom: 2px solid #1b1f24; }
tbody tr + tr td { border-top: 1px solid #d8dee4; }
.note { color: #57606a; margin: .2rem 0; }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117; }
  thead th { border-color: #e6edf3; }
  tbody tr + tr td { border-color: #30363d; }
  .note { color: #9da7b1; }
}
"""


@dataclass(frozen=True)
class Section:
    """A table with its title and notes.

    Attributes:
        title: above it.
        columns: their heads.
        rows: of as many cells.
        notes: a line each, below it.
        is_text: whether the columns hold words.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    is_text: bool = False


def sections(document: Mapping[str, Any]) -> list[Section]:
    """Return what is shown of a document, in order."""
    tables = [_ours(document)]
    if document["published"]:
        tables.append(_published(document["published"]))
    bad = [cell for cell in document["cells"] if cell["status"] in ("failed", "not run")]
    if bad:
        rows = [(c["cell"], c["status"], c.get("error", "its model was not made")) for c in bad]
        tables.append(Section("Cells without a result", ("cell", "", "why"), rows, is_text=True))
    return tables


def write_tables(document: Mapping[str, Any], store: Store) -> None:
    """Write `results.json`, `table.md` and `report.html`."""
    store.write_text("results.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
    store.write_text("table.md", markdown(document))
    store.write_text("report.html", page(document))


def markdown(document: Mapping[str, Any]) -> str:
    """Return the document as Markdown."""
    parts = [f"# {_plain(document['title'])}"]
    for section in sections(document):
        rules = ["---" if section.is_text or not i else "---:" for i in range(len(section.columns))]
        rows = [_line(section.columns), f"| {' | '.join(rules)} |", *map(_line, section.rows)]
        parts += [f"## {_plain(section.title)}", "\n".join(rows)]
        parts += ["\n".join(f"- {_plain(note)}" for note in section.notes)] * bool(section.notes)
    return "\n\n".join(parts) + "\n"


def page(document: Mapping[str, Any]) -> str:
    """Return the document as an HTML page that needs no other file."""
    title = html.escape(document["title"])
    body = "\n".join(_html(section) for section in sections(document))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _ours(document: Mapping[str, Any]) -> Section:
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    columns = dict(_columns(rows))
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return Section(f"Our results: {document['model']['id']}", list(columns), cells, notes(document))


def _columns(rows: Sequence[Row]) -> Iterator[tuple[str, Callable[[Row], str]]]:
    """Yield the head of each column, and what a row has in it."""
    yield "model", lambda row: row["name"]
    yield "ratio", lambda row: _number(row["ratio"], "g")
    yield "effective", lambda row: _number(row["effective_ratio"], ".3f")
    yield "bytes", _bytes
    for text in rows[0]["ppl"]:
        name = text.rpartition("/")[2]
        yield f"{name} PPL", lambda row, text=text: _number(row["ppl"][text], ".2f")
    for task in rows[0]["accuracy"]:
        yield f"{task} %", lambda row, task=task: _percent(row["accuracy"][task])
    if rows[0]["accuracy"]:
        yield "mean %", lambda row: _percent(row["mean_accuracy"])
    if any(row["modelled"] for row in rows):
        yield "ms modelled", lambda row: _number(_modelled(row, "end_to_end_ms"), ".2f")
        yield "tokens/s", lambda row: _number(_modelled(row, "tokens_per_s"), ".1f")
        yield "as served", _served_rate
        yield "speed-up", lambda row: _number(_modelled(row, "speedup"), ".2f", "x")
        yield "its range", lambda row: _range(_modelled(row, "speedup_range"))
        yield "decode as served", _served_speedup
        yield "published setting", lambda row: _range(_modelled(row, "published_setting_range"))
        yield "gamma %", lambda row: _gamma(row, "modelled", _modelled(row, "speedup"))
    if any(row["measured"] for row in rows):
        yield "speed-up measured", lambda row: _number(_measured(row), ".2f", "x")
        yield "gamma % measured", lambda row: _gamma(row, "measured", _measured(row))


def _bytes(row: Row) -> str:
    if row["method"] is None:
        return "1.000"
    return "" if row["bytes"] is None else f"{row['bytes'] / row['dense_bytes']:.3f}"


def _modelled(row: Row, name: str) -> Any:
    return row["modelled"] and row["modelled"][name]


def _served_rate(row: Row) -> str:
    rate = _modelled(row, "as_served")
    if rate is None:
        return ""
    low, high = rate["tokens_per_s_low"], rate["tokens_per_s_high"]
    return f"{rate['tokens_per_s']:.1f} ({low:.1f}-{high:.1f})"


def _served_speedup(row: Row) -> str:
    speedup = _modelled(row, "decode_speedup_as_served")
    return "" if speedup is None else f"{speedup['middle']:.2f}x ({_range(speedup)})"


def _measured(row: Row) -> float | None:
    return row["measured"] and row["measured"]["speedup"]["end_to_end"]


def _published(numbers: Sequence[Mapping[str, Any]]) -> Section:
    rows = [
        (
            number["what"],
            number["method"],
            number["model"] or "not said",
            "not said" if number["ratio"] is None else f"{number['ratio']:g}",
            f"{number['value']} {number['unit']}".strip(),
            f"{number['source']['title']} ({number['source']['kind']})",
            number["note"],
        )
        for number in numbers
    ]
    columns = ("what", "method", "model", "ratio", "value", "source", "note")
    note = "None of these is ours; baselines, data and hardware differ from ours."
    return Section("Published by others", columns, rows, [note], is_text=True)


def _html(section: Section) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    kind = ' class="text"' if section.is_text else ""
    rows = "\n".join(line(row, "td") for row in section.rows)
    notes = "\n".join(f'<p class="note">{html.escape(note)}</p>' for note in section.notes)
    return (
        f"<h2>{html.escape(section.title)}</h2>\n"
        f'<div class="scroll"><table{kind}>\n<thead>{line(section.columns, "th")}</thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>\n{notes}"
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """Escape what Markdown would take for markup, in one line."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(text.split()))


def _gamma(row: Row, kind: str, speedup: float | None) -> str:
    is_undefined = row["accuracy_drop"] is not None and speedup is not None and speedup <= 1
    return "undefined" if is_undefined else _percent(row[f"gamma_{kind}"])


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def _range(ends: Mapping[str, float] | None) -> str:
    return "" if ends is None else f"{ends['low']:.2f}-{ends['high']:.2f}x"
