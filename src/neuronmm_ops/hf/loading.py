"""Loading models strictly: what Transformers only warns about is an error here."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from neuronmm_ops.compress.checkpoint import read_config, read_shapes, weight_files
from neuronmm_ops.errors import CheckpointError


def load(
    directory: str | Path, dtype: torch.dtype | str = "auto", device_map: Any = None
) -> PreTrainedModel:
    """Load a causal LM, dense or compressed, from a local directory, in eval mode.

    Args:
        directory: a Transformers model directory with safetensors.
        dtype: of the parameters; `auto` takes the checkpoint's.
        device_map: as in `from_pretrained`.

    Raises:
        CheckpointError: files are missing or damaged, or a parameter of the model is not in them
            (Transformers would initialize it at random, with a warning).
    """
    path = Path(directory)
    read_config(path)
    read_shapes(weight_files(path))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, info = loaded
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy it again") from None
    except (KeyError, ValueError, RuntimeError) as error:
        if isinstance(error, (CheckpointError, torch.OutOfMemoryError)):
            raise
        raise CheckpointError(f"{path} cannot be loaded: {_first_line(error)}") from error
    if info["missing_keys"]:
        name = sorted(info["missing_keys"])[0]
        raise CheckpointError(
            f"{path} lacks {len(info['missing_keys'])} of the model's tensors, first {name}; "
            "config and weights are not of the same checkpoint"
        )
    return model


def load_tokenizer(directory: str | Path) -> Any:
    """Load the tokenizer of a model directory.

    Raises:
        CheckpointError: the directory has none.
    """
    try:
        return AutoTokenizer.from_pretrained(
            Path(directory), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{directory} has no usable tokenizer ({_first_line(error)}); "
            "copy the model's tokenizer files into it"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
