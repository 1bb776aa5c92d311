"""Weights that take the place of a running model's, and models that draft for another."""

import pytest
from lowrank import PROMPTS, RANKS, TOKENS, greedy, low_rank, written
from offline import generated

pytestmark = pytest.mark.slow

MEMBERS = {name: RANKS[name] for name in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")}
CHECKPOINTS = {
    "packed": {"attention_bias": True, "mlp_bias": True, "ranks": MEMBERS},
    "in place": {"family": "qwen2", "storage": "int8"},
    "not packed": {"ranks": MEMBERS},
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """vLLM's tokens of every run, and Transformers' of every checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    runs, expected = written(folder, {**CHECKPOINTS, "dense": {"ranks": {}}})
    for name, options in CHECKPOINTS.items():
        own, other = folder / name, folder / f"{name}, another"
        expected[other.name] = greedy(low_rank(other, initializer_range=0.3, **options), PROMPTS)
        runs[name]["reload"] = [other, own, f"+{other}", f"~{own}", f"~{other}"]
    runs["not packed"]["packs"] = False
    low_rank(folder / "draft")
    draft = {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": 3}
    runs["dense"]["speculative_config"] = draft
    return generated(runs, PROMPTS, TOKENS), expected


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_are_those_of_the_weights_loaded_last(one_process, name):
    found, expected = one_process
    assert found[name].get("tokens") == expected[name], found[name].get("error")
    another = expected[f"{name}, another"]
    assert another != expected[name]
    assert found[name]["reloaded"] == [another, expected[name], another, expected[name], another]


def test_a_low_rank_draft_changes_no_token(one_process):
    found, expected = one_process
    assert found["dense"].get("tokens") == expected["dense"], found["dense"].get("error")
