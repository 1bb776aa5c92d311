"""`neuronmm generate`: chats, and logits that cannot be trusted."""

import shutil

import pytest
import torch
from outcomes import refused
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer

from neuronmm_ops import NonFiniteError
from neuronmm_ops.hf.generate import FiniteLogits

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def copy(dense, tmp_path):
    return shutil.copytree(dense, tmp_path / "copy")


def save_tokenizer(directory, template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


def test_a_chat_is_put_into_the_template(run, copy):
    save_tokenizer(copy, TEMPLATE)
    command = ("generate", copy, "--new-tokens", "6", "--prompt")
    chat = run(*command, "Hi", "--chat", "--json").document()
    plain = run(*command, "[user]Hi[assistant]", "--json").document()
    assert chat["text"] == plain["text"]
    assert (chat["prompt"], chat["chat"], plain["chat"]) == ("Hi", True, False)
    assert run(*command, "Hi", "--chat").page() == chat["text"] + "\n"


def test_a_chat_that_its_template_refuses(run, copy):
    save_tokenizer(copy, "{{ raise_exception('no users') }}")
    refused(run("generate", copy, "--chat", "--prompt", "Hi"), "chat template", "no users")


def test_nan_is_an_error_and_not_a_text(run, copy):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)  # finite, and no activation after it is
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    refused(run("generate", copy, "--prompt", "The"), "logits of token 3 must be finite")


def test_masked_tokens_are_no_error():
    scores = torch.tensor([[-torch.inf, 1.0], [2.0, -torch.inf]])
    assert FiniteLogits()(torch.zeros(2, 4), scores) is scores
    for row in ([0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf]):
        with pytest.raises(NonFiniteError, match="logits of token 4"):
            FiniteLogits()(torch.zeros(1, 4), torch.tensor([row]))


def test_the_compute_dtype_is_said(run, dense):
    arguments = ("--prompt", "The", "--new-tokens", "2", "--dtype", "bfloat16", "--json")
    assert run("generate", dense, *arguments).document()["compute_dtype"] == "bfloat16"


def test_a_draft_is_timed_beside_generating_without_it(run, dense, small):
    command = ("generate", dense, "--prompt", "The", "--new-tokens", "12", "--draft", small)
    document = run(*command, "--tokens-ahead", "2", "--json").document()
    alone = run("generate", dense, "--prompt", "The", "--new-tokens", "12", "--json").document()
    assert (document["text"], "draft" in alone) == (alone["text"], False)
    found = document["draft"]
    assert (found["tokens_ahead"], found["is_same_text"]) == (2, True)
    assert 0 <= found["accepted"] == document["new_tokens"] - found["passes"] <= found["drafted"]
    assert min(found["tokens_per_s"], found["tokens_per_s_without"]) > 0
    page = run(*command).page()
    assert "drafted tokens accepted, 3 ahead" in page


def test_what_a_draft_does_not_go_with(run, dense, small):
    command = ("generate", dense, "--prompt", "The")
    refused(run(*command, "--tokens-ahead", "2"), "give --draft DIR")
    refused(run(*command, "--draft", small, "--backend", "simulated"), "--draft takes one process")
    refused(run(*command, "--draft", small, "--tokens-ahead", "9"), "must be 1 to 8, got 9")
