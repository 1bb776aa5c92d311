"""The dense model that a checkpoint was compressed from: found, loaded, and checked to be that."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from neuronmm_ops.compress.record import compressed_layers
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.hf.computing import load_on
from neuronmm_ops.hf.loading import HUB_ID, load_tokenizer


def load_dense(
    name: str | Path, compressed: PreTrainedModel, tokenizer: Any, device: torch.device
) -> PreTrainedModel:
    """Load the dense model, without gradients; refuse it where `compressed` was not made of it.

    Every parameter but the factors must be the same. A tokenizer beside it must have the same
    vocabulary.

    Raises:
        CheckpointError: it is missing, cannot be loaded, is compressed itself, or is another one.
    """
    remedy = "give the model that was compressed by --dense DIR"
    if not str(name) or not (Path(name).exists() or HUB_ID.fullmatch(str(name))):
        raise CheckpointError(f"the dense model {str(name)!r} is not here; {remedy}")
    dense = load_on(name, device).requires_grad_(False)
    if compressed_layers(dense):
        raise CheckpointError(f"{name} is compressed itself; {remedy}")
    difference = _difference(compressed, dense)
    if difference is not None:
        raise CheckpointError(
            f"{name} is not the model that was compressed: {difference}; {remedy}"
        )
    try:
        vocabulary = load_tokenizer(name).get_vocab()
    except CheckpointError:  # it needs none
        return dense
    if vocabulary != tokenizer.get_vocab():
        raise CheckpointError(f"{name} has another tokenizer than the compressed model; {remedy}")
    return dense


def _difference(compressed: nn.Module, dense: nn.Module) -> str | None:
    """Name the first parameter that should be the same and is not."""
    found = dict(dense.named_parameters())
    layers = compressed_layers(compressed)
    replaced = {f"{name}.{matrix}" for name, layer in layers.items() for matrix in layer.MATRICES}
    shapes = {f"{n}.weight": (m.out_features, m.in_features) for n, m in layers.items()}
    kept = {n: p for n, p in compressed.named_parameters() if n not in replaced}
    shapes |= {name: tuple(parameter.shape) for name, parameter in kept.items()}
    for name in sorted(shapes.keys() ^ found.keys()):
        return f"{name} is in one of them alone"
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            return f"{name} is {list(found[name].shape)}, not {list(shape)}"
    for name, parameter in kept.items():
        if not _same(parameter, found[name]):
            return f"{name} has other values"
    return None


def _same(parameter: Tensor, other: Tensor) -> bool:
    return torch.equal(parameter.detach(), other.detach().to(parameter))
