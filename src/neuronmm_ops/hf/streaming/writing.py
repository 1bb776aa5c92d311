"""Writing the compressed checkpoint, a file of about a layer's size at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from neuronmm_ops.checkpoint import INDEX, SINGLE
from neuronmm_ops.hf.streaming.checkpoint import Checkpoint
from neuronmm_ops.hf.streaming.work import Work


class CompressedTensors(Mapping[str, Tensor]):
    """The tensors of the compressed model by name, each read when it is asked for.

    Args:
        checkpoint: the dense one.
        work: with the matrices of every compressed layer, by name, of its rank or a larger one.
        sets: name of each compressed layer to the kept set that it is in.
        ranks: of the compressed layers; None of one that stays dense.
        layer_bytes: of the largest layer, the most that one file of weights is to hold.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        work: Work,
        sets: Mapping[str, str],
        ranks: Mapping[str, int | None],
        layer_bytes: int,
    ) -> None:
        self._checkpoint, self._work = checkpoint, work
        self._sets, self._ranks = sets, ranks
        self.layer_bytes = layer_bytes
        self._names = list(checkpoint.model.state_dict())

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; `CheckpointError` where its file is gone."""
        layer, _, leaf = name.rpartition(".")
        if layer not in self._ranks or leaf == "bias":
            return self._checkpoint.read(name)
        if leaf == "weight":  # the placeholder
            return torch.empty(0, dtype=self._checkpoint.dtype(name))
        factor = self._work.tensor(self._sets[layer], name)
        rank = self._ranks[layer]
        return factor[:, :rank] if leaf == "u" else factor[:rank] if leaf == "v" else factor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_weights(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], directory: Path, size: int | str
) -> None:
    """Write config and weights as `save_pretrained` does, with one shard in memory at a time.

    Args:
        model: without values.
        tensors: the values.
        directory: an empty one.
        size: of one file, in bytes or as `5GB`; a larger tensor has a file of its own.
    """
    model.save_pretrained(directory, state_dict={})
    (directory / SINGLE).unlink(missing_ok=True)
    shapes = _without_tied(model)
    names = {id(tensor): name for name, tensor in shapes.items()}
    stored = revert_weight_conversion(model, dict(shapes))
    split = split_torch_state_dict_into_shards(
        stored,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=size,
    )
    for file, keys in split.filename_to_tensors.items():
        shard = {key: tensors[names[id(stored[key])]].contiguous() for key in keys}
        save_file(shard, directory / file, metadata={"format": "pt"})
        del shard
    if split.is_sharded:
        total = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": total, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True)
        (directory / INDEX).write_text(text + "\n", encoding="utf-8")


def _without_tied(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state of a model without values, each tied parameter once."""
    state = model.state_dict()
    # Transformers 5.0 asks the model for a parameter of each name that it is given.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    once = remove_tied_weights_from_state_dict(
        {name: state[name] for name in state if name in parameters}, model
    )
    return {name: state[name] for name in state if name not in parameters or name in once}
