"""One pass of a whole model, prefill's or a token's, in the quickest layouts that fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from neuronmm_ops.estimate import one_launch
from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.ends import ENDS, spread
from neuronmm_ops.estimate.launches import PassCost, Way
from neuronmm_ops.estimate.memory import Taken, check_capacity, fits, layer_bytes, memory_of
from neuronmm_ops.plan.exchange import PUBLISHED_US
from neuronmm_ops.plan.layouts import DIVIDED, LAYOUTS, Group, Layout

COMPONENTS = ("norm", "qkv", "rope", "attention", "output", "mlp", "lm_head", "collectives")
PHASES = ("prefill", "decode")
POINTS = 3
"""Lengths of the cache at which decode's attention is traced."""


def lengths(first: int, last: int) -> dict[int, float]:
    """Lengths of the cache to trace, each with its share in the mean over first to last.

    What lies between two of them is taken to be linear.
    """
    traced = sorted({first + round(n * (last - first) / (POINTS - 1)) for n in range(POINTS)})
    every = np.arange(first, last + 1)
    hats = np.eye(len(traced))
    return {T: float(np.interp(every, traced, hats[n]).mean()) for n, T in enumerate(traced)}


def fitting(
    decoder: Decoder, prompt: int, new: int, told: Callable[[int], None]
) -> tuple[Decoder, dict[str, Any], dict[str, int]]:
    """Both phases in the quickest layouts whose weights fit, and what a rank holds for them.

    Args:
        decoder: the model.
        prompt: tokens of each sequence's prompt.
        new: tokens after it.
        told: called with how many parts of `Decoder.layers` are done, of both phases.

    Raises:
        ValueError: the weights fit in no layout.
        NkiValidationError: as `pass_of`.
    """
    passes = {
        "prefill": (prompt, {prompt: 1.0}),
        "decode": (1, lengths(prompt + 1, prompt + new - 1)),
    }
    for layouts in (LAYOUTS, DIVIDED, DIVIDED[:2]):
        decoder, phases = replace(decoder, layouts=layouts), dict[str, Any]()
        for number, phase in enumerate(PHASES):
            before = number * len(decoder.layers)
            phases[phase] = pass_of(decoder, *passes[phase], lambda n, b=before: told(b + n))
        memory = memory_of(decoder, prompt, new, _taken(phases))
        if fits(memory):
            break
    else:
        check_capacity(decoder, memory)
    phases["decode"]["one_launch"] = _one_launch(decoder, passes["decode"][1])
    if decoder.tp > 1:
        published = replace(decoder, least_us=PUBLISHED_US)
        for phase in PHASES:
            slower = pass_of(published, *passes[phase])
            phases[phase]["published_collectives"] = {
                "least_us": PUBLISHED_US,
                "time_ms": slower["time_ms"],
                "times_ms": slower["times_ms"],
            }
    return decoder, phases, memory


def _taken(phases: Mapping[str, Any]) -> Taken:
    """The layouts of all phases."""
    rows = [row for phase in phases.values() for row in phase["layouts"] if row["taken"]]
    taken = defaultdict[tuple[int, Group], list[Layout]](list)
    for row in rows:
        for group, layout in row["layouts"].items():
            taken[row["part"], group].append(layout)
    return taken


def pass_of(
    decoder: Decoder,
    tokens: int,
    shares: Mapping[int, float],
    told: Callable[[int], None] = lambda number: None,
) -> dict[str, Any]:
    """What one pass takes, in all and by component, and the layouts that ranks may take.

    Args:
        decoder: the model.
        tokens: as `Decoder.parts`.
        shares: as its `lengths`.
        told: called with how many parts of `Decoder.layers` are done.

    Raises:
        ValueError: sizes that no kernel is planned for.
        NkiValidationError: a kernel that does not run on the target.
    """
    costs: dict[str, PassCost] = dict.fromkeys(COMPONENTS, PassCost())
    launches: dict[str, float] = dict.fromkeys(COMPONENTS, 0.0)
    layouts: list[dict[str, Any]] = []
    for part in decoder.parts(tokens, shares):
        way = decoder.tracer.quickest(part.ways)
        cost = decoder.tracer.launches(way.launches)
        costs[part.component] = costs[part.component].plus(cost, part.times)
        launches[part.component] += part.times * len(way.launches)
        links = PassCost((way.collectives_ms,) * len(ENDS))
        costs["collectives"] = costs["collectives"].plus(links, part.times)
        launches["collectives"] += part.times * len(way.collectives)
        if part.number is None:
            continue
        told(part.number + 1)
        for each in [each for each in part.ways if each.layouts]:
            layout = _layout(decoder, part.number, each)
            layouts.append({"component": part.component, "taken": each is way, **layout})
    total = PassCost()
    for cost in costs.values():
        total = total.plus(cost)
    counts = {name: round(launches[name]) for name in COMPONENTS}
    components = [
        {"component": name, "launches": count, **_fields(costs[name])}
        for name, count in counts.items()
    ]
    return {
        "launches": sum(counts.values()),
        **_fields(total),
        "components": components,
        "layouts": layouts,
    }


def _one_launch(decoder: Decoder, shares: Mapping[int, float]) -> dict[str, Any]:
    """A token whose layers share launches: as `pass_of`, or why they do not."""
    why = one_launch.refusal(decoder)
    if why is not None:
        return {"left_out": why}
    total, launches = one_launch.pass_cost(decoder, shares)
    row = {"launches": launches, **_fields(total)}
    row["bound_ms"] = one_launch.bound_ms(decoder, total)
    if decoder.tp > 1:
        row["published_collectives_ms"] = total.times_ms[0] + one_launch.published_ms(decoder)
    return row


def _layout(decoder: Decoder, number: int, way: Way) -> dict[str, Any]:
    """One way to divide a component's weights: what a layer takes, and what a rank holds of it."""
    cost, part = decoder.tracer.launches(way.launches), decoder.layers[number]
    return {
        "part": number,
        "layers": part.layers,
        "layouts": dict(way.layouts),
        "launches": len(way.launches),
        "launches_ms": cost.times_ms[0],
        "collectives": [each._asdict() for each in way.collectives],
        "collectives_ms": way.collectives_ms,
        "time_ms": cost.times_ms[0] + way.collectives_ms,
        "wire_bytes": round(sum([each.wire_bytes for each in way.collectives])),
        "hbm_bytes": round(cost.hbm_bytes),
        "weight_bytes": sum([layer_bytes(part, g, (layout,)) for g, layout in way.layouts]),
    }


def _fields(cost: PassCost) -> dict[str, Any]:
    low, high = spread(cost.times_ms) if cost.times_ms[0] else (0.0, 0.0)
    return {
        "time_ms": cost.times_ms[0],
        "time_low_ms": low,
        "time_high_ms": high,
        "times_ms": dict(zip(ENDS, cost.times_ms, strict=True)),
        "hbm_bytes": round(cost.hbm_bytes),
    }
