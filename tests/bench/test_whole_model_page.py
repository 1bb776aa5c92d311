"""What docs/whole-model.md says of tensor parallelism is what `bench.model` says."""

import re
from pathlib import Path

import pytest

from neuronmm_ops.bench import model
from neuronmm_ops.bench.exchange import Links
from neuronmm_ops.bench.layouts import exchanged, held_bytes
from neuronmm_ops.bench.linears import MLP, divided, linears
from neuronmm_ops.models import SHAPES

PAGE = Path(__file__).parents[2] / "docs" / "whole-model.md"
SPOKEN = {"all_reduce": "sum", "all_gather": "gather", "reduce_scatter": "scattered sum"}


def rows_of(heading, columns):
    """The cells of the table rows of a section that have so many columns, without its head."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) == columns and row[1] != "layout" and row[0] != "model"]


EXCHANGES = rows_of("What the collective of [M, r] saves", 10)
SPEEDUPS = rows_of("What low rank brings", 9)


def test_the_tables_are_there():
    assert len(EXCHANGES) == 2 * 5
    assert len(SPEEDUPS) == 12 + 10


@pytest.mark.parametrize("row", EXCHANGES, ids=lambda row: f"{row[1]} {row[0]}")
def test_bytes_and_links(row):
    tp, layout, spoken, one_kb, one_us, _, prompt_mb, prompt_us, _, weights_mb = row
    shape, layout, tp = SHAPES["Llama-3.1-70B"], layout.strip("`"), int(tp)
    own = divided(shape, tp).projections
    whole = linears(shape, () if layout == "dense" else MLP, ratio=0.2)
    rank, links = whole["up_proj"].r or 0, Links("trn2", 2, tp)
    sent = {
        M: exchanged(links, "gate_up", layout, M, 2 * rank, own["up_proj"][1])
        + exchanged(links, "down", layout, M, rank, shape.hidden_size)
        for M in (1, 2048)
    }
    assert ", ".join(f"{SPOKEN[c.kind]} [M, {c.N}]" for c in sent[1]) == spoken
    figures = [(one_kb, 1, 1e3, one_us), (prompt_mb, 2048, 1e6, prompt_us)]
    for printed_bytes, M, unit, printed_us in figures:
        assert float(printed_bytes) == pytest.approx(
            sum(c.wire_bytes for c in sent[M]) / unit, abs=0.05
        )
        assert float(printed_us) == pytest.approx(1e3 * sum(c.ms for c in sent[M]), rel=0.03)
    groups = {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}
    held = sum(
        held_bytes(group, [layout], whole[name]._replace(K=own[name][0], N=own[name][1]), tp)
        for name, group in groups.items()
    )
    assert float(weights_mb) == pytest.approx(held / 1e6, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("number", [11, 21])  # the quickest to trace: 8B on 32 ranks
def test_speedups(number):
    name, tp, ratio, dense_ms, prefill, decode, slow, _, _ = SPEEDUPS[number]
    lnc = 2 if number < 12 else 1
    options = model.Options(target="trn2", lnc=lnc, tp=int(tp), ratio=float(ratio))
    found = model.run(name, options)
    dense, low = found["variants"]
    assert f"{dense['phases']['decode']['time_ms']:.3g}" == dense_ms
    published = [v["phases"]["decode"]["published_collectives"]["times_ms"] for v in (dense, low)]
    ratios = [published[0][key] / published[1][key] for key in published[0]]
    ours = found["speedups"]["ours"]
    for printed, low_end, high_end in (
        (prefill, ours["prefill"]["low"], ours["prefill"]["high"]),
        (decode, ours["decode"]["low"], ours["decode"]["high"]),
        (slow, min(ratios), max(ratios)),
    ):
        ends = [float(end) for end in re.findall(r"([\d.]+)x", printed)]
        assert ends[0] == pytest.approx(low_end, abs=0.006)
        assert ends[-1] == pytest.approx(high_end, abs=0.006)
