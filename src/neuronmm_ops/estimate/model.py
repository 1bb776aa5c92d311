"""A whole model's time on Trainium, modelled: prefill and a token of decode, by component.

Every launch is a kernel traced on the simulated core, one after the other. Our own best dense
kernels stand next to the low-rank ones, and the published setting next to both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from neuroncore import NkiValidationError
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.ends import ENDS, compared, ratios_of
from neuronmm_ops.estimate.linears import DTYPE, HEAD
from neuronmm_ops.estimate.memory import everywhere, weight_bytes
from neuronmm_ops.estimate.passes import PHASES, fitting
from neuronmm_ops.estimate.served import FURTHER_US, TOKEN_US, as_served, speedup_as_served
from neuronmm_ops.estimate.speculation import speculated
from neuronmm_ops.estimate.subject import Options, prepared
from neuronmm_ops.plan.layouts import Layout
from neuronmm_ops.plan.linear import Linear

LEFT_OUT = (
    "host: launching, scheduling, tokenizing, and everything between two launches",
    "the embedding's rows, and the last token's rows after prefill",
    "sampling beyond argmax",
    "overlap of a launch with the next: a compiler may start a launch's loads early",
)
LEFT_OUT_OF_RANKS = (
    "overlap of a collective with the launches around it, and what it takes of their DMA engines",
    "what puts the columns of several ranks into rows after an all-gather of more than one token",
)
"""Next to those, with tensor parallel."""


def run_each(
    model: str, options: Options, ranks: Sequence[int], progress: Progress | None = None
) -> list[dict[str, Any]]:
    """`run` for several numbers of ranks instead of `tp`; all are checked before the first runs.

    Raises:
        ValueError: as `run`.
        OSError: as `run`.
    """
    each = [replace(options, tp=tp) for tp in dict.fromkeys(ranks)]
    for one in each:
        prepared(model, one)
    return [run(model, one, progress) for one in each]


def run(
    model: str, options: Options | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Model the time of a prompt and of the tokens after it, in bfloat16.

    Args:
        model: as `models.resolve_shape` takes it. The directory of a compressed checkpoint is
            modelled with its own ranks, storages and dense matrices, layer by layer.
        options: None for the defaults.
        progress: called with ("model", parts planned and traced, parts in all): every Linear of a
            layer, or those that share a launch, in both phases, once where layers are alike.

    Returns:
        One document. Each of its `variants` has the phases `prefill` and `decode` (a mean token),
        whose `components` add up to their time; `times_ms` has it at each of `ends.ENDS`, `time_ms`
        at the first, `time_low_ms` and `time_high_ms` its range. `hbm_bytes`, `weight_bytes` and
        `memory` are of one rank. With tp a phase's `layouts` has every way to divide the weights of
        a layer's component, and `published_collectives` its time where no collective is quicker
        than published ones. `speedups` have a middle, a range and each end (`by_model`). Decode's
        phases and speed-ups have `as_served`, with `token_us` added, and `launch_us` for each
        launch and collective (see `served`). Decode's `one_launch` has a token whose layers share
        launches, and the time of its bytes at the DMA peak; or `left_out`, why they do not.
        `left_out` names what is not counted, and variants that cannot run.
        `checkpoint` is as `recorded.described`, null without one; `draft` as
        `speculation.speculated`, with its `name`, null without one.

    Raises:
        ValueError: an unknown name, a number out of range, or a model that does not fit.
        OSError: a config.json that cannot be read.
    """
    options = options or Options()
    subject = prepared(model, options)
    decoders, left_out = subject.decoders, [*subject.left_out]
    shape, target = decoders["dense"].whole, decoders["dense"].target
    steps = [len(PHASES) * len(each.layers) for each in decoders.values()]
    rows: list[dict[str, Any]] = []
    for number, (name, each) in enumerate(decoders.items()):

        def told(step: int, before: int = sum(steps[:number])) -> None:
            if progress is not None:
                progress("model", before + step, sum(steps))

        try:
            decoder, phases, memory = fitting(each, options.prompt, options.new, told)
        except NkiValidationError as error:
            if each.mlp == "ours":
                raise ValueError(f"{shape.name} on {target}: {error}") from error
            left_out.append(f"{name}: {error}")
            continue
        rows.append(_row(name, decoder, phases, memory, options.new))
    of_ranks = LEFT_OUT_OF_RANKS if options.tp > 1 else ()
    return {
        "model": shape.name,
        "target": target,
        "lnc": options.lnc,
        "tp": options.tp,
        "prompt": options.prompt,
        "new": options.new,
        "batch": options.batch,
        "dtype": DTYPE,
        "compute": decoders["low_rank"].compute,
        **subject.described,
        "token_us": TOKEN_US._asdict(),
        "launch_us": FURTHER_US._asdict(),
        "variants": rows,
        "speedups": _speedups(rows, subject.speedups),
        "draft": None
        if subject.draft is None
        else _draft(decoders["dense"], subject.draft, options),
        "left_out": [*LEFT_OUT, *of_ranks, *left_out],
    }


# --- rows


def _draft(dense: Decoder, draft: Decoder, options: Options) -> dict[str, Any]:
    """What a draft wins, halfway through the new tokens."""
    return {"name": options.draft, **speculated(dense, draft, options.prompt + options.new // 2)}


def _row(
    name: str,
    decoder: Decoder,
    phases: dict[str, Any],
    memory: dict[str, int],
    new: int,
) -> dict[str, Any]:
    prefill, decode = phases["prefill"], phases["decode"]
    decode["as_served"] = as_served(decode, decoder.batch)
    one = decode["one_launch"]
    if "left_out" not in one:
        one["as_served"] = as_served(one, decoder.batch)
    end = {m: prefill["times_ms"][m] + (new - 1) * decode["times_ms"][m] for m in ENDS}
    return {
        "name": name,
        "linears": _linears(decoder),
        "memory": memory,
        "weight_bytes_by_layout": _weights(decoder),
        "phases": phases,
        "tokens_per_s": 1e3 * decoder.batch / decode["time_ms"],
        "end_to_end_ms": end[ENDS[0]],
        "end_to_end_times_ms": end,
    }


def _linears(decoder: Decoder) -> list[dict[str, Any]]:
    """Every Linear that a layer has, the output head's too, and in how many `layers` it is so."""
    counted = Counter[tuple[str, Linear]]()
    for part in decoder.layers:
        for name, linear in part.linears:
            counted[name, linear] += part.layers
    counted[HEAD, decoder.head] = 1
    return [
        {
            "name": name,
            "K": each.K,
            "N": each.N,
            "r": each.r,
            "dtype": each.stored or DTYPE,
            "layers": layers,
        }
        for (name, each), layers in counted.items()
    ]


def _weights(decoder: Decoder) -> dict[str, int]:
    """Of a rank, with every group of low-rank pairs in one layout; nothing without ranks."""
    if decoder.tp == 1:
        return {}
    if all(linear.r is None for part in decoder.layers for _, linear in part.linears):
        return {"dense": weight_bytes(decoder)}
    layouts: tuple[Layout, ...] = ("one", "both", "rows")
    return {layout: weight_bytes(decoder, everywhere(decoder, layout)) for layout in layouts}


def _speedups(rows: list[dict[str, Any]], asked: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Each pair of variants that ran: the other's time over the first's, by phase."""
    times = {
        row["name"]: {phase: row["phases"][phase]["times_ms"] for phase in row["phases"]}
        | {"end_to_end": row["end_to_end_times_ms"]}
        for row in rows
    }
    decodes = {row["name"]: row["phases"]["decode"] for row in rows}
    speedups: dict[str, Any] = {}
    for name, (ours, theirs) in asked.items():
        if ours not in times or theirs not in times:
            continue
        speedups[name] = {"of": ours, "over": theirs}
        for phase, times_of_ours in times[ours].items():
            both = times_of_ours, times[theirs][phase]
            speedups[name][phase] = {**compared(*both), "by_model": ratios_of(*both)}
        speedups[name]["decode"]["as_served"] = speedup_as_served(decodes[ours], decodes[theirs])
        one = [decodes[each]["one_launch"] for each in (ours, theirs)]
        if not [each for each in one if "left_out" in each]:
            speedups[name]["decode"]["one_launch"] = {
                **compared(one[0]["times_ms"], one[1]["times_ms"]),
                "as_served": speedup_as_served(*one),
            }
    return speedups
