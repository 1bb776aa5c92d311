"""`quantize`: a compressed model in floats in, the same with its matrices in a storage out."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from neuronmm_ops.compress.calibrate import Progress, moments_or_none
from neuronmm_ops.compress.factorization import SecondMoment, Side
from neuronmm_ops.compress.record import attached_report
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.compress.rounding import round_matrix, round_pair
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.hf.calibration import calibration_of
from neuronmm_ops.hf.compress import DEFAULT_SAMPLES
from neuronmm_ops.hf.computing import check_device, load_on
from neuronmm_ops.hf.loading import load_tokenizer, local_directory
from neuronmm_ops.hf.provenance import ModelSource
from neuronmm_ops.hf.saving import save
from neuronmm_ops.hf.text import read_text
from neuronmm_ops.manifest import Origin
from neuronmm_ops.nn import CompressedLinear, StoredLinear, SVDLinear
from neuronmm_ops.nn.dense_linear import as_dense_linear
from neuronmm_ops.nn.swap import replace_
from neuronmm_ops.output import check_target
from neuronmm_ops.storages import checked


def quantize(
    model: str | Path,
    storage: str,
    text: str | Path | None,
    output: str | Path,
    *,
    samples: int = DEFAULT_SAMPLES,
    seqlen: int | None = None,
    device: torch.device | str = "cpu",
    force: bool = False,
    progress: Progress | None = None,
) -> CompressionReport:
    """Round a compressed model's matrices to a storage and write it as a directory of its kind.

    Pairs, recovered ones too, and what compression left dense of its targets. A pair is rounded
    where that costs its own outputs least, see `compress.quantize`.

    Args:
        model: a compressed checkpoint in floats, a local directory or a hub id.
        storage: of `STORAGES`.
        text: whose inputs say what errors cost, or the Path of a file with it; None counts all
            inputs alike.
        output: the directory to write; it must not exist, or `force`.
        samples: calibration blocks, spread over the text.
        seqlen: tokens in a block; default the smaller of 2048 and the model's limit.
        device: to compute on.
        force: replace an existing compressed checkpoint.
        progress: called with (stage, done, total); stages are calibrate and quantize.

    Returns:
        The checkpoint's report; `provenance["quantized"]` says by what.

    Raises:
        CheckpointError: the model cannot be loaded, or is not compressed.
        FileExistsError: the target exists and may not be replaced.
        OSError: the target cannot be written.
        ValueError: a matrix is in a storage already, or does not fit into this one, or the text is
            too short.
        NonFiniteError: a matrix or an activation is NaN or Inf.
    """
    checked(storage)
    place, target, source = check_device(device), Path(output), local_directory(model)
    check_target(target, force, source)
    text_path = text if isinstance(text, Path) else None
    text = read_text(text) if isinstance(text, Path) else text
    loaded, tokenizer = load_on(model, place), load_tokenizer(model)
    report = attached_report(loaded)
    if report is None:
        raise CheckpointError(
            f"{model} is not compressed; make its Linears stored ones with: "
            f"neuronmm compress {model} -o OUT --ratio 0 --storage {storage}"
        )
    for layer in report.layers:
        if layer.storage is not None:
            raise ValueError(
                f"{model} is rounded already ({layer.name}: {layer.storage}); take the checkpoint "
                f"that it was made of, or compress the dense model with --storage {storage}"
            )
    batches, taken, texts = [], dict[str, object](), ()
    if text is not None:
        batches, of = calibration_of(loaded, tokenizer, text, text_path, samples, seqlen, place)
        taken = {"samples": sum(map(len, batches)), "seqlen": of.seqlen, "sha256": of.sha256}
        texts = (of.named,)

    names = [layer.name for layer in report.layers]
    sides: dict[str, Side] = dict.fromkeys(names, "input") if batches else {}
    rounded: dict[str, CompressedLinear] = {}
    for name, moment in moments_or_none(loaded, sides, names, batches, progress):
        rounded[name] = _rounded(name, loaded.get_submodule(name), storage, moment)
        if progress:
            progress("quantize", len(rounded), len(names))
    replace_(loaded, rounded)
    report = replace(
        report,
        layers=tuple(_described(layer, rounded[layer.name]) for layer in report.layers),
        provenance={**report.provenance, "quantized": {"storage": storage, **taken}},
    )
    origin = Origin("quantize", asdict(ModelSource.of(source)), texts)
    save(loaded, target, report, tokenizer, force, origin=origin)
    return report


@torch.no_grad()
def _rounded(
    name: str, layer: nn.Module, storage: str, moment: SecondMoment | None
) -> CompressedLinear:
    """Return what takes the place of a pair or of a dense layer."""
    if isinstance(layer, SVDLinear):
        u, v = layer.u.detach(), layer.v.detach()
        weight = (u.double() @ v.double()).t()
        pair = round_pair(name, storage, (u, v), weight, moment, None)
        scales = pair.u_scale, pair.v_scale
        return SVDLinear.from_factors(pair.u, pair.v, layer.bias, *scales, dtype=layer.dtype)
    linear = as_dense_linear(layer)
    matrix = round_matrix(name, storage, linear.weight.detach(), moment)
    return StoredLinear.from_matrix(*matrix, linear.bias, dtype=linear.weight.dtype)


def _described(layer: LayerReport, new: CompressedLinear) -> LayerReport:
    """Return the report of a layer that was rounded; its truncation's loss is what it was."""
    return LayerReport.of(layer.name, new, new.rank, layer.loss, layer.reason)
