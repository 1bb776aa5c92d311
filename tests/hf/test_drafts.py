"""Drafts: greedy tokens and the distribution of sampled ones stay the model's own."""

import json
import shutil

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from neuronmm_ops import SVDConfig, demo, hf
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.hf.drafts import ahead_set_, passes_counted

PROMPTS = ("Return the", "class ", "The optional argument", "1 + ")
NEW = 40


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The demo's model, compressed so far that much of what it drafts is rejected."""
    out = tmp_path_factory.mktemp("drafts") / "small"
    hf.compress(demo.MODEL, SVDConfig(ratio=0.6, block=16, method="plain"), None, out)
    return out


@pytest.fixture(scope="module")
def model():
    return hf.load_packed(demo.MODEL, "float32")


@pytest.fixture(scope="module")
def draft(small, model):
    return hf.load_draft(small, model, demo.MODEL)


@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_the_models_own(model, draft, prompt, ahead):
    tokenizer = hf.load_tokenizer(demo.MODEL)
    alone = hf.generate_text(model, tokenizer, prompt, NEW)
    ahead_set_(draft, ahead)
    with passes_counted(model, draft) as counts:
        assert hf.generate_text(model, tokenizer, prompt, NEW, draft=draft) == alone
    passes, drafted = counts
    assert alone[1] / (ahead + 1) <= passes < alone[1] < passes + drafted
    assert drafted <= passes * ahead


def test_sampled_tokens_have_the_models_distribution(model, draft):
    ids = hf.load_tokenizer(demo.MODEL)("The optional argument", return_tensors="pt").input_ids
    ahead_set_(draft, 2)
    with torch.no_grad():
        p, q = [each(ids).logits[0, -1].double().softmax(-1) for each in (model, draft)]
    draws = 800
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "pad_token_id": 0}
    tokens = [
        int(model.generate(ids, assistant_model=draft, **options)[0, ids.shape[1]])
        for _ in range(draws)
    ]
    counts = torch.bincount(torch.tensor(tokens), minlength=len(p)).double()
    assert _chi_squared(counts, p) > 0.01
    assert _chi_squared(counts, q) < 1e-6  # the draft's own distribution is told apart


def _chi_squared(counts, p):
    """The probability of counts as unlikely as these; rare tokens are one."""
    expected = p * counts.sum()
    often = expected >= 5
    found = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    statistic = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(found) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def _altered(source, target, file, change):
    shutil.copytree(source, target)
    document = json.loads((target / file).read_text())
    change(document)
    (target / file).write_text(json.dumps(document))
    return target


def test_the_record_of_a_draft_says_how_many_tokens_ahead(small, model, tmp_path):
    assert hf.load_draft(small, model, demo.MODEL).generation_config.num_assistant_tokens == 3

    def recorded(document):
        document["quantization_config"]["provenance"]["draft"] = {"tokens_ahead": 5}

    draft = hf.load_draft(
        _altered(small, tmp_path / "recorded", "config.json", recorded), model, demo.MODEL
    )
    assert draft.generation_config.num_assistant_tokens == 5


@pytest.mark.parametrize("ahead", [0, 9])
def test_tokens_ahead_out_of_range(small, model, ahead):
    with pytest.raises(ValueError, match=f"tokens ahead must be 1 to 8, got {ahead}"):
        hf.load_draft(small, model, demo.MODEL, ahead)


def test_a_draft_of_another_vocabulary_is_refused(model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"must have the vocabulary of .* such as"):
        hf.load_draft(tmp_path, model, demo.MODEL)
    hf.load_tokenizer(demo.MODEL).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"must have the 2048 rows of .* got"):
        hf.load_draft(tmp_path, model, demo.MODEL)


def test_a_draft_of_another_dense_model_is_refused(small, tmp_path):
    def of_another(document):
        document["source"]["sha256"] = "0" * 64

    other = _altered(small, tmp_path / "other", "manifest.json", of_another)
    target = hf.load_packed(small)
    hf.load_draft(small, target, small)
    with pytest.raises(CheckpointError, match=f"must be made of .*, got {'0' * 64}; give a draft"):
        hf.load_draft(other, target, small)
