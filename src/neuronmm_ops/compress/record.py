"""The record of a model's low-rank layers: what its config.json says of them.

`compress_` and `swap_` put it into the model's config, as `quantization_config`, so that any later
`save_pretrained` (a Trainer's, `push_to_hub`'s) writes a checkpoint that can be loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from neuronmm_ops.compress.rank import parameter_count
from neuronmm_ops.compress.report import CompressionReport, LayerReport, provenance_of
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.nn.swap import swap_modules_

QUANT_METHOD = "neuronmm"
FORMAT_VERSION = 1


def record_of(report: CompressionReport) -> dict[str, Any]:
    """Return the `quantization_config` entry for a report."""
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        **report.to_dict(),
    }


def report_of(record: Mapping[str, Any]) -> CompressionReport:
    """Read a `quantization_config` entry.

    Raises:
        CheckpointError: it is not ours, of an unknown version, or malformed.
    """
    method, version = record.get("quant_method"), record.get("format_version")
    if method != QUANT_METHOD:
        raise CheckpointError(f"quant_method must be {QUANT_METHOD!r}, got {method!r}")
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
    """Return the report in the model's config; None where there is none of ours.

    Raises:
        CheckpointError: it is ours, and malformed.
    """
    entry = getattr(getattr(model, "config", None), "quantization_config", None)
    record = entry if isinstance(entry, Mapping) or entry is None else entry.to_dict()
    if record is None or record.get("quant_method") != QUANT_METHOD:
        return None
    return report_of(record)


def attach(model: nn.Module, report: CompressionReport) -> None:
    """Put the report into the config of a Transformers model; other models have no such place.

    Low-rank layers of an earlier run, which the report does not know, stay recorded.
    """
    config = getattr(model, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        layers = (*report.layers, *_earlier_layers(model, report))
        config.quantization_config = record_of(replace(report, layers=layers))  # pyright: ignore


def swap_(model: nn.Module, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Replace Linears by `SVDLinear`s, in place, and gated MLPs around them by `SVDMLP`s.

    Bias, buffers, hooks, dtype, device, training flag and requires_grad are those of the replaced
    module. A Linear used at several places is replaced at all of them by one SVDLinear. A
    Transformers model's config records the layers, so `save_pretrained` writes a checkpoint that
    can be loaded.

    Args:
        model: any module that contains the Linears.
        factors: qualified name of the Linear to `(u[K, r], v[r, N])`.

    Raises:
        ValueError: a name is no `nn.Linear` of the model, two names are the same one, shapes do
            not fit, or the weight is shared with another module. Nothing is replaced then.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    swap_modules_(model, factors)
    layers = tuple(_layer(name, model.get_submodule(name)) for name in factors)
    if layers:
        provenance = provenance_of(model)
        attach(model, CompressionReport(None, layers, None, provenance, total))


def low_rank_layers(model: nn.Module) -> dict[str, SVDLinear]:
    """Return the model's `SVDLinear`s by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SVDLinear)}


def _earlier_layers(model: nn.Module, report: CompressionReport) -> list[LayerReport]:
    """Return what the model's config says of the low-rank layers that the report leaves out."""
    previous = attached_report(model)
    known = {layer.name for layer in report.layers}
    unknown = {name: m for name, m in low_rank_layers(model).items() if name not in known}
    recorded = {layer.name: layer for layer in previous.layers} if previous else {}
    return [recorded.get(name) or _layer(name, module) for name, module in unknown.items()]


def _layer(name: str, module: nn.Module) -> LayerReport:
    """Describe an SVDLinear whose factors come from elsewhere: its loss is not known."""
    assert isinstance(module, SVDLinear)
    K, N, r = module.in_features, module.out_features, module.rank
    size = module.u.element_size()
    return LayerReport(
        name=name,
        K=K,
        N=N,
        r=r,
        dense=False,
        reason=None,
        loss=None,
        bytes=parameter_count(K, N, r) * size,
        dense_bytes=K * N * size,
    )
