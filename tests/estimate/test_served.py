"""`estimate.served`: the cost of a launch is that of committed data, and is added to each."""

import json
from pathlib import Path
from statistics import linear_regression, median_high

import pytest
from tiny_model import SHORT, by_name, run

from neuroncore.hardware import DMA_MODELS
from neuronmm_ops.estimate.served import (
    FURTHER_US,
    LAUNCH_US,
    TOKEN_US,
    as_served,
    speedup_as_served,
)

DATA = Path(__file__).parents[2] / "docs" / "results" / "published.json"


def bounds(phase):
    (found,) = json.loads(DATA.read_text())["runs"]
    rows = [row for row in found["document"] if row["measure"] == "bound"]
    return [row for row in rows if row["name"].endswith(phase)]


def test_the_cost_is_what_published_times_have_beyond_ours():
    costs = [row["launch_us"] for row in bounds("decode")]
    found = [round(us, 1) for us in (min(costs), median_high(costs), max(costs))]
    assert found == list(LAUNCH_US), "set LAUNCH_US to what docs/results/published.json gives"
    least, further, most = [
        [row["launch_us"] - token_us / row["launches"] for row in bounds("decode")]
        for token_us in TOKEN_US
    ]
    found = [round(us, 1) for us in (min(least), median_high(further), max(most))]
    assert found == list(FURTHER_US), "set FURTHER_US to what docs/results/published.json gives"


def test_published_times_ask_for_a_cost_of_a_token_too():
    """Least squares: what another source says of a token whose layers share one launch."""
    rows = bounds("decode")
    launches = [row["launches"] for row in rows]
    rests_us = [row["launches"] * row["launch_us"] for row in rows]
    launch_us, token_us = linear_regression(launches, rests_us)
    assert token_us == pytest.approx(TOKEN_US.middle, rel=0.2)
    assert FURTHER_US.low < launch_us < FURTHER_US.high


def test_no_cost_of_a_launch_explains_prefill():
    """On the shortest prompts it is more than decode's of the same run, and it grows."""
    decode, prefill = (
        {row["name"].partition(": ")[0]: row["launch_us"] for row in bounds(phase)}
        for phase in ("decode", "prefill")
    )
    short = [name for name in prefill if ", 128+" in name]
    assert short
    assert all(prefill[name] > decode[name] for name in short)
    assert max(prefill.values()) > 10 * LAUNCH_US.high


def decode(launches, *times_ms):
    ends = (*DMA_MODELS, "instruction-order")
    times = dict(zip(ends, (*times_ms, times_ms[0]), strict=True))
    return {"launches": launches, "times_ms": times, "time_ms": times_ms[0]}


def test_times_by_hand():
    costs = zip(TOKEN_US, FURTHER_US, strict=True)
    low, middle, high = (token / 1e3 + 100 * launch / 1e3 for token, launch in costs)
    found = as_served(decode(100, 5.0, 4.0), batch=2)
    assert found == pytest.approx(
        {
            "time_ms": 5 + middle,
            "time_low_ms": 4 + low,
            "time_high_ms": 5 + high,
            "tokens_per_s": 2000 / (5 + middle),
            "tokens_per_s_low": 2000 / (5 + high),
            "tokens_per_s_high": 2000 / (4 + low),
        }
    )


def test_equal_costs_shrink_a_speed_up_and_more_launches_may_end_it():
    dense, low = decode(100, 6.0, 6.0), decode(100, 4.0, 5.0)
    found = speedup_as_served(low, dense)
    assert 1 < found["low"] < found["middle"] < found["high"] < 6 / 4
    added = (TOKEN_US.middle + 100 * FURTHER_US.middle) / 1e3
    both = (6 + added) / (4 + added) * (6 + added) / (5 + added)
    assert found["middle"] ** 2 == pytest.approx(both)
    assert speedup_as_served(decode(4000, 4.0, 5.0), dense)["middle"] < 1


def test_documents_have_both(tiny):
    document = run(tiny, **SHORT, batch=2)
    assert document["launch_us"] == FURTHER_US._asdict()
    assert document["token_us"] == TOKEN_US._asdict()
    rows = by_name(document["variants"])
    decodes = {name: row["phases"]["decode"] for name, row in rows.items()}
    for row in rows.values():
        assert row["phases"]["decode"]["as_served"] == as_served(row["phases"]["decode"], 2)
        assert "as_served" not in row["phases"]["prefill"]
    for ratio in document["speedups"].values():
        wanted = speedup_as_served(decodes[ratio["of"]], decodes[ratio["over"]])
        assert ratio["decode"]["as_served"] == wanted
        assert "as_served" not in ratio["end_to_end"]
