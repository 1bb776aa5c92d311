"""A decoder layer of one token: one launch next to separate ones, dense and low-rank; modelled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.runner import run_all
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.ends import spread
from neuronmm_ops.estimate.launches import PassCost
from neuronmm_ops.estimate.linears import linears
from neuronmm_ops.estimate.one_launch import FURTHER, bound_ms, layers_cost
from neuronmm_ops.models import SHAPES

TARGET, TOKENS = "trn2", 2048
CASES = (
    ("Llama-3.2-1B", "", 0.2),
    ("Llama-3.2-1B", "float8_e4m3fn", 0.5),
    ("Qwen3-0.6B", "", 0.2),
    ("Llama-3.1-8B", "float8_e4m3fn", 0.5),
)
"""Model, dtype of stored weights (bfloat16 without), ratio; each dense, too."""


class ModelledLayer(NamedTuple):
    """A layer on one launch.

    Attributes:
        model: its shape.
        stored: dtype of stored weights, or "".
        ratio: of every Linear; 0 where they are dense.
        lnc: cores.
    """

    model: str
    stored: str
    ratio: float
    lnc: int

    def decoder(self, layers: int = 1, tp: int = 1) -> Decoder:
        """A model of so many such layers, on so many ranks."""
        shape = replace(SHAPES[self.model], layers=layers)
        every = linears(shape, set(shape.projections), self.stored, ratio=self.ratio or None)
        return Decoder.uniform(shape, every, target=TARGET, lnc=self.lnc, tp=tp, batch=1)


def run(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Rows of all cases: dense and low-rank, on one core and on two.

    Args:
        progress: called with ("layers", layers done, layers in all).
    """
    layers = [
        ModelledLayer(model, stored, ratio, lnc)
        for model, stored, kept in CASES
        for ratio in (0.0, kept)
        for lnc in (1, 2)
    ]
    return list(run_all("layers", row, layers, progress))


def row(layer: ModelledLayer) -> dict[str, Any]:
    """What a layer takes in separate launches, and in one, which a further one makes longer."""
    decoder = layer.decoder()
    apart, launches = separate(decoder)
    one, more = launch_costs(layer)
    return {
        **layer._asdict(),
        "target": TARGET,
        "tokens": TOKENS,
        "launches": launches,
        "separate_ms": apart.times_ms[0],
        "separate_range_ms": spread(apart.times_ms),
        "one_ms": one.times_ms[0],
        "one_range_ms": spread(one.times_ms),
        "more_ms": more.times_ms[0],
        "more_range_ms": spread(more.times_ms),
        "bound_ms": bound_ms(decoder, one),
    }


def launch_costs(layer: ModelledLayer, tp: int = 1) -> tuple[PassCost, PassCost]:
    """What a launch of one layer takes, and what a further one adds to it."""
    one, several = [
        layers_cost(layer.decoder(count, tp), {TOKENS: 1.0})[0] for count in (1, 1 + FURTHER)
    ]
    return one, PassCost().plus(several.plus(one, -1), 1 / FURTHER)


def separate(decoder: Decoder) -> tuple[PassCost, int]:
    """What a layer takes as the launches of its components, and how many they are."""
    total, launches = PassCost(), 0
    ending = len([*decoder.ending()])
    for part in [*decoder.parts(1, {TOKENS: 1.0})][:-ending]:
        way = decoder.tracer.quickest(part.ways)
        total = total.plus(decoder.tracer.launches(way.launches), part.times)
        launches += round(part.times) * len(way.launches)
    return total, launches
