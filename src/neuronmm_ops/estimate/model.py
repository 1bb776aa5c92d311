"""A whole model's time on Trainium, modelled: prefill and a token of decode, by component.

Every launch is a kernel traced on the simulated core, one after the other. Our own best dense
kernels stand beside the low-rank ones, and the published setting beside both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neuroncore import NkiValidationError
from neuroncore.hardware import resolve_target
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.estimate.decoder import Decoder, Mlp
from neuronmm_ops.estimate.ends import ENDS, compared, ratios_of
from neuronmm_ops.estimate.layouts import GROUPS
from neuronmm_ops.estimate.linears import DTYPE, MLP, Linear, linears, selection
from neuronmm_ops.estimate.memory import check_capacity, memory_of, weight_bytes
from neuronmm_ops.estimate.passes import PHASES, fitting
from neuronmm_ops.estimate.served import LAUNCH_US, as_served, speedup_as_served
from neuronmm_ops.models import ModelShape, resolve_shape
from neuronmm_ops.storages import checked, dtype_name

SPEEDUPS = {
    "ours": ("low_rank", "dense"),
    "published": ("published_low_rank", "published_dense"),
    "ours_over_published": ("low_rank", "published_dense"),
    "storage": ("dense_one_byte", "dense"),
    "rank": ("low_rank", "dense_one_byte"),
}
"""The variants that each of the speed-ups compares, the faster one first."""
MOST_SEQUENCES = 128
"""Sequences of a batch: a row each in `lm_head` and in decode kernels."""
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
"""Beside those, with tensor parallel."""


@dataclass(frozen=True)
class _Variant:
    """One way to run the model, by its name in the document."""

    name: str
    linears: Mapping[str, Linear]
    mlp: Mlp = "ours"


@dataclass(frozen=True)
class Options:
    """What is modelled.

    Attributes:
        target: trn1, trn2 or trn3; None as `hardware.resolve_target`.
        lnc: NeuronCores that share a launch, and so a rank.
        tp: ranks of tensor parallel.
        prompt: tokens of each sequence's prompt.
        new: tokens generated for each sequence, at least 2: prefill finds the first.
        batch: sequences, up to 128.
        ratio: of parameters removed from what `targets` selects.
        storage: `fp8` or `int8` of what `targets` selects; None for bfloat16.
        storage_dense: the same of the layers' Linears that stay dense.
        storage_lm_head: the same of the output head.
        targets: "mlp", "all-linear" of the layers, or several as `SVDConfig.targets` has them.
    """

    target: str | None = None
    lnc: int = 1
    tp: int = 1
    prompt: int = 2048
    new: int = 256
    batch: int = 1
    ratio: float = 0.2
    storage: str | None = None
    storage_dense: str | None = None
    storage_lm_head: str | None = None
    targets: str | tuple[str, ...] = "mlp"


def run_each(
    model: str, options: Options, ranks: Sequence[int], progress: Progress | None = None
) -> list[dict[str, Any]]:
    """`run` for several numbers of ranks instead of `tp`; all are checked before the first runs.

    Raises:
        ValueError: as `run`.
        OSError: as `run`.
    """
    each = [replace(options, tp=tp) for tp in dict.fromkeys(ranks)]
    for own in each:
        prepared(model, own)
    return [run(model, own, progress) for own in each]


def run(
    model: str, options: Options | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Model the time of a prompt and of the tokens after it, in bfloat16.

    Args:
        model: as `models.resolve_shape` takes it.
        options: None for the defaults.
        progress: called with ("model", passes traced, passes in all).

    Returns:
        One document. Each of its `variants` has the phases `prefill` and `decode` (a mean token),
        whose `components` add up to their time; `times_ms` has it at each of `ends.ENDS`, `time_ms`
        at the first, `time_low_ms` and `time_high_ms` its range. `hbm_bytes`, `weight_bytes` and
        `memory` are of one rank. With tp a phase's `layouts` has every way to divide the weights of
        a layer's component, and `published_collectives` its time where no collective is quicker
        than published ones. `speedups` have a middle, a range and each end (`by_model`). Decode's
        phases and speed-ups have `as_served`, with `launch_us` added for each launch and collective
        (see `served`). `left_out` names what is not counted, and variants that cannot run.

    Raises:
        ValueError: an unknown name, a number out of range, or a model that does not fit.
        OSError: a config.json that cannot be read.
    """
    options = options or Options()
    decoders, left_out = prepared(model, options)
    shape, target = decoders["dense"].whole, decoders["dense"].target
    rows: list[dict[str, Any]] = []
    for number, (name, each) in enumerate(decoders.items()):

        def told(step: int, before: int = number * len(PHASES)) -> None:
            if progress is not None:
                progress("model", before + step, len(decoders) * len(PHASES))

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
        "ratio": options.ratio,
        "storage": options.storage,
        "storage_dense": options.storage_dense,
        "storage_lm_head": options.storage_lm_head,
        "targets": " ".join(_targets(options)),
        "launch_us": LAUNCH_US._asdict(),
        "variants": rows,
        "speedups": _speedups(rows),
        "left_out": [*LEFT_OUT, *of_ranks, *left_out],
    }


# --- what to run


def prepared(model: str, options: Options) -> tuple[dict[str, Decoder], list[str]]:
    """What runs here by its name in the document, and why something does not.

    Raises:
        ValueError: for whatever can be known before the first launch is traced.
    """
    shape, machine = resolve_shape(model), resolve_target(options.target)
    machine.check_lnc(options.lnc)
    _check(options)
    stored = [options.storage, options.storage_dense, options.storage_lm_head]
    dtypes = [dtype_name(checked(name)) or "" for name in stored]
    variants, left_out = _variants(shape, options, dtypes)
    decoders = {
        v.name: Decoder(
            *(shape, v.linears, machine.target, options.lnc, options.tp, options.batch, v.mlp)
        )
        for v in variants
    }
    dense = decoders["dense"]
    check_capacity(dense, memory_of(dense, options.prompt, options.new))
    return decoders, left_out


def _targets(options: Options) -> tuple[str, ...]:
    return SVDConfig(ratio=options.ratio, targets=options.targets).target_list


def _check(options: Options) -> None:
    prompt, new, batch = options.prompt, options.new, options.batch
    if prompt < 1:
        raise ValueError(f"prompt must be at least 1 token, got {prompt}")
    if new < 2:
        raise ValueError(f"new must be at least 2 tokens, for prefill finds the first; got {new}")
    if not 1 <= batch <= MOST_SEQUENCES:
        raise ValueError(f"batch must be 1 to {MOST_SEQUENCES} sequences, got {batch}")
    if not 0 < options.ratio < 1:
        raise ValueError(f"ratio must be between 0 and 1, got {options.ratio}")


def _variants(
    shape: ModelShape, options: Options, stored: list[str]
) -> tuple[list[_Variant], list[str]]:
    ratio, selected = options.ratio, selection(shape, _targets(options))
    compressed = linears(shape, selected, *stored, ratio=ratio)
    if all(linear.r is None for linear in compressed.values()):
        raise ValueError(
            f"no Linear of {shape.name} gets a rank that pays at ratio {ratio}: ranks are multiples"
            " of 128; use a greater ratio or a wider model"
        )
    found = [_Variant("dense", linears(shape)), _Variant("low_rank", compressed)]
    if any(stored):
        found.append(_Variant("dense_one_byte", linears(shape, selected, *stored)))
    if options.lnc > 1 or options.tp > 1:
        return found, [
            "published_dense and published_low_rank: their kernels know one core; --lnc 1 --tp 1"
        ]
    found.append(_Variant("published_dense", linears(shape), "published"))
    low = linears(shape, MLP, ratio=ratio)
    if low["down_proj"].r is None:
        return found, [f"published_low_rank: the MLP stays dense at ratio {ratio}"]
    return [*found, _Variant("published_low_rank", low, "published")], [
        "the transposes of weights and activations that the published code asks for"
    ]


# --- rows


def _row(
    name: str,
    decoder: Decoder,
    phases: dict[str, Any],
    memory: dict[str, int],
    new: int,
) -> dict[str, Any]:
    prefill, decode = phases["prefill"], phases["decode"]
    decode["as_served"] = as_served(decode, decoder.batch)
    end = {m: prefill["times_ms"][m] + (new - 1) * decode["times_ms"][m] for m in ENDS}
    return {
        "name": name,
        "linears": [
            {"name": name, "K": each.K, "N": each.N, "r": each.r, "dtype": each.stored or DTYPE}
            for name, each in decoder.linears.items()
        ],
        "memory": memory,
        "weight_bytes_by_layout": _weights(decoder),
        "phases": phases,
        "tokens_per_s": 1e3 * decoder.batch / decode["time_ms"],
        "end_to_end_ms": end[ENDS[0]],
        "end_to_end_times_ms": end,
    }


def _weights(decoder: Decoder) -> dict[str, int]:
    """Of a rank, with every group of low-rank pairs in one layout; nothing without ranks."""
    if decoder.tp == 1:
        return {}
    if all(linear.r is None for linear in decoder.linears.values()):
        return {"dense": weight_bytes(decoder)}
    return {
        layout: weight_bytes(decoder, dict.fromkeys(GROUPS, (layout,)))
        for layout in ("one", "both", "rows")
    }


def _speedups(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each pair of variants that ran: the other's time over the first's, by phase."""
    times = {
        row["name"]: {phase: row["phases"][phase]["times_ms"] for phase in row["phases"]}
        | {"end_to_end": row["end_to_end_times_ms"]}
        for row in rows
    }
    decodes = {row["name"]: row["phases"]["decode"] for row in rows}
    found: dict[str, Any] = {}
    for name, (ours, theirs) in SPEEDUPS.items():
        if ours not in times or theirs not in times:
            continue
        found[name] = {"of": ours, "over": theirs}
        for phase, own in times[ours].items():
            both = own, times[theirs][phase]
            found[name][phase] = {**compared(*both), "by_model": ratios_of(*both)}
        found[name]["decode"]["as_served"] = speedup_as_served(decodes[ours], decodes[theirs])
    return found
