"""SVDConfig: what it accepts, and that JSON gives the same config back."""

import dataclasses
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neuronmm_ops import SVDConfig
from neuronmm_ops.compress.methods import METHODS

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
    method=st.sampled_from(list(METHODS)),
    storage=st.sampled_from([None, "bf16", "fp8", "int8"]),
    layer_ratios=st.dictionaries(
        st.from_regex(r"\A[a-z_.]{1,12}\Z"),
        st.floats(0, 0.99) | st.tuples(st.floats(0, 0.4), st.floats(0.5, 0.99)),
        max_size=2,
    ),
)


@given(configs)
@example(SVDConfig(method="swift", importance="perplexity"))
@example(SVDConfig(budget="time", target="trn2", tokens={1: 0.8, 2048: 1}, lnc=2))
def test_json_round_trip(config):
    again = SVDConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.to_dict() == config.to_dict()
    assert hash(again) == hash(config)


def test_the_document():
    assert SVDConfig().to_dict() == {
        "version": 2,
        "ratio": 0.2,
        "block": 128,
        "alpha": 0.5,
        "targets": ["mlp"],
        "method": "kfac-drift",
        "allocation": "greedy",
        "importance": None,
        "budget": "parameters",
        "target": None,
        "tokens": 1,
        "lnc": 1,
        "tp": 1,
        "layer_ratios": {},
        "storage": None,
        "prune_share": 0.0,
        "head_storage": None,
    }


def test_a_document_of_a_version_without_storage_means_the_weights_dtype():
    document = SVDConfig(ratio=0.3).to_dict()
    del document["storage"]
    assert SVDConfig.from_dict(document) == SVDConfig(ratio=0.3)


@pytest.mark.parametrize("storage", [None, "bf16", "fp8", "int8"])
def test_storages(storage):
    assert SVDConfig(storage=storage).one_byte == (storage if storage != "bf16" else None)


def test_one_target_can_be_given_bare():
    assert SVDConfig(targets="mlp") == SVDConfig(targets=("mlp",)) == SVDConfig(targets=["mlp"])
    assert SVDConfig(targets="mlp").target_list == ("mlp",)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SVDConfig().ratio = 0.5


BAD = [
    ("storage", "int3", ValueError, "must be one of bf16, fp8, int8, int4, auto; got 'int3'"),
    ("ratio", 0, ValueError, "removed, or 0 with storage fp8 or int8 or int4; got 0"),
    ("head_storage", "bf16", ValueError, "head_storage must be one of fp8, int8, int4; got 'bf16'"),
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
    ("lnc", True, TypeError, "lnc must be an integer, got True"),
    ("lnc", 2, ValueError, "budget time alone has lnc, got 2 and parameters"),
    ("tp", 8, ValueError, "budget time alone has tp, got 8 and parameters"),
    ("tp", 0, ValueError, "tp must be at least 1 rank, got 0"),
    ("alpha", -0.1, ValueError, "alpha must be in [0, 1], got -0.1"),
    ("alpha", 1.5, ValueError, "got 1.5"),
    ("alpha", math.nan, ValueError, "got nan"),
    ("alpha", math.inf, ValueError, "got inf"),
    ("alpha", "half", TypeError, "alpha must be a number, got 'half'"),
    ("method", "svd", ValueError, f"one of {', '.join(METHODS)}; got 'svd'"),
    ("method", None, ValueError, "got None"),
    ("allocation", "best", ValueError, "allocation must be one of greedy, uniform; got 'best'"),
    ("importance", "loss", ValueError, "must be one of gradient, error, perplexity; got 'loss'"),
    ("budget", "flops", ValueError, "budget must be one of parameters, bytes, time; got 'flops'"),
    ("budget", "time", ValueError, "budget time needs a target (trn1, trn2 or trn3)"),
    ("target", "trn2", ValueError, "no other budget has one; got budget parameters and target"),
    ("tokens", 0, ValueError, "tokens must be a positive integer, got 0"),
    ("tokens", True, ValueError, "got True"),
    ("tokens", [[1, 0.8]], ValueError, "must be a positive integer, got [[1, 0.8]]"),
    ("tokens", {}, ValueError, "tokens must have at least one count"),
    ("tokens", {0: 0.8}, ValueError, "must be a positive integer, got {0: 0.8}"),
    *(
        ("tokens", {1: weight}, ValueError, "must be counts that differ, each with a positive")
        for weight in (0, -1, math.nan, math.inf, "1", True, None)
    ),
    ("tokens", {1: 1, "1": 1}, ValueError, "must be counts that differ"),
    ("layer_ratios", {"mlp": 1.0}, ValueError, "of mlp must be a number in [0, 1), or two such"),
    ("layer_ratios", {"mlp": (0.5, 0.2)}, ValueError, "in order; got (0.5, 0.2)"),
    ("layer_ratios", {"mlp": "half"}, ValueError, "got 'half'"),
    ("layer_ratios", {"(": 0.5}, ValueError, "target '(' is no regular expression"),
    ("targets", (), ValueError, "targets must name at least one"),
    ("targets", "", TypeError, "targets must be non-empty strings, got ''"),
    ("targets", ("mlp", ""), TypeError, "got ''"),
    ("targets", ("mlp", 3), TypeError, "got 3"),
    *(("targets", value, TypeError, "") for value in (None, 5)),
    ("targets", "(", ValueError, "target '(' is no regular expression"),
    *(
        ("targets", pattern, ValueError, "may take for ever")
        for pattern in ("([a-z.]+)+X", "x?" * 40, "(a|ab)*X")
    ),
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


@pytest.mark.parametrize("version", [{}, *({"version": v} for v in (0, 1, 3, "2", None))])
def test_another_version_or_none_is_refused(version):
    document = {name: value for name, value in SVDConfig().to_dict().items() if name != "version"}
    with pytest.raises(ValueError, match=f"version must be 2, got {version.get('version')!r}"):
        SVDConfig.from_dict({**document, **version})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "zero-sum", "importance": "error"}, "got 'error', zero-sum and greedy"),
        ({"allocation": "uniform", "importance": "gradient"}, "leave it out, or use another"),
        ({"tokens": 8}, "budget time alone has tokens, got 8 and parameters"),
    ],
)
def test_an_option_that_the_others_do_not_take_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SVDConfig(**options)
    with pytest.raises(ValueError, match=message):
        SVDConfig.from_dict({**SVDConfig().to_dict(), **options})


def test_a_target_is_known_by_any_of_its_names():
    assert SVDConfig(budget="time", target="gen3").target == "trn2"
    with pytest.raises(ValueError, match="target must be one of"):
        SVDConfig(budget="time", target="trn9")
    with pytest.raises(ValueError, match="lnc must be 1, or 2 on trn2 and trn3; got 2 on trn1"):
        SVDConfig(budget="time", target="trn1", lnc=2)
    with pytest.raises(ValueError, match="allocation uniform knows no budget in bytes; use greedy"):
        SVDConfig(budget="bytes", allocation="uniform")


def test_no_more_ranks_than_are_connected():
    """64 on trn2 with both cores; more ended in an internal error."""
    assert SVDConfig(budget="time", target="trn2", lnc=2, tp=64).tp == 64
    with pytest.raises(ValueError, match=r"tp must be at most 64, the ranks of lnc 2 .*; got 65"):
        SVDConfig(budget="time", target="trn2", lnc=2, tp=65)


@pytest.mark.parametrize(
    ("options", "weighs_by"),
    [
        ({}, None),  # kfac-drift's losses are the model's
        ({"importance": "gradient"}, None),
        ({"importance": "error"}, "error"),
        ({"method": "swift"}, "gradient"),
        ({"method": "plain"}, "error"),
        ({"method": "plain", "importance": "gradient"}, "gradient"),
        ({"method": "swift", "importance": "perplexity"}, "perplexity"),
        ({"method": "swift", "allocation": "uniform"}, None),
        ({"method": "zero-sum"}, None),
    ],
)
def test_what_losses_are_weighed_by(options, weighs_by):
    assert SVDConfig(**options).weighs_by == weighs_by
