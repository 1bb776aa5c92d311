"""The layers of a compressed checkpoint as its record has them: ranks, storages, dense matrices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from neuronmm_ops.checkpoint import INDEX, SINGLE, inspect_headers, read_config
from neuronmm_ops.compress.record import is_record, report_of
from neuronmm_ops.compress.report import CompressionReport, LayerReport
from neuronmm_ops.estimate.decoder import Kind
from neuronmm_ops.estimate.linears import HEAD, linears
from neuronmm_ops.models import ModelShape
from neuronmm_ops.plan.linear import Linear
from neuronmm_ops.storages import dtype_name

RIVAL = "fp8"
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(\w+)")
_BITS = re.compile(r"[A-Z]+(\d+)")


class Layers(NamedTuple):
    """The Linears of a model: those of its layers, and the output head."""

    kinds: tuple[Kind, ...]
    head: Linear


class Recorded(NamedTuple):
    """A compressed checkpoint.

    Attributes:
        report: its record.
        own: its Linears.
        dense: the sizes of the dense model, whose MLPs may be wider.
        rival: its Linears, every recorded matrix in `rival_storage`.
        rival_storage: what most of the matrices have; `RIVAL` where all are of the model's dtype.
        bytes: of all tensors in its files; None where there are no weights next to config.json.
    """

    report: CompressionReport
    own: Layers
    dense: ModelShape
    rival: Layers
    rival_storage: str
    bytes: int | None


def recorded(model: str, shape: ModelShape) -> Recorded | None:
    """Read what a compressed checkpoint has.

    Args:
        model: as `models.resolve_shape` takes it.
        shape: what that returns.

    Returns:
        None where it is no directory, or one of a model that is not compressed.

    Raises:
        CheckpointError: a config.json, a record or a header that cannot be read, or does not fit.
        ValueError: a recorded matrix that is no Linear of a layer of the shape, nor its head.
    """
    directory = Path(model)
    entry = read_config(directory).get("quantization_config") if directory.is_dir() else None
    if not is_record(entry):
        return None
    report = report_of(entry)
    stored = Counter([each.storage for each in report.layers if each.storage])
    rival = stored.most_common(1)[0][0] if stored else RIVAL
    dense = dtype_name(rival) or ""
    whole, narrowed = shape, report.narrowed
    if narrowed:
        if narrowed.kept != shape.intermediate_size:
            raise ValueError(
                f"config.json has intermediate_size {shape.intermediate_size}, its record says "
                f"{narrowed.kept}; copy the file again"
            )
        whole = replace(shape, intermediate_size=narrowed.inner)
    _check_sizes(shape, report.layers)
    return Recorded(
        report,
        _layers(shape, report.layers, lambda each, _: _linear(each)),
        whole,
        _layers(whole, report.layers, lambda _, each: each._replace(stored=dense)),
        rival,
        _bytes(directory),
    )


def described(record: Recorded) -> dict[str, Any]:
    """What a document says of a checkpoint: `ratio` and storages as its options, and more.

    `bytes` is of all tensors as they lie in its files, null without them; `matrix_bytes` of the
    recorded matrices, `dense_matrix_bytes` of these while they were dense.
    """
    report, layers = record.report, record.report.layers
    ranks = [each.r for each in layers if each.r is not None]
    return {
        "ratio": report.ratio,
        "storage": _storages([each for each in layers if each.r is not None]),
        "storage_dense": _storages([e for e in layers if e.r is None and e.name != HEAD]),
        "storage_lm_head": _storages([e for e in layers if e.r is None and e.name == HEAD]),
        "targets": " ".join(report.config.target_list) if report.config else "its record",
        "checkpoint": {
            "rival_storage": record.rival_storage,
            "effective_ratio": report.effective_ratio,
            "bytes": record.bytes,
            "matrix_bytes": sum([each.bytes for each in layers]),
            "dense_matrix_bytes": report.dense_bytes,
            "low_rank": len(ranks),
            "dense": len(layers) - len(ranks),
            "least_rank": min(ranks, default=None),
            "greatest_rank": max(ranks, default=None),
            "kinds": len(record.own.kinds),
        },
    }


def _storages(layers: Sequence[LayerReport]) -> str | None:
    return ", ".join(sorted({each.storage for each in layers if each.storage})) or None


def _linear(layer: LayerReport) -> Linear:
    return Linear(layer.K, layer.N, layer.r, dtype_name(layer.storage) or "")


def _check_sizes(shape: ModelShape, layers: Sequence[LayerReport]) -> None:
    """Raise ValueError where the record and the sizes of the model differ."""
    dense = linears(shape)
    for layer in layers:
        _, name = _place(layer, shape)
        if dense[name][:2] != (layer.K, layer.N):
            raise ValueError(
                f"{layer.name} must be [{dense[name].K}, {dense[name].N}] by the sizes in "
                f"config.json, its record says [{layer.K}, {layer.N}]; copy the file again"
            )


def _layers(
    shape: ModelShape,
    layers: Sequence[LayerReport],
    linear: Callable[[LayerReport, Linear], Linear],
) -> Layers:
    """The Linears of a model whose other ones are dense; equal layers are one kind.

    What is made of a recorded layer is told its dense matrix.
    """
    dense = linears(shape)
    each = [dict(dense) for _ in range(shape.layers)]
    for layer in layers:
        number, name = _place(layer, shape)
        for by_name in each if number is None else [each[number]]:
            by_name[name] = linear(layer, dense[name])
    counted = Counter([tuple(by_name.items()) for by_name in each])
    kinds = [Kind(dict(by_name), count) for by_name, count in counted.items()]
    return Layers(tuple(kinds), each[0][HEAD])


def _place(layer: LayerReport, shape: ModelShape) -> tuple[int | None, str]:
    """The number of a layer and the name of its Linear; None and `HEAD` for the output head."""
    if layer.name == HEAD:
        return None, HEAD
    match = _LAYER.fullmatch(layer.name)
    if not match or int(match[1]) >= shape.layers or match[2] not in shape.projections:
        raise ValueError(
            f"a checkpoint can be modelled whose matrices are {', '.join(shape.projections)} of "
            f"layers 0 to {shape.layers - 1}, and {HEAD}; its record has {layer.name}"
        )
    return int(match[1]), match[2]


def _bytes(directory: Path) -> int | None:
    if not any((directory / name).exists() for name in (SINGLE, INDEX)):
        return None
    _, headers = inspect_headers(directory)
    return sum([prod(each.shape) * _itemsize(each.dtype) for each in headers.values()])


def _itemsize(dtype: str) -> int:
    """Bytes of an element of a tensor, by its dtype's name in safetensors; a BOOL has one."""
    match = _BITS.match(dtype)
    return int(match[1]) // 8 if match else 1
