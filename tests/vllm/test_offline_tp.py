"""Two processes of vLLM's give the tokens of Transformers' one."""

import pytest
from lowrank import PROMPTS, RANKS, TOKENS, adapted_, greedy, low_rank
from offline import generated

pytestmark = pytest.mark.slow

BOTH = {"tensor_parallel_size": 2}
ONE = {**BOTH, "additional_config": {"neuronmm_divide": "one"}}
MEMBERS = {name: RANKS[name] for name in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")}
# What each checkpoint is, options of vLLM, and the class that its MLPs have.
RUNS = {
    "biases, dense members, one kv head": (
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "ranks": MEMBERS},
        BOTH,
        "LlamaMLP",
    ),
    "one factor divided": ({"family": "qwen2", "storage": "int8"}, ONE, "LowRankQwen2MLP"),
    "compiled": (
        {"family": "qwen3", "storage": "fp8"},
        {**BOTH, "enforce_eager": False},
        "LowRankQwen2MLP",
    ),
    "stages": ({"family": "mistral"}, {"pipeline_parallel_size": 2}, "LowRankLlamaMLP"),
    "an adapter": ({}, {**BOTH, "enable_lora": True, "max_lora_rank": 8}, "LlamaMLP"),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    expected, runs = {}, {}
    for name, (options, given, _) in RUNS.items():
        model = low_rank(folder / name, **options)
        runs[name] = {"model": folder / name, **given}
        if "enable_lora" in given:
            runs[name]["adapter"] = folder / "adapter"
            model = adapted_(folder / "adapter", model)
        expected[name] = greedy(model, PROMPTS)
    return generated(runs, PROMPTS, TOKENS), expected


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_those_of_one_process(two_ranks, name):
    found, expected = two_ranks
    assert found[name].get("tokens") == expected[name], found[name].get("error")


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_has_the_mlp_as_one_op(two_ranks, name):
    for kinds in two_ranks[0][name]["modules"]:
        assert [kind for kind in kinds if kind.endswith("MLP")] == [RUNS[name][2]]
