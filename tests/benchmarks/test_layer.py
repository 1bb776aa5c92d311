"""`python benchmarks layer`: a decoder layer in one launch beside separate ones."""

import json

import pytest

from benchmarks import layer
from neuronmm_ops.estimate.one_launch import layers_cost


@pytest.mark.parametrize("ratio", [0.0, 0.2])
@pytest.mark.parametrize("lnc", [1, 2])
def test_one_launch_is_quicker_than_separate_ones(ratio, lnc):
    row = layer.row(layer.ModelledLayer("Qwen3-0.6B", "", ratio, lnc))
    assert row["bound_ms"] < row["more_ms"] < 1.01 * row["one_ms"] < row["separate_ms"]
    assert row["launches"] == 6
    for name in ("more", "one", "separate"):
        low, high = row[f"{name}_range_ms"]
        assert low <= row[f"{name}_ms"] <= high


def test_no_table_of_a_function_is_waited_for():
    """Another layer took 67.9 us when norms and activations waited for ScalarE's tables."""
    row = layer.row(layer.ModelledLayer("Qwen3-0.6B", "", 0.2, 2))
    assert row["more_ms"] < 0.0655


def test_a_layer_reads_its_weights_and_its_cache_once():
    decoder = layer.ModelledLayer("Qwen3-0.6B", "", 0.2, 1).decoder()
    weights = sum(decoder.kinds[0].linears[name].bytes for name in decoder.whole.projections)
    cache = 2 * 2 * decoder.whole.kv_heads * layer.TOKENS * decoder.whole.head_dim
    cost, _ = layers_cost(decoder, {layer.TOKENS: 1.0})
    assert weights + cache < cost.hbm_bytes < 1.01 * (weights + cache)


def test_the_command(run, monkeypatch):
    monkeypatch.setattr(layer, "CASES", (("Qwen3-0.6B", "", 0.2),))
    rows = json.loads(run("layer", "--json").out)
    assert [(row["ratio"], row["lnc"]) for row in rows] == [(0, 1), (0, 2), (0.2, 1), (0.2, 2)]
    shown = run("layer").out
    assert "Modelled us of a layer on trn2, 2048 tokens of cache" in " ".join(shown.split())
