"""The kernels that a low-rank model launches on one core, each once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from neuroncore import NkiValidationError
from neuronmm_ops.estimate import one_launch
from neuronmm_ops.estimate.launches import Way
from neuronmm_ops.estimate.subject import Options, prepared
from neuronmm_ops.plan.launches import Operand, PlannedKernel, TensorShape

DECODE_CACHE = 2048
"""Tokens that the cache of decode's attention holds at least."""


def launches_of(model: str, tokens: Sequence[int], options: Options) -> list[dict[str, Any]]:
    """What a compressed checkpoint, or the low-rank variant of `bench model`, launches.

    Decode has the kernels of a layer, and one of a whole layer, as `fuse_decoder_` launches it.

    Args:
        model: as `models.resolve_shape` takes it; a compressed checkpoint has its own ranks and
            storages.
        tokens: of a pass; 1 is decode.
        options: as `estimate.model.run`; one rank, and one sequence.

    Returns:
        For each launch that differs from the others `components`, `tokens`, and what a driver
        needs: `module`, `kernel`, `lnc`, `target`, `operands` (shape and dtype, or a list of them,
        or None) in the kernel's order, and `arguments` by name.

    Raises:
        ValueError: as `estimate.model.run`.
        OSError: a config.json that cannot be read.
    """
    rows: dict[str, dict[str, Any]] = {}
    cache = max(DECODE_CACHE, *tokens)
    decoder = prepared(model, options).decoders["low_rank"]
    for M in dict.fromkeys(tokens):
        try:
            parts = decoder.parts(M, {cache if M == 1 else M: 1.0})
            ways = [(part.component, decoder.tracer.quickest(part.ways)) for part in parts]
            if M == 1 and one_launch.refusal(decoder) is None:
                layers = one_launch.single_layers(decoder, cache)
                ways.append(("decoder_layer", Way(tuple(layers))))
        except NkiValidationError as error:
            raise ValueError(f"{decoder.whole.name} on {decoder.target}: {error}") from error
        for component, way in ways:
            for request in [_request(launch, decoder.target) for launch in way.launches]:
                row = {"components": [], "tokens": [], **request}
                row = rows.setdefault(json.dumps(request), row)
                _add(row["components"], component)
                _add(row["tokens"], M)
    return list(rows.values())


def _request(launch: PlannedKernel, target: str) -> dict[str, Any]:
    return {
        "module": launch.kernel.func.__module__,
        "kernel": launch.kernel.func.__name__,
        "lnc": launch.kernel.lnc,
        "target": target,
        "operands": [_described(each) for each in launch.operands],
        "arguments": launch.arguments,
    }


def _described(operand: Operand) -> Any:
    """Shape and dtype of a tensor, or those of each of a tuple."""
    if operand is None or isinstance(operand, TensorShape):
        return operand and [list(operand.shape), operand.dtype]
    return [_described(each) for each in operand]


def _add(values: list[Any], value: Any) -> None:
    if value not in values:
        values.append(value)
