"""CompressionReport: what it computes, and which records are refused."""

import copy
import json
import re

import pytest
from toys import causal_lm

from neuronmm_ops import CompressionReport, LeftDense, SVDConfig, compress_


@pytest.fixture(scope="module")
def report():
    return compress_(
        causal_lm(), SVDConfig(ratio=0.3, block=8, method="plain", allocation="uniform")
    )


def test_json_round_trip(report):
    assert CompressionReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_records_of_earlier_versions_still_load(report):
    record = report.to_dict()
    for name in ("model_parameters", "model_ratio", "left_dense"):
        del record[name]
    old = CompressionReport.from_dict(record)
    assert old.model_parameters is old.model_ratio is None
    assert old.left_dense == ()
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


LEFT = {"name": "experts.up_proj", "parameters": 8, "share": 0.25, "reason": "a stack"}


def test_what_was_left_dense_is_read_back(report):
    assert report.left_dense == ()
    read = CompressionReport.from_dict({**report.to_dict(), "left_dense": [LEFT]})
    assert read.left_dense == (LeftDense(**LEFT),)
    assert CompressionReport.from_dict(json.loads(json.dumps(read.to_dict()))) == read


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "left_dense must be a list, got None"),
        ({}, "left_dense must be a list"),
        (["experts"], "left_dense must list objects of name, parameters, share, reason"),
        ([{**LEFT, "r": 4}], "left_dense must list objects of"),
        ([{"name": "experts"}], "left_dense must list objects of"),
        ([{**LEFT, "name": 4}], "name and reason must be texts"),
        ([{**LEFT, "reason": None}], "name and reason must be texts"),
        ([{**LEFT, "parameters": 0}], "parameters must be a positive integer, got 0"),
        ([{**LEFT, "parameters": True}], "parameters must be a positive integer"),
        ([{**LEFT, "share": 0}], "share must be a number in (0, 1], got 0"),
        ([{**LEFT, "share": 1.5}], "share must be a number in (0, 1], got 1.5"),
        ([{**LEFT, "share": float("nan")}], "share must be a number in (0, 1], got nan"),
        ([{**LEFT, "share": "all"}], "share must be a number in (0, 1], got 'all'"),
    ],
)
def test_what_was_left_dense_is_checked(report, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        CompressionReport.from_dict({**report.to_dict(), "left_dense": value})
