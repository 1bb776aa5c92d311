"""`neuronmm draft`: what a draft is chosen by, and that what is written drafts without loss."""

import json

import pytest
import torch
from hf.families import tiny_family
from outcomes import refused
from tiny import tiny_ids, tiny_model

from neuronmm_ops import SVDConfig, compress_, demo, hf
from neuronmm_ops.draft import acceptance, candidates, choose, layers, speed
from neuronmm_ops.estimate import speculation
from neuronmm_ops.estimate.speculation import Costs
from neuronmm_ops.hf.drafts import passes_counted
from neuronmm_ops.hf.provenance import ModelSource

AHEAD = (1, 2, 3, 4)


def test_the_tokens_of_a_round_are_leviathans():
    for a in (0.0, 0.5, 0.9):
        for k in AHEAD:
            assert speculation.expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    assert speculation.expected_tokens(1.0, 3) == 4


def test_tokens_ahead_are_the_fastest():
    costs = Costs(1.0, dict.fromkeys(range(1, 6), 10.0))
    assert speculation.best_ahead(1.0, costs, AHEAD) == (4, 1e3 * 5 / 14)
    assert speculation.best_ahead(0.05, costs, AHEAD) == (1, 1e3 * 1.05 / 11)
    slow = Costs(1.0, {1: 10.0, 2: 10.0, 3: 40.0, 4: 40.0, 5: 40.0})
    assert speculation.best_ahead(1.0, slow, AHEAD)[0] == 1


def test_acceptance_is_the_agreement_in_the_models_own_continuation():
    model, other = tiny_model(), tiny_model(initializer_range=0.3)
    contexts = acceptance.continued(model, tiny_ids()[:, :8], 12)
    assert contexts.greedy.shape == contexts.sampled.shape == (len(tiny_ids()), 20)
    with torch.no_grad():
        follows = model(contexts.greedy).logits[:, 7:-1].argmax(-1)
        p, q = [m(contexts.sampled).logits[:, 7:-1].softmax(-1) for m in (model, other)]
    assert torch.equal(follows, contexts.greedy[:, 8:])
    assert not torch.equal(contexts.sampled, contexts.greedy)
    assert acceptance.acceptance(model, model, contexts) == pytest.approx((1.0, 1.0))
    found = acceptance.acceptance(model, other, contexts)
    assert found.sampled == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()))
    with torch.no_grad():
        agreed = other(contexts.greedy).logits[:, 7:-1].argmax(-1) == follows
    assert found.greedy == pytest.approx(float(agreed.double().mean()))
    assert found.greedy < 0.5


def test_layers_that_are_left_out(tmp_path):
    model = hf.load(demo.MODEL, "float32")
    ids = torch.arange(20)[None]
    assert layers.depths(model) == [3, 2, 1]
    turned = layers.influences(model, ids)
    assert len(turned) == 3
    last = model.model.layers[2]
    layers.keep_(model, (0, 2))
    assert model.model.layers[1] is last
    with torch.no_grad():
        expected = model(ids).logits
    model.save_pretrained(tmp_path)
    again = hf.load(tmp_path)
    assert again.config.num_hidden_layers == 2
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, expected)


@pytest.fixture
def costing(monkeypatch):
    """Two candidates of two layers, and a draft whose pass costs what is asked for."""
    monkeypatch.setattr(candidates, "RATIOS", (0.3,))
    monkeypatch.setattr(candidates, "SAMPLES", 16)
    monkeypatch.setattr(candidates, "depths", lambda model: [2])
    monkeypatch.setattr(choose, "STORAGES", ("int8",))

    def cost(draft_ms):
        costs = Costs(draft_ms, dict.fromkeys(range(1, 10), 10.0))
        monkeypatch.setattr(choose, "measured", lambda model, draft, ahead: costs)
        ratio = 10 / (1 + draft_ms)
        pair = {"rounds": 1, "speedup": {"median": ratio, "low": ratio, "high": ratio}}
        monkeypatch.setattr(choose, "_generated", lambda model, draft, prompts: pair)

    return cost


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_the_fastest_draft_is_written_with_its_record(run, costing, tmp_path):
    costing(0.1)
    out = tmp_path / "draft"
    command = ("draft", demo.MODEL, "-o", out, "--tokens-ahead", "4")
    document = run(*command, "--json").document()
    rows = document["candidates"]
    assert [(len(row["layers"]), row["storage"]) for row in rows] == [(2, None), (2, "int8")]
    assert document["best"] == max(rows, key=lambda row: row["speedup"])
    assert all(0 < row["acceptance"] < 1 and row["tokens_ahead"] == 4 for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]

    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["made_by"] == "draft"
    assert json.loads((out / "config.json").read_text())["intermediate_size"] < 512
    assert manifest["source"]["sha256"] == ModelSource.of(demo.MODEL).sha256
    record = run("inspect", out, "--json").document()["provenance"]["draft"]
    assert (record["tokens_ahead"], record["candidates"]) == (4, rows)
    model, tokenizer = hf.load_packed(demo.MODEL, "float32"), hf.load_tokenizer(demo.MODEL)
    pair = hf.load_draft(out, model, demo.MODEL)
    alone = hf.generate_text(model, tokenizer, "The optional", 30)
    with passes_counted(model, pair) as counts:
        assert hf.generate_text(model, tokenizer, "The optional", 30, draft=pair) == alone
    assert counts[0] < 30
    page = run(*command, "--force").page()
    assert page.endswith(f"{out}: 4 tokens ahead\n")
    refused(run(*command), "exists")


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_nothing_is_written_where_no_draft_pays(run, costing, tmp_path):
    costing(20.0)
    outcome = run("draft", demo.MODEL, "-o", tmp_path / "draft")
    assert outcome.page().endswith("no draft pays: nothing is written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_a_draft_that_transformers_loop_slows_is_written_for_other_engines(
    run, costing, monkeypatch, tmp_path
):
    costing(0.1)
    slow = {"rounds": 1, "speedup": dict.fromkeys(("median", "low", "high"), 0.9)}
    monkeypatch.setattr(choose, "_generated", lambda model, draft, prompts: slow)
    page = run("draft", demo.MODEL, "-o", tmp_path / "draft", "--tokens-ahead", "4").page()
    assert "Measured in Transformers: 0.90x the tokens/s of the model alone" in page
    assert page.endswith(f"{tmp_path / 'draft'}: 4 tokens ahead\n")


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_a_distilled_draft_is_nearer_to_the_model(costing, tmp_path):
    model = hf.load_packed(demo.MODEL)
    kept, found = (0, 2), []
    for name, steps in (("plain", None), ("distilled", 12)):
        maker = candidates.Maker.of(model, demo.MODEL, demo.CALIBRATION, steps, None)
        maker.make(candidates.DraftConfig(kept, 0.5), tmp_path / name)
        contexts = acceptance.continued(model, maker.held_out[:8, :64], 64)
        draft = hf.load_packed(tmp_path / name)
        found.append(acceptance.acceptance(model, draft, contexts).sampled)
    assert found[1] > found[0] + 0.02


@pytest.mark.parametrize(("family", "share"), [("llama", 0.75), ("gpt2", 0.0)])
def test_what_is_removed_is_narrower_mlps_first_where_they_may_be(family, share):
    config = candidates._config(tiny_family(family), candidates.DraftConfig((0,), 0.5))
    assert config.prune_share == share


def test_passes_are_measured_after_the_same_cache():
    model = hf.load(demo.MODEL, "float32")
    found = speed.measured(model, model, (1, 7))
    assert set(found.model) == {1, 2, 8}
    assert min(found.draft, *found.model.values()) > 0


def test_passes_are_modelled(tmp_path):
    """A pass of more tokens takes longer, by less than as many passes; a smaller draft's less."""
    small = tmp_path / "small"
    wide = tiny_model(
        hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=1024, dtype=torch.bfloat16
    )
    wide.save_pretrained(tmp_path / "wide")
    layers.keep_(wide, (0,))
    compress_(wide, SVDConfig(ratio=0.5, block=64, targets="all-linear", method="plain"))
    hf.save(wide, small)
    found = speed.modelled(str(tmp_path / "wide"), str(small), (1, 7), "trn2")
    assert found.draft < found.model[1] < found.model[2] < found.model[8] < 2 * found.model[1]


@pytest.mark.parametrize("ahead", [0, 9])
def test_tokens_ahead_out_of_range(run, ahead, tmp_path):
    command = ("draft", demo.MODEL, "-o", tmp_path / "out", "--tokens-ahead", ahead)
    refused(run(*command), f"tokens ahead must be 1 to 8, got {ahead}")


def test_what_cannot_have_a_draft(run, tmp_path):
    small, out = tmp_path / "small", tmp_path / "out"
    hf.compress(demo.MODEL, SVDConfig(ratio=0.5, block=16, method="plain"), None, small)
    refused(run("draft", small, "-o", out), "compressed or quantized already")
    command = ("draft", demo.MODEL, "-o", out, "--tokens-ahead", "8", "--target", "trn2")
    refused(run(*command), "tokens ahead must be 1 to 7, got 8")
    (tmp_path / "short.txt").write_text("too short")
    refused(run("draft", demo.MODEL, "-o", out, "--text", tmp_path / "short.txt"), "4 blocks")
