"""The record of a model's compressed layers: what its config.json says of them.

`compress_` and `swap_` put it into the model's config, as `quantization_config`, so that any later
`save_pretrained` (a Trainer's, `push_to_hub`'s) writes a checkpoint that can be loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from torch import nn

from neuronmm_ops.compress.coverage import still_dense
from neuronmm_ops.compress.report import CompressionReport, LayerReport, provenance_of
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.nn.swap import Factors, shared_weights, swap_modules_
from neuronmm_ops.rank import parameter_count
from neuronmm_ops.storages import COMPUTES, STORAGES

QUANT_METHOD = "neuronmm"
FORMAT_VERSION = 1


def record_of(report: CompressionReport) -> dict[str, Any]:
    """Return the `quantization_config` entry for a report."""
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        **report.to_dict(),
    }


def is_record(entry: object) -> TypeGuard[Mapping[str, Any]]:
    """Say whether a `quantization_config` entry is one of this package."""
    return isinstance(entry, Mapping) and entry.get("quant_method") == QUANT_METHOD


def report_of(record: Mapping[str, Any]) -> CompressionReport:
    """Read a `quantization_config` entry; raise CheckpointError where it cannot be read."""
    if not is_record(record):
        raise CheckpointError(
            f"quant_method must be {QUANT_METHOD!r}, got {record.get('quant_method')!r}"
        )
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"format_version must be {FORMAT_VERSION}, got {version!r}; "
            "the checkpoint was written by another version of neuronmm-ops"
        )
    try:
        return CompressionReport.from_dict(record)
    except ValueError as error:
        raise CheckpointError(f"quantization_config is malformed: {error}") from None


def attached_report(model: nn.Module) -> CompressionReport | None:
    """Return the report in the model's config, None where there is no record of this package."""
    entry = getattr(getattr(model, "config", None), "quantization_config", None)
    if is_record(entry):
        return report_of(entry)
    # A loaded model's config has an `hf.NeuronMMConfig` there.
    report = getattr(entry, "report", None)
    return report if isinstance(report, CompressionReport) else None


def attach(model: nn.Module, report: CompressionReport) -> None:
    """Put the report into the config of a Transformers model; other models have no such place.

    Layers that an earlier run has replaced and the report does not list stay recorded, and what
    that left dense where it still is.
    """
    config = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    previous = attached_report(model)
    known = {layer.name for layer in report.layers}
    others = {name: m for name, m in compressed_layers(model).items() if name not in known}
    if others:
        recorded = {layer.name: layer for layer in previous.layers} if previous else {}
        earlier = (
            recorded.get(name) or LayerReport.of(name, layer, layer.rank, loss=None)
            for name, layer in others.items()
        )
        report = replace(report, layers=(*report.layers, *earlier))
    left = {entry.name: entry for entry in (previous.left_dense if previous else ())}
    left |= {entry.name: entry for entry in report.left_dense}
    dense = still_dense(model, left.values(), report.layers)
    if previous and previous.narrowed and not report.narrowed:
        # whose dense model was wider than what the later run found
        total = previous.model_parameters
        report = replace(report, narrowed=previous.narrowed, model_parameters=total)
    report = replace(report, left_dense=dense)
    config.quantization_config = record_of(report)  # pyright: ignore


def swap_(model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Replace Linears by `SVDLinear`s or `StoredLinear`s, in place, and gated MLPs by `SVDMLP`s.

    Bias, buffers, hooks, dtype, device, training flag and requires_grad are those of the replaced
    module. A Linear used at several places is replaced at all of them by one SVDLinear. A
    Transformers model's config records the layers, so `save_pretrained` writes a checkpoint that
    can be loaded.

    Args:
        model: any module that contains the Linears.
        factors: qualified name of the Linear to `(u[K, r], v[r, N])`; in float8_e4m3fn or int8 to
            `(u, v, u_scale[r], v_scale[N])`, or where it stays dense `(w[K, N], w_scale[N])`.

    Raises:
        ValueError: a name is no `nn.Linear` of the model, two names are the same one, factors or
            scales do not fit or hold what they must not, or the weight is shared with another
            module. Nothing is replaced then.
    """
    shared = shared_weights(model)
    for name in factors:
        if name in shared:
            raise ValueError(
                f"{name} shares its weight with {shared[name]}; a swap would untie them, "
                "leave it out"
            )
    swap_modules_(model, factors)
    swapped = {model.get_submodule(name) for name in factors}
    layers = tuple(
        LayerReport.of(name, layer, layer.rank, loss=None)
        for name, layer in compressed_layers(model).items()
        if layer in swapped
    )
    if layers:
        provenance, total = provenance_of(model), dense_parameters(model)
        attach(model, CompressionReport(None, layers, None, provenance, total))


def set_compute_(model: nn.Module, compute: str) -> None:
    """Say what the model's products may be computed in, in place; its config records it.

    `fp8` is a permission to round activations, too: token by token to e4m3, before each product of
    a layer that is stored in fp8. NeuronCores from trn2 on then multiply twice as fast in
    prefill. Accuracy changes, measure it; the CPU computes the same. `x` takes it back.

    Args:
        model: with layers that are stored in fp8; others stay as they are.
        compute: `fp8` or `x`, the dtype of the activations.

    Raises:
        ValueError: it is neither, or the model has no such layer. Nothing is changed then.
    """
    if compute not in COMPUTES:
        raise ValueError(f"compute must be one of {', '.join(COMPUTES)}; got {compute!r}")
    layers = [
        layer
        for layer in compressed_layers(model).values()
        if layer.storage and "fp8" in STORAGES[layer.storage].computes
    ]
    if compute != "x" and not layers:
        raise ValueError(
            f"compute {compute} needs layers stored in float8_e4m3fn, the model has none; "
            "compress it with storage fp8"
        )
    for layer in layers:
        layer.compute = compute
    rewrite_record(
        model, lambda layer: replace(layer, compute=compute) if layer.takes("fp8") else layer
    )


def rewrite_record(model: nn.Module, change: Callable[[LayerReport], LayerReport]) -> None:
    """Change what the model's config says of each layer, where it says anything."""
    report = attached_report(model)
    if report is not None:
        record = record_of(replace(report, layers=tuple(map(change, report.layers))))
        model.config.quantization_config = record  # pyright: ignore


def low_rank_layers(model: nn.Module) -> dict[str, SVDLinear]:
    """Return the model's `SVDLinear`s by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SVDLinear)}


def compressed_layers(model: nn.Module) -> dict[str, CompressedLinear]:
    """Return the model's `SVDLinear`s and `StoredLinear`s by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, CompressedLinear)}


def dense_parameters(model: nn.Module) -> int:
    """Count the model's parameters as if its low-rank layers were dense."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for layer in low_rank_layers(model).values():
        K, N, r = layer.in_features, layer.out_features, layer.rank
        total += K * N - parameter_count(K, N, r)
    return total
