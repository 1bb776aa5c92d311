"""Checkpoints on disk: the bits that they hold, changed ones, and how these are refused."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from neuronmm_ops.errors import CheckpointError


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = config_of(directory)
    edit(config)
    (directory / "config.json").write_text(json.dumps(config))


def edit_record(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    edit_config(directory, lambda config: edit(config["quantization_config"]))


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """The tensors of all files, none of which they hold open."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a single file."""
    tensors = tensors_of(directory)
    edit(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def refused(
    directory: Path,
    *words: str,
    by: Iterable[Callable[[Path], object]],
    error: type[Exception] = CheckpointError,
) -> None:
    """Every reader refuses the directory, with one line that holds all words."""
    for read in by:
        with pytest.raises(error) as caught:
            read(directory)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert "\n" not in str(caught.value)
