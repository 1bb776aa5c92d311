"""`bench model --draft`: what a draft wins a dense model."""

import pytest
from tiny_model import SHORT, run

from neuronmm_ops.estimate import one_launch, passes, speculation
from neuronmm_ops.estimate.ends import ENDS
from neuronmm_ops.estimate.served import TOKEN_US
from neuronmm_ops.estimate.speculation import expected_tokens
from neuronmm_ops.estimate.subject import Options, prepared


@pytest.fixture(scope="module")
def found(tiny):
    return {n: run(tiny, **SHORT, draft=n)["draft"] for n in ("1", "2")}


def test_a_round_is_the_drafted_tokens_and_the_pass_that_verifies_them(found):
    draft = found["1"]
    assert draft["layers"] == 1
    for row, a in zip(draft["rows"], speculation.ACCEPTANCES, strict=True):
        k = row["tokens_ahead"]
        ms = k * draft["draft_ms"] + draft["model_ms"][k + 1]
        tokens = (1 - a ** (k + 1)) / (1 - a)
        assert row["acceptance"] == a
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / ms)
        ratio, speedup = tokens * draft["model_ms"][1] / ms, row["speedup"]
        assert speedup["low"] <= speedup["middle"] <= speedup["high"]
        assert speedup["low"] <= ratio * (1 + 1e-9)
        assert ratio <= speedup["high"] * (1 + 1e-9)
        most = [
            max(
                expected_tokens(a, k)
                * (draft["model_ms"][1] + rest)
                / (k * (draft["draft_ms"] + of_draft) + draft["model_ms"][k + 1] + rest)
                for k in speculation.AHEAD
            )
            for rest in [TOKEN_US.middle / 1e3]
            for of_draft in (rest, 0.0)
        ]
        assert [row["as_served"][end] for end in ("low", "high")] == pytest.approx(most)
    wins = [row["speedup"]["middle"] for row in draft["rows"]]
    assert wins == sorted(wins)


def test_fewer_layers_win_more(found):
    one, two = found["1"], found["2"]
    assert one["draft_ms"] < two["draft_ms"]
    assert one["model_ms"] == two["model_ms"]
    for few, many in zip(one["rows"], two["rows"], strict=True):
        assert few["speedup"]["middle"] > many["speedup"]["middle"]


def test_a_dense_model_drafts_for_a_greater_one(tiny, found):
    own = run(tiny, **SHORT, draft=tiny)["draft"]
    assert (own["name"], own["layers"]) == (tiny, 2)
    assert own["draft_ms"] == own["model_ms"][1] != found["2"]["draft_ms"]


def test_layers_that_share_no_launch_have_launches_of_their_own(tiny):
    options = Options(target="trn2", storage="fp8", targets=("up_proj",))
    apart = prepared(tiny, options).decoders["low_rank"]
    assert one_launch.refusal(apart)
    one, three = [speculation.pass_times(apart, tokens, 40) for tokens in (1, 3)]
    assert [*one] == [*ENDS]
    assert all(three[end] > one[end] for end in ENDS)
    assert one == pytest.approx(passes.pass_of(apart, 1, {41: 1.0})["times_ms"])


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("0", "a draft has 1 to 2 layers of its model, got 0"),
        ("3", "a draft has 1 to 2 layers of its model, got 3"),
        ("Llama-3.2-1B", "a draft has its model's vocabulary: Llama-3.2-1B has 128256 tokens"),
        ("nowhere", "model must be a directory, a config.json or a known name"),
    ],
)
def test_refusals(tiny, draft, words):
    with pytest.raises(ValueError, match=words):
        run(tiny, **SHORT, draft=draft)
