"""The dense model that a checkpoint was compressed from, and ordinary checkpoints."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.compress.record import attached_report, compressed_layers, is_record
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.hf.computing import load_on
from neuronmm_ops.hf.loading import check_values, empty_model, load, load_tokenizer
from neuronmm_ops.hf.saving import copy_processor
from neuronmm_ops.manifest import Origin, tensor_hashes, write_manifest
from neuronmm_ops.models import HUB_ID
from neuronmm_ops.nn import CompressedLinear, dense_linears
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.nn.swap import replace_
from neuronmm_ops.output import check_target, replacement


def load_dense(
    name: str | Path, compressed: PreTrainedModel, tokenizer: Any, device: torch.device
) -> PreTrainedModel:
    """Load the dense model, without gradients; refuse it where `compressed` was not made of it.

    Every parameter but the factors, and those of narrower MLPs, must be the same. A tokenizer
    next to it must have the same vocabulary.

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
    parameters = dict(dense.named_parameters())
    layers = compressed_layers(compressed)
    replaced = {f"{name}.{matrix}" for name, layer in layers.items() for matrix in layer.MATRICES}
    shapes = {f"{n}.weight": (m.out_features, m.in_features) for n, m in layers.items()}
    kept = {n: p for n, p in compressed.named_parameters() if n not in replaced}
    shapes |= {name: tuple(parameter.shape) for name, parameter in kept.items()}
    for name in sorted(shapes.keys() ^ parameters.keys()):
        return f"{name} is in one of them alone"
    wider = _wider(compressed, shapes, parameters)
    for name, shape in shapes.items():
        if tuple(parameters[name].shape) != shape and name not in wider:
            return f"{name} is {list(parameters[name].shape)}, not {list(shape)}"
    for name, parameter in kept.items():
        if name not in wider and not _same(parameter, parameters[name]):
            return f"{name} has other values"
    return None


def _wider(
    compressed: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    dense: Mapping[str, nn.Parameter],
) -> set[str]:
    """The names of the dense model's parameters of which the record says that features left."""
    report = attached_report(compressed)
    if report is None or report.narrowed is None:
        return set()
    kept, inner, wider = report.narrowed.kept, report.narrowed.inner, set[str]()
    for name in (f"{layer.name}.{p}" for layer in report.layers for p in ("weight", "bias")):
        if name in shapes:
            pairs = list(zip(shapes[name], dense[name].shape, strict=True))
            grown = [(now, before) for now, before in pairs if now != before]
            if len(grown) == 1 and grown[0][0] * inner == grown[0][1] * kept:
                wider.add(name)
    return wider


def _same(parameter: Tensor, other: Tensor) -> bool:
    return torch.equal(parameter.detach(), other.detach().to(parameter))


def _dense(layer: CompressedLinear, linear: DenseLinear) -> nn.Module:
    """A module of the dense model with a layer's values."""
    dense = layer.to_linear()
    weight = dense.weight.t().contiguous() if linear.is_transposed else dense.weight
    linear.module.weight = nn.Parameter(weight)
    linear.module.bias = dense.bias
    return linear.module


def export_dense(source: str | Path, output: str | Path) -> dict[str, Any]:
    """Write a compressed checkpoint with its factors multiplied out, as an ordinary one.

    It loads wherever the dense model does, without this package, and computes what the compressed
    one does up to rounding: for checks of quality, not for speed. The weights are rounded once, to
    the model's dtype.

    Args:
        source: the compressed checkpoint, which is loaded whole.
        output: the directory to write.

    Returns:
        `output`, `layers` that were multiplied out, and `bytes` of the weights.

    Raises:
        CheckpointError: the source cannot be read, or is not compressed.
        NonFiniteError: a product is NaN or Inf in the model's dtype.
        FileExistsError: the output exists.
        OSError: it cannot be written.
    """
    source, output = Path(source), Path(output)
    check_target(output, False, source)
    if not is_record(read_config(source).get("quantization_config")):
        raise CheckpointError(f"{source} is not compressed; copy it as it is")
    model: Any = load(source, verify=True)
    layers = compressed_layers(model)
    linears = dense_linears(empty_model(source))
    replace_(model, {name: _dense(layer, linears[name]) for name, layer in layers.items()})
    del model.config.quantization_config
    model.hf_quantizer = None
    check_values(model, "compress the model in a wider dtype")
    made_of = {"path": str(source.resolve())}
    size = save_dense(model, source, output, Origin("export dense", made_of))
    return {"output": str(output), "layers": len(layers), "bytes": size}


def save_dense(model: PreTrainedModel, source: Path, output: Path, origin: Origin) -> int:
    """Write a model without compressed layers as an ordinary checkpoint; return its bytes.

    Args:
        model: with finite values.
        source: where its tokenizer and processor are.
        output: a directory that is written whole or not at all.
        origin: what it was made of, for `manifest.json`.

    Raises:
        FileExistsError: the output exists.
        OSError: it cannot be written.
    """
    size = sum(parameter.nbytes for parameter in model.parameters())
    check_target(output, False, source, size)
    with replacement(output, False) as directory:
        model.save_pretrained(directory)
        with suppress(CheckpointError):  # it has none
            load_tokenizer(source).save_pretrained(directory)
        copy_processor(source, directory)
        _write_older_rope(directory / "config.json")
        write_manifest(directory, tensor_hashes(directory), origin)
    return size


def _write_older_rope(path: Path) -> None:
    """Write the rotation as Transformers 4 reads it, too: without it, it takes theta 10000."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    if "rope_theta" not in rope:  # none, or layers with different ones
        return
    config["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
