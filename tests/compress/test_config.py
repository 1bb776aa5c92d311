"""SVDConfig: what it accepts, and that JSON gives the same config back."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronmm_ops import SVDConfig

configs = st.builds(
    SVDConfig,
    ratio=st.floats(0, 1, exclude_min=True, exclude_max=True),
    block=st.integers(1, 512).map(lambda n: 8 * n),
    alpha=st.one_of(st.floats(0, 1), st.integers(0, 1)),
    targets=st.one_of(
        st.sampled_from(["mlp", "attention", "all-linear", "lm_head", r".*\.(q|k)_proj"]),
        st.lists(st.from_regex(r"\A[a-z_.]{1,12}\Z"), min_size=1, max_size=3),
        st.lists(st.from_regex(r"\A[a-z_.]{1,12}\Z"), min_size=1, max_size=3).map(tuple),
    ),
    method=st.sampled_from(["plain", "whiten", "swift"]),
)


@given(configs)
def test_json_round_trip(config):
    again = SVDConfig.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()
    assert hash(again) == hash(config)
    assert SVDConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_document():
    assert SVDConfig().to_dict() == {
        "version": 1,
        "ratio": 0.2,
        "block": 128,
        "alpha": 0.5,
        "targets": ["mlp"],
        "method": "swift",
    }


def test_one_target_can_be_given_bare():
    assert SVDConfig(targets="mlp") == SVDConfig(targets=("mlp",)) == SVDConfig(targets=["mlp"])
    assert SVDConfig(targets="mlp").target_list == ("mlp",)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SVDConfig().ratio = 0.5


BAD = [
    ("ratio", 0, ValueError, "ratio must be in (0, 1), the fraction of parameters removed; got 0"),
    ("ratio", 1.0, ValueError, "got 1.0"),
    ("ratio", -0.1, ValueError, "got -0.1"),
    ("ratio", 20, ValueError, "got 20"),
    ("ratio", math.nan, ValueError, "got nan"),
    ("ratio", "0.2", TypeError, "ratio must be a number, got '0.2'"),
    ("ratio", None, TypeError, "ratio must be a number, got None"),
    ("ratio", True, TypeError, "ratio must be a number, got True"),
    ("block", 0, ValueError, "block must be a positive multiple of 8, got 0"),
    ("block", -8, ValueError, "got -8"),
    ("block", 100, ValueError, "got 100"),
    ("block", 128.0, TypeError, "block must be an integer, got 128.0"),
    ("block", True, TypeError, "block must be an integer, got True"),
    ("block", "128", TypeError, "block must be an integer, got '128'"),
    ("alpha", -0.1, ValueError, "alpha must be in [0, 1], got -0.1"),
    ("alpha", 1.5, ValueError, "got 1.5"),
    ("alpha", math.nan, ValueError, "got nan"),
    ("alpha", math.inf, ValueError, "got inf"),
    ("alpha", "half", TypeError, "alpha must be a number, got 'half'"),
    ("method", "svd", ValueError, "method must be one of plain, whiten, swift; got 'svd'"),
    ("method", None, ValueError, "got None"),
    ("targets", (), ValueError, "targets must name at least one"),
    ("targets", "", TypeError, "targets must be non-empty strings, got ''"),
    ("targets", ("mlp", ""), TypeError, "got ''"),
    ("targets", ("mlp", 3), TypeError, "got 3"),
    ("targets", None, TypeError, ""),
    ("targets", 5, TypeError, ""),
    ("targets", "(", ValueError, "target '(' is no regular expression"),
]


@pytest.mark.parametrize(("field", "value", "error", "message"), BAD)
def test_every_bad_value_is_refused(field, value, error, message):
    with pytest.raises(error) as caught:
        SVDConfig(**{field: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(error):
        SVDConfig.from_dict({**SVDConfig().to_dict(), field: value})


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="no field 'rank'; its fields are ratio, block"):
        SVDConfig.from_dict({**SVDConfig().to_dict(), "rank": 8})


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused(version):
    with pytest.raises(ValueError, match=f"version must be 1, got {version!r}"):
        SVDConfig.from_dict({**SVDConfig().to_dict(), "version": version})


def test_a_missing_version_is_refused():
    with pytest.raises(ValueError, match="version must be 1, got None"):
        SVDConfig.from_dict({"ratio": 0.2})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"mlp"', "null"])
def test_other_documents_are_refused(text):
    with pytest.raises(ValueError, match=r"JSON object|Expecting"):
        SVDConfig.from_json(text)
