"""The Linears of a decoder layer as they are stored, and the sizes of one rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from neuronmm_ops.compress.targets import matches
from neuronmm_ops.models import ModelShape
from neuronmm_ops.plan.linear import MLP, Linear
from neuronmm_ops.rank import aligned_rank

DTYPE = "bfloat16"
HEAD = "lm_head"


def selection(shape: ModelShape, targets: Sequence[str]) -> set[str]:
    """The Linears of a layer that targets select, as `SVDConfig.targets`.

    Raises:
        ValueError: a target selects none.
    """
    parents = {name: "mlp" if name in MLP else "self_attn" for name in shape.projections}
    names: set[str] = set()
    for target in targets:
        of_target = {n for n, parent in parents.items() if matches(target, f"layer.{parent}.{n}")}
        if not of_target:
            raise ValueError(
                f"targets must select Linears of a layer ({', '.join(parents)}); {target!r} "
                "selects none"
            )
        names |= of_target
    return names


def linears(
    shape: ModelShape,
    selected: Collection[str] = (),
    stored: str = "",
    stored_dense: str = "",
    stored_head: str = "",
    *,
    ratio: float | None = None,
) -> dict[str, Linear]:
    """The Linears of a layer by name, and the output head.

    Args:
        shape: of the model.
        selected: names of those that `ratio` and `stored` are for.
        stored: dtype of the selected ones where that is in one byte.
        stored_dense: the same of the layers' other Linears, and of those without a rank that pays.
        stored_head: the same of the output head.
        ratio: of parameters removed; None leaves all dense.
    """
    by_name: dict[str, Linear] = {}
    for name, (K, N) in shape.projections.items():
        is_selected = name in selected
        r = aligned_rank(K, N, ratio) if ratio is not None and is_selected else None
        is_kept = not is_selected or (ratio is not None and r is None)
        by_name[name] = Linear(K, N, r, stored_dense if is_kept else stored)
    by_name[HEAD] = Linear(shape.hidden_size, shape.vocab_size, None, stored_head)
    return by_name


def divided(shape: ModelShape, tp: int) -> ModelShape:
    """The sizes of one rank; key and value heads are repeated where ranks outnumber them.

    Raises:
        ValueError: the ranks do not divide the sizes.
    """
    if not _divides(shape, tp):
        most = max(shape.heads, 1)
        fitting = ", ".join([str(n) for n in range(1, most + 1) if _divides(shape, n)])
        raise ValueError(
            f"tp must divide {shape.name}'s {shape.heads} heads, {shape.intermediate_size} inner "
            f"features and {shape.vocab_size} words, and its {shape.kv_heads} key and value heads "
            f"or be a multiple of them; got {tp}, use one of {fitting}"
        )
    return replace(
        shape,
        heads=shape.heads // tp,
        kv_heads=max(1, shape.kv_heads // tp),
        intermediate_size=shape.intermediate_size // tp,
        vocab_size=shape.vocab_size // tp,
    )


def _divides(shape: ModelShape, tp: int) -> bool:
    if tp < 1 or (shape.kv_heads % tp and tp % shape.kv_heads):
        return False
    return not any(size % tp for size in (shape.heads, shape.intermediate_size, shape.vocab_size))
