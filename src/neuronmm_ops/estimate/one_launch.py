"""A token whose layers share launches, next to one launch a kernel; all modelled.

The norms, RoPE, attention with its caches, every Linear and both residuals of several layers are in
one launch of `decoder_layer_decode`, which is planned for one of two. The first layer of a launch
is traced, and what two more add: each further one takes as long as either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from neuroncore.hardware import resolve_target
from neuronmm_ops.estimate.ends import ENDS
from neuronmm_ops.estimate.launches import PassCost
from neuronmm_ops.estimate.linears import DTYPE
from neuronmm_ops.kernels.decoder_layer.operands import operands
from neuronmm_ops.kernels.problem import Problem, several
from neuronmm_ops.plan import MAX_INSTRUCTIONS, Other, Plan, plan_op
from neuronmm_ops.plan.exchange import PUBLISHED_US, Collective
from neuronmm_ops.plan.launches import PlannedKernel, planned_kernels, shapes_of
from neuronmm_ops.plan.layouts import BY_ROWS, GROUPS, Layout, factors
from neuronmm_ops.plan.linear import MLP, QKV

if TYPE_CHECKING:
    from neuronmm_ops.estimate.decoder import Decoder, Kind
    from neuronmm_ops.models import ModelShape

STAGES = (QKV, ("o_proj",), MLP)
"""Linears that read the same activations, or follow them in the kernel."""
FURTHER = 2
"""Layers after a launch's first that are traced."""


def refusal(decoder: Decoder) -> str | None:
    """Why a model's layers run apart; None where launches take several."""
    if not decoder.whole.is_fused:
        return "decoder_layer computes other layers than this model's"
    stages = [_pairs(kind, names) for kind in decoder.kinds for names in STAGES]
    if decoder.tp > 1 and any(len(each) == 2 for each in stages):
        return "on ranks the Linears of a stage are all pairs, or all dense"
    if decoder.whole.hidden_size % decoder.tp and {True} in stages:
        return f"{decoder.tp} ranks do not divide {decoder.whole.hidden_size} features"
    if decoder.mlp != "ours":
        return "published kernels are launches of their own"
    for kind in decoder.kinds:
        for names in (QKV, MLP):
            if len({kind.linears[name].stored for name in names}) > 1:
                return f"{', '.join(names)} of a launch are stored alike"
    return None


def pass_cost(
    decoder: Decoder, lengths: Mapping[int, float], tokens: int = 1
) -> tuple[PassCost, int]:
    """What a pass takes to the logits of each new token, and in how many launches.

    The arguments and errors are those of `layers_cost`.
    """
    total, launches = layers_cost(decoder, lengths, tokens)
    rows = replace(decoder, batch=decoder.batch * tokens)
    after, more = ending_cost(rows)
    whole = sum([each.ms for each in ending(rows)])
    return total.plus(after).plus(PassCost((whole,) * len(ENDS))), launches + more


def ending_cost(decoder: Decoder) -> tuple[PassCost, int]:
    """What follows the layers, for each sequence's last token, and in how many launches."""
    total, launches = PassCost(), 0
    for part in decoder.ending():
        way = decoder.tracer.quickest(part.ways)
        total = total.plus(decoder.tracer.launches(way.launches), part.times)
        total = total.plus(PassCost((way.collectives_ms,) * len(ENDS)), part.times)
        launches += len(way.launches)
    return total, launches


def layers_cost(
    decoder: Decoder, lengths: Mapping[int, float], tokens: int = 1
) -> tuple[PassCost, int]:
    """What the layers of one pass take, and in how many launches.

    Args:
        decoder: a model without a `refusal`.
        lengths: tokens in the cache with the new ones, each with its share of the passes.
        tokens: new ones of each sequence, 1 to 8.

    Raises:
        ValueError: no plan fits.
    """
    total, launches = PassCost(), 0
    for kind in decoder.kinds:
        plan = _plan(decoder, kind, max(lengths), tokens)
        most = max(1, MAX_INSTRUCTIONS // plan.instructions)
        firsts = -(-kind.layers // most)
        launches += firsts
        for T, share in lengths.items():
            others = others_of(decoder.shape, decoder.batch, T, _read(plan.problem))
            at = replace(plan.problem, others=others)
            first, several = [
                decoder.tracer.launch(_launch(replace(plan, problem=at), count))
                for count in (1, 1 + FURTHER)
            ]
            further = several.plus(first, -1)
            total = total.plus(first, share * firsts)
            total = total.plus(further, share * (kind.layers - firsts) / FURTHER)
    return total, launches


def single_layers(decoder: Decoder, T: int) -> list[PlannedKernel]:
    """A launch of one layer of each kind, with T tokens in the cache; as `layers_cost`."""
    return [_launch(_plan(decoder, kind, T), 1) for kind in decoder.kinds]


def bound_ms(decoder: Decoder, cost: PassCost) -> float:
    """All bytes at the DMA peak of a rank's cores."""
    machine = resolve_target(decoder.target)
    return cost.hbm_bytes / (machine.dma_peak_gbps * decoder.lnc) / 1e6


def exchanged(decoder: Decoder) -> list[Collective]:
    """What ranks exchange in a token's launches, and at last for the norm of a stream in parts."""
    links, H = decoder.links, decoder.whole.hidden_size
    collectives: list[Collective] = []
    for kind in decoder.kinds:
        of_layer: list[Collective] = []
        # a dense stage reads all of a stream of which pairs make a part
        qkv, output, mlp = [True in _pairs(kind, names) for names in STAGES]
        of_layer += _whole(decoder) if (qkv or output) and not mlp else ()
        collectives += _whole(decoder) * (kind.layers - 1) if mlp and not qkv else ()
        for group, names in GROUPS.items():
            r = sum([kind.linears[name].r or 0 for name in names])
            if r or group in BY_ROWS:
                of_layer += links.all_reduce(decoder.batch, r or H)
        collectives += of_layer * kind.layers
    return [*collectives, *ending(decoder)]


def ending(decoder: Decoder) -> tuple[Collective, ...]:
    """What ranks exchange between the layers and the last norm: a pair's part of the stream."""
    return _whole(decoder) if True in _pairs(decoder.kinds[-1], MLP) else ()


def published_ms(decoder: Decoder) -> float:
    """Time that collectives take longer than modelled where none is quicker than published ones."""
    return sum([max(0.0, PUBLISHED_US / 1e3 - each.ms) for each in exchanged(decoder)])


def _whole(decoder: Decoder) -> tuple[Collective, ...]:
    """All ranks' parts of the stream."""
    return decoder.links.all_gather(decoder.batch, decoder.whole.hidden_size)


def _pairs(kind: Kind, names: Sequence[str]) -> set[bool]:
    """Whether Linears are pairs."""
    return {kind.linears[name].r is not None for name in names}


def _plan(decoder: Decoder, kind: Kind, T: int, tokens: int = 1) -> Plan:
    M = decoder.batch * tokens
    matrices: list[tuple[int, ...]] = []
    stored: list[str] = []
    features: list[int] = []
    for group, names in GROUPS.items():
        # rows of each u and columns of each v are a rank's
        layout: Layout = "both" if group in BY_ROWS else "rows"
        for name in names:
            K, N = decoder.shape.projections[name]
            linear = kind.linears[name]._replace(K=K, N=N)
            shapes = factors(group, layout, linear, decoder.tp)
            features += [shapes[0][0]] * (group not in BY_ROWS)
            matrices += shapes
            stored += [linear.stored] * len(shapes)
    return plan_op(
        *("decoder_layer", M, tuple(matrices), DTYPE, decoder.target, decoder.lnc),
        weight_dtype=several(stored),
        others=others_of(decoder.shape, decoder.batch, T, (features[0], features[-1])),
        tp=decoder.tp,
    )


def _read(problem: Problem) -> tuple[int, ...]:
    """Features that attention's stage reads, and those of the MLP's."""
    return tuple([s[0] for name, s, _ in problem.others if name in ("input_norm", "mlp_norm")])


def others_of(
    shape: ModelShape, batch: int, T: int, read: Sequence[int] | None = None
) -> tuple[Other, ...]:
    """What a problem of the op has in addition to x and weights, for one token of each sequence.

    Args:
        shape: of the model, or of what a rank has.
        batch: sequences.
        T: tokens that a cache has room for.
        read: features that attention's stage reads, and the MLP's; None: all, as without ranks.
    """
    d, kv = shape.head_dim, shape.kv_heads
    H, mlp_H = read or (shape.hidden_size, shape.hidden_size)
    head_norms: Sequence[Other] = (("query_norm", (d,), ""), ("key_norm", (d,), ""))
    return (
        *(("residual", (-1, H), ""), ("cos", (-1, d), ""), ("sin", (-1, d), "")),
        *(("positions", (batch,), "int32"), ("input_norm", (H,), ""), ("mlp_norm", (mlp_H,), "")),
        *(head_norms if shape.head_norm else ()),
        ("key_cache", (batch, kv, d, T), ""),
        ("value_cache", (batch, kv, T, d), ""),
    )


def _launch(plan: Plan, layers: int) -> PlannedKernel:
    """So many alike layers in one launch."""
    (one,) = planned_kernels(plan)
    return replace(one, operands=shapes_of(operands(plan.problem, layers)))
