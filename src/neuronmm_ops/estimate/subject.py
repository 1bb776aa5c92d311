"""What `bench model` runs of a model: dense, low-rank and published variants, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, NamedTuple

from neuroncore.hardware import Machine, resolve_target
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.estimate.decoder import Decoder, Kind
from neuronmm_ops.estimate.layer import Mlp
from neuronmm_ops.estimate.linears import HEAD, linears, selection
from neuronmm_ops.estimate.memory import check_capacity, memory_of
from neuronmm_ops.estimate.recorded import Layers, Recorded, described, recorded
from neuronmm_ops.models import ModelShape, resolve_shape
from neuronmm_ops.plan.linear import MLP, Linear
from neuronmm_ops.rank import parameter_count
from neuronmm_ops.storages import BY_DTYPE, COMPUTES, checked, dtype_name

SPEEDUPS = {
    "ours": ("low_rank", "dense"),
    "published": ("published_low_rank", "published_dense"),
    "ours_over_published": ("low_rank", "published_dense"),
    "storage": ("dense_one_byte", "dense"),
    "rank": ("low_rank", "dense_one_byte"),
    "width": ("pruned", "dense"),
}
"""The variants that each of the speed-ups compares, the faster one first."""
OVER_ONE_BYTE = "over_one_byte"
"""In place of `rank`, of a checkpoint without one byte: the dense rival's storage is another."""
RATIO = 0.2
TILE = 128
"""Inner features of `pruned` are a multiple of it: partitions of SBUF."""
MOST_SEQUENCES = 128
"""Sequences of a batch: a row each in `lm_head` and in decode kernels."""


@dataclass(frozen=True)
class Options:
    """What is modelled; a compressed checkpoint has what `ratio` and what follows it say.

    Attributes:
        target: trn1, trn2 or trn3; None as `hardware.resolve_target`.
        lnc: NeuronCores that share a launch, and so a rank.
        tp: ranks of tensor parallel.
        prompt: tokens of each sequence's prompt.
        new: tokens generated for each sequence, at least 2: prefill finds the first.
        batch: sequences, up to 128.
        ratio: of parameters removed from what `targets` selects; None for `RATIO`.
        storage: `fp8` or `int8` of what `targets` selects; None for bfloat16.
        storage_dense: the same of the layers' Linears that stay dense.
        storage_lm_head: the same of the output head.
        compute: `fp8` lets prefill round activations where weights are in fp8; None does not.
        targets: "mlp" (None), "all-linear" of the layers, or several as `SVDConfig.targets` has
            them.
        draft: of the dense model: a directory or a name, or how many of the low-rank layers.
    """

    target: str | None = None
    lnc: int = 1
    tp: int = 1
    prompt: int = 2048
    new: int = 256
    batch: int = 1
    ratio: float | None = None
    storage: str | None = None
    storage_dense: str | None = None
    storage_lm_head: str | None = None
    compute: str | None = None
    targets: str | tuple[str, ...] | None = None
    draft: str | None = None


class Subject(NamedTuple):
    """What is modelled of a model.

    Attributes:
        decoders: what runs, by its name in the document.
        described: what the document says of `low_rank`.
        speedups: as `SPEEDUPS`.
        left_out: why something does not run.
        draft: what proposes tokens to the dense model, if anything does.
    """

    decoders: dict[str, Decoder]
    described: dict[str, Any]
    speedups: Mapping[str, tuple[str, str]]
    left_out: list[str]
    draft: Decoder | None


class _Variant(NamedTuple):
    """One way to run the model, by its name in the document."""

    name: str
    shape: ModelShape
    layers: Layers
    mlp: Mlp = "ours"


def prepared(model: str, options: Options) -> Subject:
    """What runs here.

    Raises:
        ValueError: for whatever can be known before the first launch is traced.
        OSError: a config.json that cannot be read.
    """
    shape, machine = resolve_shape(model), resolve_target(options.target)
    machine.check_lnc(options.lnc)
    _check(options)
    record = recorded(model, shape)
    if record is None:
        variants, left_out = _uniform(shape, options)
        about, speedups = _described(options), SPEEDUPS
    else:
        _check_own(model, options)
        variants, left_out = _of_checkpoint(shape, record, options)
        about, speedups = described(record), _speedups_of(record)
    on: dict[str, Any] = {"target": machine.target, "lnc": options.lnc}
    on |= {"tp": options.tp, "batch": options.batch, "compute": options.compute or "x"}
    decoders = {
        v.name: Decoder(whole=v.shape, **v.layers._asdict(), mlp=v.mlp, **on) for v in variants
    }
    if options.compute == "fp8":
        _check_rounded(machine, decoders["low_rank"])
    dense = decoders["dense"]
    check_capacity(dense, memory_of(dense, options.prompt, options.new))
    draft = None
    if options.draft is not None:
        draft_shape, layers = _draft(options.draft, decoders["low_rank"])
        draft = Decoder(whole=draft_shape, **layers._asdict(), **on)
    return Subject(decoders, about, speedups, left_out, draft)


def _draft(named: str, low_rank: Decoder) -> tuple[ModelShape, Layers]:
    """The sizes and Linears of a draft; see `Options`."""
    shape = low_rank.whole
    if named.isdecimal():
        if not 1 <= int(named) <= shape.layers:
            raise ValueError(f"a draft has 1 to {shape.layers} layers of its model, got {named}")
        if len(low_rank.kinds) > 1:
            raise ValueError(
                f"{shape.name} has layers of {len(low_rank.kinds)} kinds, so {named} of them are no"
                " draft of one speed; give the directory of a draft"
            )
        kinds = (low_rank.kinds[0]._replace(layers=int(named)),)
        return replace(shape, layers=int(named)), Layers(kinds, low_rank.head)
    draft_shape = resolve_shape(named)
    if draft_shape.vocab_size != shape.vocab_size:
        raise ValueError(
            f"a draft has its model's vocabulary: {draft_shape.name} has "
            f"{draft_shape.vocab_size} tokens, {shape.name} {shape.vocab_size}"
        )
    record = recorded(named, draft_shape)
    return draft_shape, _alike(draft_shape, linears(draft_shape)) if record is None else record.own


def _ratio(options: Options) -> float:
    return RATIO if options.ratio is None else options.ratio


def _targets(options: Options) -> tuple[str, ...]:
    return SVDConfig(ratio=_ratio(options), targets=options.targets or "mlp").target_list


def _described(options: Options) -> dict[str, Any]:
    return {
        "ratio": _ratio(options),
        "storage": options.storage,
        "storage_dense": options.storage_dense,
        "storage_lm_head": options.storage_lm_head,
        "targets": " ".join(_targets(options)),
        "checkpoint": None,
    }


def _check(options: Options) -> None:
    prompt, new, batch = options.prompt, options.new, options.batch
    if prompt < 1:
        raise ValueError(f"prompt must be at least 1 token, got {prompt}")
    if new < 2:
        raise ValueError(f"new must be at least 2 tokens, for prefill finds the first; got {new}")
    if not 1 <= batch <= MOST_SEQUENCES:
        raise ValueError(f"batch must be 1 to {MOST_SEQUENCES} sequences, got {batch}")
    if options.compute not in (None, *COMPUTES):
        raise ValueError(f"compute must be one of {', '.join(COMPUTES)}; got {options.compute!r}")
    if not 0 < _ratio(options) < 1:
        raise ValueError(f"ratio must be between 0 and 1, got {options.ratio}")


def _check_rounded(machine: Machine, decoder: Decoder) -> None:
    if not machine.has("double_row"):
        raise ValueError(
            f"compute fp8 multiplies two rows of fp8 at a time, which {machine.target} does not; "
            "use compute x"
        )
    stored = {each.stored for kind in decoder.kinds for each in kind.linears.values()} - {""}
    if not any("fp8" in BY_DTYPE[dtype].computes for dtype in stored):
        raise ValueError(
            f"compute fp8 needs Linears in fp8, got {', '.join(sorted(stored)) or 'bfloat16'}; "
            "use --storage fp8, or compute x"
        )


def _check_own(model: str, options: Options) -> None:
    names = ("ratio", "targets", "storage", "storage_dense", "storage_lm_head")
    options_given = [name.replace("_", "-") for name in names if getattr(options, name) is not None]
    if options_given:
        raise ValueError(
            f"{model} is a compressed checkpoint and has ranks and storages of its own; leave out "
            f"{', '.join(options_given)}, or give its config.json to model other ones of its sizes"
        )


def _alike(shape: ModelShape, each: Mapping[str, Linear]) -> Layers:
    return Layers((Kind(each, shape.layers),), each[HEAD])


def _uniform(shape: ModelShape, options: Options) -> tuple[list[_Variant], list[str]]:
    """Every layer as the options say, next to what was published."""
    names = [options.storage, options.storage_dense, options.storage_lm_head]
    stored = [dtype_name(checked(name)) or "" for name in names]
    ratio, selected = _ratio(options), selection(shape, _targets(options))
    compressed = linears(shape, selected, *stored, ratio=ratio)
    if all(linear.r is None for linear in compressed.values()):
        raise ValueError(
            f"no Linear of {shape.name} gets a rank that pays at ratio {ratio}: ranks are multiples"
            " of 128; use a greater ratio or a wider model"
        )
    dense = _alike(shape, linears(shape))
    variants = [
        _Variant("dense", shape, dense),
        _Variant("low_rank", shape, _alike(shape, compressed)),
    ]
    if any(stored):
        one_byte = _alike(shape, linears(shape, selected, *stored))
        variants.append(_Variant("dense_one_byte", shape, one_byte))
    left_out: list[str] = []
    narrow = _narrower(shape, compressed, options.tp)
    if narrow is None:
        left_out.append("pruned: the MLPs have fewer parameters than low rank removes")
    else:
        same = _alike(narrow, linears(narrow, selected, *stored))
        variants.append(_Variant("pruned", narrow, same))
    if options.lnc > 1 or options.tp > 1:
        left_out.append(
            "published_dense and published_low_rank: their kernels know one core; --lnc 1 --tp 1"
        )
        return variants, left_out
    variants.append(_Variant("published_dense", shape, dense, "published"))
    low = linears(shape, MLP, ratio=ratio)
    if low["down_proj"].r is None:
        return variants, [*left_out, f"published_low_rank: the MLP stays dense at ratio {ratio}"]
    variants.append(_Variant("published_low_rank", shape, _alike(shape, low), "published"))
    left_out.append("the transposes of weights and activations that the published code asks for")
    return variants, left_out


def _narrower(shape: ModelShape, compressed: Mapping[str, Linear], tp: int) -> ModelShape | None:
    """The model with MLPs of fewer inner features, so that no fewer parameters are removed."""
    pairs = [each for each in compressed.values() if each.r is not None]
    removed = sum([each.K * each.N - parameter_count(each.K, each.N, each.r) for each in pairs])
    step = lcm(TILE, tp)  # whole tiles, and equal parts of the ranks
    blocks = (shape.intermediate_size - removed / (len(MLP) * shape.hidden_size)) // step
    return None if blocks < 1 else replace(shape, intermediate_size=int(blocks) * step)


def _of_checkpoint(
    shape: ModelShape, record: Recorded, options: Options
) -> tuple[list[_Variant], list[str]]:
    """Its layers, next to those of the model while it was dense, and dense in one byte."""
    dense = _alike(record.dense, linears(record.dense))
    left_out = ["published_dense and published_low_rank: they have one rank in all layers"]
    if not options.compute and any(each.compute != "x" for each in record.report.layers):
        left_out.append("activations in fp8, which the checkpoint permits; --compute fp8")
    return [
        _Variant("dense", record.dense, dense),
        _Variant("low_rank", shape, record.own),
        _Variant("dense_one_byte", record.dense, record.rival),
    ], left_out


def _speedups_of(record: Recorded) -> dict[str, tuple[str, str]]:
    """`SPEEDUPS` of a checkpoint; `rank` is at equal storage alone."""
    speedups = dict(SPEEDUPS)
    if not any(each.storage for each in record.report.layers):
        speedups[OVER_ONE_BYTE] = speedups.pop("rank")
    return speedups
