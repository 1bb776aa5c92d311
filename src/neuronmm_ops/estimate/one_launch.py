"""A token whose layers share launches, beside one launch a kernel; all modelled.

The norms, RoPE, attention with its caches, every Linear and both residuals of several layers are in
one launch of `decoder_layer_decode`, which is planned for one of them. The first layer of a launch
is traced, and what two more add: each further one takes as long as either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from neuroncore.hardware import resolve_target
from neuronmm_ops.estimate.launches import PassCost
from neuronmm_ops.estimate.linears import DTYPE, MLP, QKV, Linear
from neuronmm_ops.kernels.decoder_layer.operands import operands
from neuronmm_ops.kernels.problem import several
from neuronmm_ops.plan import MAX_INSTRUCTIONS, Other, Plan, plan_op
from neuronmm_ops.plan.launches import PlannedKernel, planned_kernels, shapes_of

if TYPE_CHECKING:
    from neuronmm_ops.estimate.decoder import Decoder, Kind
    from neuronmm_ops.models import ModelShape

FURTHER = 2
"""Layers after a launch's first that are traced."""


def refusal(decoder: Decoder) -> str | None:
    """Why a model's layers run apart; None where launches take several."""
    if decoder.tp > 1:
        return "the sum over ranks after attention and the MLP ends a launch"
    if decoder.mlp != "ours":
        return "published kernels are launches of their own"
    for kind in decoder.kinds:
        for names in (QKV, MLP):
            if len({kind.linears[name].stored for name in names}) > 1:
                return f"{', '.join(names)} of a launch are stored alike"
    return None


def layers_cost(decoder: Decoder, lengths: Mapping[int, float]) -> tuple[PassCost, int]:
    """What the layers of one token take, and in how many launches.

    Args:
        decoder: a model without a `refusal`.
        lengths: tokens in the cache with the new one, each with its share of the tokens.

    Raises:
        ValueError: no plan fits.
    """
    total, launches = PassCost(), 0
    for kind in decoder.kinds:
        plan = _plan(decoder, kind, max(lengths))
        most = max(1, MAX_INSTRUCTIONS // plan.instructions)
        own = -(-kind.layers // most)
        launches += own
        for T, share in lengths.items():
            at = replace(plan.problem, others=others_of(decoder.shape, decoder.batch, T))
            first, several = [
                decoder.tracer.launch(_launch(replace(plan, problem=at), count))
                for count in (1, 1 + FURTHER)
            ]
            further = several.plus(first, -1)
            total = total.plus(first, share * own)
            total = total.plus(further, share * (kind.layers - own) / FURTHER)
    return total, launches


def single_layers(decoder: Decoder, T: int) -> list[PlannedKernel]:
    """A launch of one layer of each kind, with T tokens in the cache; as `layers_cost`."""
    return [_launch(_plan(decoder, kind, T), 1) for kind in decoder.kinds]


def bound_ms(decoder: Decoder, cost: PassCost) -> float:
    """All bytes at the DMA peak of a rank's cores."""
    machine = resolve_target(decoder.target)
    return cost.hbm_bytes / (machine.dma_peak_gbps * decoder.lnc) / 1e6


def _plan(decoder: Decoder, kind: Kind, T: int) -> Plan:
    linears = _linears(kind)
    matrices = tuple([shape for linear in linears for shape in linear.shapes])
    return plan_op(
        *("decoder_layer", decoder.batch, matrices, DTYPE, decoder.target, decoder.lnc),
        weight_dtype=several([linear.stored for linear in linears for _ in linear.shapes]),
        others=others_of(decoder.shape, decoder.batch, T),
    )


def _linears(kind: Kind) -> list[Linear]:
    """In the order of the kernel."""
    return [kind.linears[name] for name in (*QKV, "o_proj", *MLP)]


def others_of(shape: ModelShape, batch: int, T: int) -> tuple[Other, ...]:
    """What a problem of the op has beside x and weights, for one token of each sequence.

    Args:
        shape: of the model, or of what a rank has.
        batch: sequences.
        T: tokens that a cache has room for.
    """
    H, d, kv = shape.hidden_size, shape.head_dim, shape.kv_heads
    head_norms: Sequence[Other] = (("query_norm", (d,), ""), ("key_norm", (d,), ""))
    return (
        *(("residual", (-1, H), ""), ("cos", (-1, d), ""), ("sin", (-1, d), "")),
        *(("positions", (batch,), "int32"), ("input_norm", (H,), ""), ("mlp_norm", (H,), "")),
        *(head_norms if shape.head_norm else ()),
        ("key_cache", (batch, kv, d, T), ""),
        ("value_cache", (batch, kv, T, d), ""),
    )


def _launch(plan: Plan, layers: int) -> PlannedKernel:
    """So many alike layers in one launch."""
    (one,) = planned_kernels(plan)
    return replace(one, operands=shapes_of(operands(plan.problem, layers)))
