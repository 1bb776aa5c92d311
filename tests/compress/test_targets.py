"""The Linears that a config's targets select."""

import pytest
import torch
from torch import nn
from toys import causal_lm, relative_error

from neuronmm_ops import SVDConfig, compress_
from neuronmm_ops.compress.targets import select_targets
from neuronmm_ops.nn import DenseLinear

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
    assert selection.kept == {"lm_head": (DenseLinear(model.lm_head), reason)}
    with pytest.raises(ValueError, match="match only layers kept dense: lm_head shares its weight"):
        selected(model, "lm_head")


def test_nothing_matches():
    with pytest.raises(ValueError, match=r"targets fc7 match no nn\.Linear.*called .*down_proj"):
        selected(causal_lm(), "fc7")
    with pytest.raises(ValueError, match=r"it has no nn\.Linear"):
        selected(nn.Sequential(nn.ReLU()), "all-linear")


def test_a_shared_module_is_one_target():
    linear = nn.Linear(4, 4)
    assert selected(nn.Sequential(linear, nn.ReLU(), linear), "all-linear") == ["0"]


def named(*names: str) -> nn.Module:
    """Return a model with a Linear of each name."""
    model = nn.Module()
    for name in names:
        parent, _, leaf = name.rpartition(".")
        for depth in range(1, len(parent.split(".")) + 1 if parent else 1):
            path = ".".join(parent.split(".")[:depth])
            above, _, last = path.rpartition(".")
            if last not in model.get_submodule(above)._modules:
                model.get_submodule(above).add_module(last, nn.Module())
        model.get_submodule(parent).add_module(leaf, nn.Linear(4, 4))
    return model


NAMES_OF_MLP = (
    "layers.0.fc1",
    "h.0.mlp.c_proj",
    "mlp.dense_4h_to_h",
    "mlp.Wo",
    "layer.0.output.dense",
    "mlp.shared_experts.up_proj",
    "feed_forward.w2",
)
NAMES_OF_ATTENTION = (
    "mixer.q_proj",
    "h.0.attn.c_proj",
    "h.0.crossattention.c_attn",
    "self_attention.dense",
    "attn.Wo",
    "attention.output.dense",
    "attention.self.key",
    "linear_attn.out_proj",
    "self_attn.qkv_proj",
)
NAMES_OF_NEITHER = (
    "mamba.out_proj",
    "conv.out_proj",
    "self_attn.gate_proj",
    "pooler.dense",
    "mlp.gate",
    "mlp.shared_expert_gate",
    "post_attention_layernorm.mlp.fc1",
    "mlp.gate.router_mlp.fc2",
    "w1",
    "embedder.key",
)


def test_a_preset_tells_equal_names_apart_by_their_parents():
    model = named(*NAMES_OF_MLP, *NAMES_OF_ATTENTION, *NAMES_OF_NEITHER)
    assert set(selected(model, "mlp")) == set(NAMES_OF_MLP)
    assert set(selected(model, "attention")) == set(NAMES_OF_ATTENTION)
    assert len(selected(model, "all-linear")) == 26


def test_a_model_that_changes_its_weights_as_it_runs_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.RwkvConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2)
    with pytest.raises(ValueError, match="RWKV models scale their weights in place"):
        selected(transformers.RwkvForCausalLM(config), "all-linear")


def test_torchs_own_encoder_reads_its_weights():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with pytest.raises(ValueError, match="linear1 cannot be replaced: the model's code reads its"):
        selected(torch.nn.Sequential(layer), "all-linear")


def test_a_weight_that_the_model_reads_stays_dense():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "time_step_rank": 24}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4)).eval()
    expected = model(torch.arange(8)[None]).logits.detach()
    report = compress_(
        model,
        SVDConfig(ratio=0.1, block=8, targets="all-linear", method="plain", allocation="uniform"),
    )
    kept = {layer.name.rpartition(".")[2]: layer.reason for layer in report.layers if layer.dense}
    assert kept == {"dt_proj": "cannot be replaced: the model's code reads its weight"}
    assert relative_error(model(torch.arange(8)[None]).logits, expected) < 0.5
