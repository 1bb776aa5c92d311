"""The kernels that a low-rank model launches on one core, each once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuroncore import NkiValidationError
from neuroncore.hardware import resolve_target
from neuronmm_ops.checkpoint import read_config
from neuronmm_ops.compress.record import is_record, report_of
from neuronmm_ops.compress.report import CompressionReport
from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.launches import KernelLaunch
from neuronmm_ops.estimate.linears import MLP, Linear, linears
from neuronmm_ops.estimate.model import Options, prepared
from neuronmm_ops.models import ModelShape, resolve_shape
from neuronmm_ops.storages import dtype_name

DECODE_CACHE = 2048
"""Tokens that the cache of decode's attention holds at least."""


def launches_of(model: str, tokens: Sequence[int], options: Options) -> list[dict[str, Any]]:
    """What a compressed checkpoint, or the low-rank variant of `bench model`, launches.

    Args:
        model: as `models.resolve_shape` takes it; a compressed checkpoint has its own ranks and
            storages.
        tokens: of a pass; 1 is decode.
        options: as `estimate.model.run`; one rank, and one sequence.

    Returns:
        For each launch that differs from the others `components`, `tokens`, and what a driver
        needs: `module`, `kernel`, `lnc`, `target`, `operands` (shape and dtype, or None) in the
        kernel's order, and `arguments` by name.

    Raises:
        ValueError: as `estimate.model.run`.
        OSError: a config.json that cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    cache = max(DECODE_CACHE, *tokens)
    for decoder in _decoders(model, options):
        for M in dict.fromkeys(tokens):
            try:
                parts = decoder.parts(M, {cache if M == 1 else M: 1.0})
                ways = [(part.component, decoder.tracer.quickest(part.ways)) for part in parts]
            except NkiValidationError as error:
                raise ValueError(f"{decoder.whole.name} on {decoder.target}: {error}") from error
            for component, way in ways:
                for request in [_request(launch, decoder.target) for launch in way.launches]:
                    row = {"components": [], "tokens": [], **request}
                    row = found.setdefault(json.dumps(request), row)
                    _add(row["components"], component)
                    _add(row["tokens"], M)
    return list(found.values())


def _decoders(model: str, options: Options) -> list[Decoder]:
    """The model with each kind of layer that it has: one, or those that a checkpoint records."""
    entry: Any = None
    if Path(model).is_dir():
        entry = read_config(Path(model)).get("quantization_config")
    if not is_record(entry):
        return [prepared(model, options)[0]["low_rank"]]
    shape, machine = resolve_shape(model), resolve_target(options.target)
    machine.check_lnc(options.lnc)
    return [
        Decoder(shape, layer, machine.target, options.lnc, tp=1, batch=1)
        for layer in _layers(shape, report_of(entry))
    ]


def _layers(shape: ModelShape, report: CompressionReport) -> list[dict[str, Linear]]:
    """The Linears of each kind of layer that a record has."""
    dense = linears(shape)
    layers: dict[str, dict[str, Linear]] = {}
    for each in report.layers:
        path, _, name = each.name.rpartition(".")
        if name in shape.projections:
            stored = dtype_name(each.storage) or ""
            layer = layers.setdefault(path.rpartition(".")[0], dict(dense))
            layer[name] = dense[name]._replace(r=each.r, stored=stored)
    kinds = [*layers.values(), *[dense] * (len(layers) < shape.layers)]
    for layer in kinds:
        if len({layer[name].stored for name in MLP}) > 1:
            raise ValueError(
                f"gate, up and down of {shape.name} must be stored alike, as they share a launch; "
                "give --model its config.json and --storage instead"
            )
    return [layer for n, layer in enumerate(kinds) if layer not in kinds[:n]]


def _request(launch: KernelLaunch, target: str) -> dict[str, Any]:
    return {
        "module": launch.kernel.func.__module__,
        "kernel": launch.kernel.func.__name__,
        "lnc": launch.kernel.lnc,
        "target": target,
        "operands": [each and [list(each.shape), each.dtype] for each in launch.operands],
        "arguments": launch.arguments,
    }


def _add(values: list[Any], value: Any) -> None:
    if value not in values:
        values.append(value)
