"""One warning names what a compression does not reach."""

import warnings

import pytest
from torch import nn
from toys import SIZES, causal_lm

from neuronmm_ops import CompressionReport, CompressionWarning, LeftDense, SVDConfig, compress_

PLAIN = {"allocation": "uniform", "ratio": 0.3, "method": "plain"}


def warning_of(model: nn.Module, **options: object) -> str | None:
    """Return the text of the only CompressionWarning, or None."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compress_(model, SVDConfig(**{**PLAIN, **options}))
    assert {w.category for w in caught} <= {CompressionWarning}
    assert len(caught) <= 1
    return str(caught[0].message) if caught else None


@pytest.mark.parametrize("targets", ["mlp", "attention", "all-linear"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_dense_decoder_is_covered(family, targets):
    assert warning_of(causal_lm(family), block=8, targets=targets) is None


def test_nothing_is_compressed():
    with pytest.warns(CompressionWarning) as caught:
        compress_(causal_lm(), SVDConfig(**PLAIN))
    assert str(caught[0].message) == (
        "nothing is compressed: at ratio 0.3 no rank that is a multiple of 128 is smaller than any "
        "of the 6 targeted matrices; the largest block that fits is 16"
    )
    assert caught[0].filename == __file__
    assert warning_of(causal_lm(), block=16) is None


def test_matrices_too_small_for_any_pair():
    model = nn.ModuleDict({"fc1": nn.Linear(8, 8), "lm_head": nn.Linear(8, 300)})
    assert warning_of(model, block=8).endswith("the matrices are too small for any pair")


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    options = {"num_local_experts": 8, "tie_word_embeddings": False}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **options))


def test_experts_are_not_reached_by_all_linear():
    message = warning_of(mixtral(), block=8, targets="all-linear")
    assert message.startswith("targets all-linear reach 5.9% of the matrix parameters")
    assert "model.layers.*.mlp.experts.gate_up_proj" in message
    assert "a stack of matrices in one parameter of MixtralExperts" in message
    for targets in ("attention", "q_proj"):  # names promise nothing
        assert warning_of(mixtral(), block=8, targets=targets) is None


def test_a_linear_of_another_name_is_left():
    """An MLP of which one matrix alone has a listed name."""
    model = nn.ModuleDict({"fc1": nn.Linear(64, 64), "w2": nn.Linear(64, 96)})
    size, total = 64 * 96, 64 * 64 + 64 * 96 + 64 + 96
    with pytest.warns(CompressionWarning) as caught:
        report = compress_(model, SVDConfig(**PLAIN, block=8))
    assert "reach 40.0%" in str(caught[0].message)
    assert "w2.weight with 60.0% (not among the targets)" in str(caught[0].message)
    left = LeftDense("w2.weight", size, size / total, "not among the targets")
    assert report.left_dense == (left,)


def test_layers_left_dense_by_the_block_are_not_reached():
    model = nn.ModuleDict({"fc1": nn.Linear(64, 32), "fc2": nn.Linear(64, 96)})
    message = warning_of(model, block=32, ratio=0.1)
    assert message is None
    model = nn.ModuleDict({"fc1": nn.Linear(64, 64), "fc2": nn.Linear(32, 32)})
    assert warning_of(model, block=24) is None


def test_biases_of_experts_are_no_matrices():
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(**SIZES, num_local_experts=4, head_dim=8)
    model = transformers.GptOssForCausalLM(config)
    with pytest.warns(CompressionWarning):
        left = compress_(model, SVDConfig(**PLAIN, block=8, targets="all-linear")).left_dense
    assert [entry.name.rpartition("experts.")[2] for entry in left[:2]] == [
        "gate_up_proj",
        "down_proj",
    ]
    assert not any("bias" in entry.name for entry in left)


@pytest.mark.parametrize("targets", ["attention", "q_proj", "mlp"])
def test_nothing_is_left_where_all_that_was_promised_is_taken(targets):
    model = causal_lm("Gemma2") if targets == "mlp" else mixtral()
    assert compress_(model, SVDConfig(**PLAIN, block=8, targets=targets)).left_dense == ()


def recorded(model: nn.Module) -> dict[str, float]:
    entry = model.config.quantization_config
    return {left.name: left.share for left in CompressionReport.from_dict(entry).left_dense}


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CompressionWarning")
def test_later_runs_keep_what_is_still_dense():
    model = mixtral()
    compress_(model, SVDConfig(**PLAIN, block=8, targets=("all-linear",)))
    after_one = recorded(model)
    assert len(after_one) == 3
    compress_(model, SVDConfig(**PLAIN, block=8, targets="lm_head"))
    assert recorded(model) == after_one
    # What a later run takes is left no more.
    model = causal_lm()
    model.model.layers[0].w9 = nn.Linear(64, 64)
    model.model.layers[1].w9 = nn.Linear(64, 64)
    compress_(model, SVDConfig(**PLAIN, block=8, targets="mlp"))
    both = recorded(model)["model.layers.*.w9.weight"]
    compress_(model, SVDConfig(**PLAIN, block=8, targets="model.layers.0.w9"))
    assert recorded(model) == {"model.layers.*.w9.weight": pytest.approx(both / 2)}
    compress_(model, SVDConfig(**PLAIN, block=8, targets="w9"))
    assert recorded(model) == {}
