"""Two processes of vLLM's give the tokens of Transformers' one."""

import pytest
from lowrank import PROMPTS, RANKS, TOKENS, greedy, low_rank
from offline import generated

pytestmark = pytest.mark.slow

BOTH = {"tensor_parallel_size": 2}
ONE = {**BOTH, "additional_config": {"neuronmm_divide": "one"}}
MEMBERS = {name: RANKS[name] for name in ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")}
FEW = {name: RANKS[name] for name in ("q_proj", "up_proj")}
# What each checkpoint is, options of vLLM, and the class that its MLPs have.
RUNS = {
    "biases, dense members, one kv head": (
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "ranks": MEMBERS},
        BOTH,
        "LlamaMLP",
    ),
    "one factor divided": ({"family": "qwen2", "storage": "int8"}, ONE, "LowRankQwen2MLP"),
    "dense members in int8": (
        {"family": "qwen2", "ranks": FEW, "storage": "int8", "dense": "int8"},
        BOTH,
        "Qwen2MLP",
    ),
    "compiled": (
        {"family": "qwen3", "storage": "fp8"},
        {**BOTH, "enforce_eager": False},
        "LowRankQwen2MLP",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_those_of_one_process(tmp_path, name):
    options, given, mlp = RUNS[name]
    model, run = low_rank(tmp_path / "model", **options), {"model": tmp_path / "model", **given}
    found = generated({name: run}, PROMPTS, TOKENS)[name]
    assert found.get("tokens") == greedy(model, PROMPTS), found.get("error")
    assert len(found["modules"]) == 2
    for kinds in found["modules"]:
        assert [kind for kind in kinds if kind.endswith("MLP")] == [mlp]
