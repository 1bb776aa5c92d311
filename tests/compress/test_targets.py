"""The Linears that a config's targets select."""

import pytest
from torch import nn
from toys import causal_lm

from neuronmm_ops import SVDConfig
from neuronmm_ops.compress.targets import select_targets

MLP = {"gate_proj", "up_proj", "down_proj"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def selected(model: nn.Module, *targets: str) -> list[str]:
    return list(select_targets(model, SVDConfig(targets=targets)).linears)


def leaves(names: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize(
    ("targets", "expected", "count"),
    [
        (("mlp",), MLP, 6),
        (("attention",), ATTENTION, 8),
        (("mlp", "attention"), MLP | ATTENTION, 14),
        (("all-linear",), MLP | ATTENTION, 14),
        (("down_proj",), {"down_proj"}, 2),
        (("down_proj", "q_proj"), {"down_proj", "q_proj"}, 4),
        (("model.layers.1.mlp.up_proj",), {"up_proj"}, 1),
        ((r".*\.1\.mlp\..*",), MLP, 3),
        ((r".*(gate|up)_proj",), {"gate_proj", "up_proj"}, 4),
        ((".*",), MLP | ATTENTION, 14),
        (("mlp", "lm_head"), MLP | {"lm_head"}, 7),
    ],
)
def test_targets(targets, expected, count):
    names = selected(causal_lm(), *targets)
    assert leaves(names) == expected
    assert len(names) == count


def test_order_is_the_model_s():
    model = causal_lm()
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    assert selected(model, "down_proj", "all-linear") == names


def test_a_regular_expression_is_for_the_whole_name():
    with pytest.raises(ValueError, match=r"match no nn\.Linear"):
        selected(causal_lm(), "layers")


@pytest.mark.parametrize("targets", [("all-linear",), (".*",), (".*head",), ("mlp", ".*m_head")])
def test_the_head_is_never_taken_by_a_pattern(targets):
    model = causal_lm()
    try:
        names = selected(model, *targets)
    except ValueError:
        names = []
    assert "lm_head" not in names


def test_a_head_without_transformers():
    model = nn.ModuleDict({"fc1": nn.Linear(4, 4), "lm_head": nn.Linear(4, 9)})
    assert selected(model, "all-linear") == ["fc1"]
    assert selected(model, "all-linear", "lm_head") == ["fc1", "lm_head"]


def test_a_tied_head_is_kept_even_where_it_is_named():
    model = causal_lm("Qwen3")
    selection = select_targets(model, SVDConfig(targets=("mlp", "lm_head")))
    assert leaves(list(selection.linears)) == MLP
    reason = "shares its weight with model.embed_tokens.weight"
    assert selection.kept == {"lm_head": (model.lm_head, reason)}
    with pytest.raises(ValueError, match="match only shared weights: lm_head shares its weight"):
        selected(model, "lm_head")


def test_subclasses_of_linear_are_not_taken():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4))
    assert selected(model, "all-linear") == ["0"]


def test_nothing_matches():
    with pytest.raises(ValueError, match=r"targets fc7 match no nn\.Linear.*called .*down_proj"):
        selected(causal_lm(), "fc7")
    with pytest.raises(ValueError, match=r"it has no nn\.Linear"):
        selected(nn.Sequential(nn.ReLU()), "all-linear")


def test_a_shared_module_is_one_target():
    linear = nn.Linear(4, 4)
    assert selected(nn.Sequential(linear, nn.ReLU(), linear), "all-linear") == ["0"]


def test_presets_of_other_architectures():
    model = nn.ModuleDict(
        {name: nn.Linear(4, 4) for name in ("fc1", "fc2", "gate_up_proj", "out_proj", "qkv_proj")}
    )
    assert selected(model, "mlp") == ["fc1", "fc2", "gate_up_proj"]
    assert selected(model, "attention") == ["out_proj", "qkv_proj"]
