"""Tiny models to measure, and ways to damage copies of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from neuronmm_ops import SVDConfig, hf


def compressed(dense: Path, directory: Path, ratio: float, **options: Any) -> Path:
    config = SVDConfig(ratio=ratio, block=8, method="plain", **options)
    hf.compress(dense, config, None, directory)
    return directory


def edit_json(path: Path, edit: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def edit_tensor(model: Path, name: str, edit: Callable[[Tensor], object]) -> None:
    tensors = load_file(model / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def add_token(model: Path) -> None:
    """Give a model's tokenizer the token `quick`."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["quick"])
    tokenizer.save(str(model / "tokenizer.json"))


def computed_dtypes(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """Of the models that a function of a module is called with; the CPU multiplies every dtype."""
    monkeypatch.setattr("neuronmm_ops.ops.backends.cpu.multiplies_fast", lambda dtype: True)
    found: list[Any] = []
    function = getattr(module, name)

    def spy(*arguments: Any, **options: Any) -> Any:
        models = [each for each in arguments if hasattr(each, "model")]
        found.extend(each.model.layers[0].input_layernorm.weight.dtype for each in models)
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, spy)
    return found
