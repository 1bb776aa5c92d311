"""`python benchmarks simulator`: what it measures, at small sizes."""

import json

import pytest

from benchmarks import simulator
from neuronmm_ops.plan import plan_xuv


@pytest.fixture
def small(monkeypatch):
    """Sizes that take no time; nothing is asserted of speed."""
    monkeypatch.setattr(simulator, "TILED", {"tiled": (128, 256, 1024)})
    monkeypatch.setattr(simulator, "VALUES", {"tiled": (256, 128, 1024)})
    monkeypatch.setattr(simulator, "LONG", (256, 128, 1024))
    monkeypatch.setattr(simulator, "STREAMED", 1 << 26)
    plan = {"xuv": lambda: plan_xuv(128, 256, 128, 256, target="trn2")}
    monkeypatch.setattr(simulator, "PLANNED", plan)


def test_the_command(run, small, monkeypatch):
    found = json.loads(run("simulator", "--json").out)
    tiled = found["traces"][0]
    assert (tiled["instructions"], tiled["dmas_per_matmul"]) == (2 * 2 * 5, 3)
    assert found["traces"][1]["instructions"] > 10
    (values,) = found["values"]
    assert values["same_values"]
    assert [row["mode"] for row in found["long"]] == ["trace", "execute"]
    assert found["long"][0]["time_ms"] == found["long"][1]["time_ms"]
    (memory,) = found["memory"]
    assert memory["streamed_bytes"] >= 1 << 26
    assert memory["peak_bytes"] < 2 * memory["live_bytes"]
    monkeypatch.setattr(simulator, "run", lambda progress: found)
    shown = run("simulator").out
    assert "Trace and schedule" in shown
    assert "through SBUF" in shown
