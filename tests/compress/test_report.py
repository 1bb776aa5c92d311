"""CompressionReport: what it computes, and which records are refused."""

import copy
import json

import pytest
from toys import causal_lm

from neuronmm_ops import CompressionReport, SVDConfig, compress_


@pytest.fixture(scope="module")
def report() -> CompressionReport:
    return compress_(causal_lm(), SVDConfig(ratio=0.3, block=8, method="plain"))


def test_json_round_trip(report):
    assert CompressionReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_records_without_the_model_s_size_still_load(report):
    record = report.to_dict()
    del record["model_parameters"], record["model_ratio"]
    old = CompressionReport.from_dict(record)
    assert old.model_parameters is None
    assert old.model_ratio is None
    assert old.effective_ratio == report.effective_ratio


def test_a_layer_listed_twice_is_refused(report):
    record = copy.deepcopy(report.to_dict())
    record["layers"].append(record["layers"][0])
    with pytest.raises(ValueError, match=r"once, got model\.layers\.0\.mlp\.gate_proj 2 times"):
        CompressionReport.from_dict(record)


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_a_size_that_is_no_count_is_refused(report, value):
    with pytest.raises(ValueError, match="model_parameters must be a positive integer"):
        CompressionReport.from_dict({**report.to_dict(), "model_parameters": value})
