"""The files of an export: config.json, weights, and what belongs to the tokenizer."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuronmm_ops.checkpoint import read_object
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.manifest import MANIFEST
from neuronmm_ops.output import OURS

_WRITTEN = (
    *("config.json", "compression.json", "generation_config.json", "tokenizer_config.json"),
    MANIFEST,
)


def transformers_4_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json as Transformers 4 has it, which later versions read, too."""
    written = {key: value for key, value in config.items() if key != "dtype"}
    written["torch_dtype"] = dtype
    rope = written.pop("rope_parameters", None)
    if rope is None:
        return written
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            "rope_parameters differ between layers, which engines' models of "
            f"{config['model_type']} do not take"
        )
    rope = dict(rope)
    written["rope_theta"] = rope.pop("rope_theta", 10000.0)
    written["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return written


def write_others(source: Path, directory: Path, config: Mapping[str, Any]) -> None:
    """Copy weights and tokenizer; write what the engines' own tools ask for besides."""
    for path in sorted(source.iterdir()):
        known = path.is_file() and OURS.fullmatch(path.name)
        if known and path.name not in _WRITTEN:
            shutil.copyfile(path, directory / path.name)
    tokenizer = source / "tokenizer_config.json"
    if tokenizer.is_file():
        fields = read_object(tokenizer)
        if fields.get("tokenizer_class") == "TokenizersBackend":  # of Transformers 5
            fields["tokenizer_class"] = "PreTrainedTokenizerFast"
            fields.pop("backend", None)
        write_json(directory / tokenizer.name, fields)
    generation = source / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, directory / generation.name)
    else:
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(directory / generation.name, {key: config.get(key) for key in ids})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as Transformers writes its configs."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
