"""Saving a compressed model: the whole checkpoint is written and checked, or nothing is."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from neuronmm_ops.checkpoint import INDEX, SINGLE, weight_files
from neuronmm_ops.compress.record import attach, attached_report, compressed_layers
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.compress.targets import names_in
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.hf.loading import check_values, is_divided, load_exactly, model_names
from neuronmm_ops.hf.provenance import CompressionRun, ModelSource, kept_run, write_run
from neuronmm_ops.hf.streaming.writing import CompressedTensors, write_weights
from neuronmm_ops.manifest import (
    MANIFEST,
    Origin,
    tensor_hashes,
    weights_sha256,
    write_manifest,
)
from neuronmm_ops.nn import LinearPair, dense_linear, dense_linears
from neuronmm_ops.output import check_target, no_room, replacement, why

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def save(
    model: PreTrainedModel,
    directory: str | Path,
    report: CompressionReport | None = None,
    tokenizer: Any = None,
    force: bool = False,
    max_shard_size: int | str = "50GB",
    run: CompressionRun | None = None,
    origin: Origin | None = None,
    values: CompressedTensors | None = None,
) -> None:
    """Write a model with compressed layers as a Transformers directory.

    Everything is written to a sibling directory, loaded back and compared with the model, and
    renamed at the end: a killed or failed run leaves the target as it was. Load it with
    `import neuronmm_ops.hf` and `AutoModelForCausalLM.from_pretrained(directory)`, or the class
    of the dense model. Files of the processor are copied from where the model was loaded.

    Args:
        model: what `compress_` or `swap_` changed, or a compressed checkpoint loaded.
        directory: the target; its parent is created.
        report: what `compress_` returned; default what the model's config records.
        tokenizer: saved along with the model.
        force: replace an existing compressed checkpoint.
        max_shard_size: of one file of weights, in bytes or as `5GB`.
        run: what made the model, for `compression.json`; default that of the checkpoint which the
            model was loaded from, where the weights are still the same.
        origin: what `manifest.json` says that the model was made of; default by `run`.
        values: of a model without; one file of weights is in memory at a time.

    Raises:
        FileExistsError: the target exists, and may not be replaced.
        ValueError: the report is not that of the model, or the model has no low-rank layer, or has
            pairs of Linears in their place, or is divided among ranks.
        NonFiniteError: a value is NaN or Inf, such as after a cast to float16.
        CheckpointError: what was written does not load as the model, and is removed; or factors in
            one byte or their scales hold what they must not.
        OSError: the target cannot be written; says how much room it needs.
    """
    if any(isinstance(module, LinearPair) for module in model.modules()):
        raise ValueError("the model holds pairs of Linears; turn them back by hf.from_pairs(model)")
    if is_divided(model):
        raise ValueError(
            "the model is divided among ranks; call model.save_pretrained(DIR) on every rank, "
            "which writes the whole checkpoint"
        )
    target = Path(directory)
    needed = sum(parameter.nbytes for parameter in model.parameters())
    source = _source_of(model)
    check_target(target, force, source, needed)
    _record(model, report)
    check_values(model, "save the model in a wider dtype, or load it again")

    def write(temporary: Path) -> None:
        if values is None:
            _save_pretrained(
                model,
                temporary,
                max_shard_size=max_shard_size,
                save_original_format=not _has_halves(model),
            )
        else:
            write_weights(model, values, temporary, max_shard_size)

    def describe(temporary: Path, weights: str) -> Origin:
        made = run or (kept_run(source, weights) if source else None)
        if made is not None:
            write_run(temporary, made, weights)
        return origin or (made.origin if made else _unknown_run(source))

    try:
        with replacement(target, force) as temporary:
            write(temporary)
            if tokenizer is not None:
                _save_tokenizer(tokenizer, temporary)
            copy_processor(source, temporary)
            tensors = tensor_hashes(temporary)
            origin = describe(temporary, weights_sha256(tensors))
            write_manifest(temporary, tensors, origin)
            _open_to_others(temporary)
            verify(model, temporary, values)
    except FileExistsError:
        raise
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(target.parent).free
        raise OSError(f"{why(error)}; {no_room(target, needed, free)}") from error


def copy_processor(source: Path | None, directory: Path) -> None:
    """Copy what a model that reads images or sound has besides its tokenizer, where it has it."""
    for file in [source / name for name in PROCESSOR_FILES] if source else ():
        if file.is_file() and not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        if type(error) is not Exception:  # which is what the tokenizers library raises
            raise
        raise OSError(f"the tokenizer cannot be written ({error})") from error


@torch.no_grad()
def verify(
    model: PreTrainedModel, directory: Path, expected: Mapping[str, Tensor] | None = None
) -> None:
    """Check that a directory loads as `model`: every name and shape, and the values.

    It is loaded without memory for its values; these are read tensor by tensor. Tensors that
    Transformers merges on loading, such as single experts', are checked by shape only. The values
    are those of `expected`, by name; default the model's own.
    """
    try:
        loaded, info = load_exactly(type(model), directory, device_map="meta")
    except Exception as error:  # loading may raise anything
        raise CheckpointError(
            f"what was written cannot be loaded, and is removed: {error}"
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            name = sorted(str(key) for key in info[kind])[0]
            raise CheckpointError(
                f"what was written is not the model, and is removed: loading finds "
                f"{len(info[kind])} {kind.replace('_', ' ')}, first {name}"
            )
    for name, layer in dense_linears(loaded).items():
        here = dense_linear(model.get_submodule(name))
        # A square weight would load as it is, and mean its transpose.
        if here is not None and here.is_transposed != layer.is_transposed:
            raise CheckpointError(
                f"what was written is not the model, and is removed: {name} is "
                f"{type(here.module).__name__} here and {type(layer.module).__name__} when loaded, "
                "which hold their weights transposed; put the architecture's own module back"
            )
    if expected is None:
        expected = model.state_dict()
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for key, name in model_names(loaded, tensors.keys()).items():
                if name in expected and not _same(tensors.get_tensor(key), expected[name]):
                    raise CheckpointError(
                        f"what was written is not the model, and is removed: {name} differs"
                    )


def _record(model: PreTrainedModel, report: CompressionReport | None) -> None:
    """Put the report into the model's config; refuse it where it has other compressed layers."""
    recorded = attached_report(model)
    source = report or recorded
    if source is None:
        raise ValueError("the model's config records no compressed layer; see compress_ and swap_")
    compressed = compressed_layers(model)
    kinds = {name: (module.rank, module.storage) for name, module in compressed.items()}
    layers = _by_name(model, recorded.layers if recorded else ())
    # Layers that were replaced after they were recorded are left out.
    layers = {
        name: layer
        for name, layer in layers.items()
        if not layer.is_replaced or (layer.r, layer.storage) == kinds.get(name)
    }
    layers |= _by_name(model, report.layers if report else ())
    reported = {n: (each.r, each.storage) for n, each in layers.items() if each.is_replaced}
    odd = sorted(name for name, _ in reported.items() ^ kinds.items())
    if odd or not layers:
        raise ValueError(
            f"report must list exactly the model's compressed layers, see "
            f"{odd[0] if odd else 'none'}; use the report of the run that compressed this model"
        )
    named = tuple(
        replace(layer, name=name, compute=compressed[name].compute if name in compressed else "x")
        for name, layer in layers.items()
    )
    attach(model, replace(source, layers=named))


def _by_name(model: PreTrainedModel, layers: Iterable[LayerReport]) -> dict[str, LayerReport]:
    """Return the layers by their names in the model."""
    modules = {name for name, _ in model.named_modules()}
    return {
        next((n for n in names_in(model, layer.name) if n in modules), layer.name): layer
        for layer in layers
    }


def _unknown_run(source: Path | None) -> Origin:
    """Describe a model that was loaded from a directory, and maybe changed since."""
    try:
        return Origin("save", None if source is None else asdict(ModelSource.of(source)))
    except CheckpointError:  # the directory is no longer what it was
        return Origin("save")


def _source_of(model: PreTrainedModel) -> Path | None:
    name = model.name_or_path
    return Path(name) if name and Path(name).is_dir() else None


def _open_to_others(directory: Path) -> None:
    """Give every file the mode of config.json: safetensors are written with mode 0600."""
    mode = (directory / "config.json").stat().st_mode
    for path in directory.iterdir():
        if path.is_file():
            path.chmod(mode)


def _same(written: Tensor, tensor: Tensor) -> bool:
    """Say whether two tensors have the same bits; of an offloaded one the shape is compared."""
    if tensor.is_meta:
        return written.shape == tensor.shape
    if (written.shape, written.dtype) != (tensor.shape, tensor.dtype):
        return False
    bits = [t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (written, tensor)]
    return torch.equal(*bits)


def _has_halves(model: PreTrainedModel) -> bool:
    """Say whether of a stored matrix, which loading splits, one Linear stays dense and one not.

    Transformers splits HRM's `gate_up_proj` so, and cannot merge a half: tensors are then saved by
    their names in the model.
    """
    compressed = compressed_layers(model)
    if not compressed:
        return False
    converters = [
        conversion.reverse_transform()
        for conversion in get_model_conversion_mapping(model)
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1
    ]

    def merged(layers: Iterable[str]) -> set[str]:
        renamed = [c.rename_source_key(f"{name}.weight") for name in layers for c in converters]
        return {name for name, pattern in renamed if pattern is not None}

    return not merged(compressed).isdisjoint(merged(dense_linears(model)))


# --- Transformers' own saving: a manifest of what was there before would refuse what it has written

_save_pretrained = PreTrainedModel.save_pretrained


@wraps(_save_pretrained)
def _saved_with_manifest(
    self: PreTrainedModel, save_directory: str | Path, *args: Any, **kwargs: Any
) -> None:
    kwargs.setdefault("save_original_format", not _has_halves(self))
    _save_pretrained(self, save_directory, *args, **kwargs)
    directory = Path(save_directory)
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if not is_first or not any((directory / name).exists() for name in (SINGLE, INDEX)):
        return
    if attached_report(self) is not None:
        write_manifest(directory, tensor_hashes(directory), Origin("save_pretrained"))
    else:
        (directory / MANIFEST).unlink(missing_ok=True)


PreTrainedModel.save_pretrained = _saved_with_manifest  # pyright: ignore
