"""`neuronmm generate`: prompts, chats, and logits that cannot be trusted."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from outcomes import Run, refused
from safetensors.torch import load_file, save_file
from tiny import tiny_tokenizer

from neuronmm_ops import NonFiniteError
from neuronmm_ops.hf.generate import FiniteLogits

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _with_template(dense: Path, directory: Path, template: str) -> Path:
    copy = Path(shutil.copytree(dense, directory))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(copy)
    return copy


def test_a_chat_is_put_into_the_template(run: Run, dense: Path, tmp_path: Path) -> None:
    chatty = _with_template(dense, tmp_path / "chat", TEMPLATE)
    options = ("--new-tokens", "6", "--json")
    chat = json.loads(run("generate", chatty, "--chat", "--prompt", "Hi", *options).out)
    spelled = "[user]Hi[assistant]"
    plain = json.loads(run("generate", chatty, "--prompt", spelled, *options).out)
    assert chat["text"] == plain["text"]
    assert (chat["prompt"], chat["chat"], plain["chat"]) == ("Hi", True, False)
    shown = run("generate", chatty, "--chat", "--prompt", "Hi", "--new-tokens", "6").out
    assert shown == chat["text"] + "\n"


def test_chats_that_cannot_be(run: Run, dense: Path, tmp_path: Path) -> None:
    chat = ("--chat", "--prompt", "Hi")
    refused(run("generate", dense, *chat), "no chat template")
    broken = _with_template(dense, tmp_path / "broken", "{{ raise_exception('no users') }}")
    refused(run("generate", broken, *chat), "chat template", "no users")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--prompt", ""), "at least one token"),
        (("--prompt", "x" * 100), "at most the model's limit of 128 tokens, got 100 and 64"),
        (("--prompt", "x", "--new-tokens", "0"), "--new-tokens must be at least 1"),
        (("--prompt", "x", "--device", "toaster"), "device must be"),
    ],
)
def test_bad_arguments(run: Run, dense: Path, arguments: tuple[str, ...], word: str) -> None:
    refused(run("generate", dense, *arguments), word)


def test_nan_is_an_error_and_not_a_text(run: Run, dense: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dense, tmp_path / "nan"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)  # finite, and no activation after it is
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    refused(run("generate", copy, "--prompt", "The"), "logits of token 3 must be finite")


def test_masked_tokens_are_no_error() -> None:
    scores = torch.tensor([[-torch.inf, 1.0], [2.0, -torch.inf]])
    assert FiniteLogits()(torch.zeros(2, 4), scores) is scores
    for value in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteError, match="logits of token 4"):
            FiniteLogits()(torch.zeros(1, 4), torch.tensor([[0.0, value]]))
    with pytest.raises(NonFiniteError):
        FiniteLogits()(torch.zeros(1, 4), torch.full((1, 2), -torch.inf))


def test_the_compute_dtype_is_said(run: Run, dense: Path) -> None:
    arguments = ("--prompt", "The", "--new-tokens", "2", "--dtype", "bfloat16", "--json")
    document = json.loads(run("generate", dense, *arguments).out)
    assert document["compute_dtype"] == "bfloat16"
