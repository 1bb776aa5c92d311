"""`plan --tp N`: the plans of one rank's shards of each projection, and what the ranks exchange."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from neuroncore.cli.console import show_table, stdout
from neuroncore.hardware import resolve_target
from neuronmm_ops.cli.plan import Settings, compared_plans, speedup_range
from neuronmm_ops.estimate.linears import divided
from neuronmm_ops.models import ModelShape
from neuronmm_ops.plan import Plan, plan_xuv, plan_xw
from neuronmm_ops.plan.exchange import Collectives
from neuronmm_ops.plan.layouts import GROUPS, Group, Layout, exchanged, factors
from neuronmm_ops.plan.linear import Linear
from neuronmm_ops.rank import aligned_rank

DIVIDES: tuple[Layout, ...] = ("one", "both")


def rank_rows(
    shape: ModelShape, tokens: int, tp: int, settings: Settings
) -> Iterator[dict[str, Any]]:
    """A row for each projection and each way to divide its factors.

    Raises:
        ValueError: the ranks do not divide the sizes.
    """
    projections = divided(shape, tp).projections
    links = Collectives(resolve_target(settings.target).target, settings.lnc, tp)
    for group, names in GROUPS.items():
        for name in names:
            K, N = shape.projections[name]
            r = aligned_rank(K, N, settings.ratio)
            linear = Linear(*projections[name], r, settings.stored if r else "")
            for divide in DIVIDES if r else ("dense",):
                yield {"projection": name, **_row(group, divide, linear, tokens, links, settings)}


def _row(
    group: Group,
    divide: Layout,
    linear: Linear,
    tokens: int,
    links: Collectives,
    settings: Settings,
) -> dict[str, Any]:
    """Times of launches and exchange: of a low-rank shard, and of the dense one."""
    shapes = factors(group, divide, linear, links.tp)
    sent = exchanged(links, group, divide, tokens, linear.r or 0, linear.N)
    dense = plan_xw(tokens, linear.K, linear.N, *settings.machine)
    plans = _plans(shapes, bool(sent), tokens, settings) if linear.r else [dense]
    of_dense = exchanged(links, group, "dense", tokens, 0, linear.N)
    links_ms, dense_links_ms = (
        sum([each.ms for each in collectives]) for collectives in (sent, of_dense)
    )
    return {
        "M": tokens,
        "tp": links.tp,
        "divide": divide,
        "shards": [list(shape) for shape in shapes],
        "weight_dtype": linear.stored or settings.dtype,
        "target": links.target,
        "blocks": [plan.arguments for plan in plans],
        "collectives": [each._asdict() for each in sent],
        "launches_ms": sum([plan.time_ms for plan in plans]),
        "collectives_ms": links_ms,
        **compared_plans(plans, [dense], links_ms, dense_links_ms),
    }


def _plans(
    shapes: tuple[tuple[int, int], ...], is_cut: bool, tokens: int, settings: Settings
) -> list[Plan]:
    """One launch of the pair, or one of each factor where ranks exchange between them."""
    machine, of_weights = settings.machine, settings.of_weights
    if is_cut:
        return [plan_xw(tokens, *each, *machine, **of_weights) for each in shapes]
    (K, r), (_, N) = shapes
    return [plan_xuv(tokens, K, r, N, *machine, **of_weights)]


def show_rank_rows(rows: list[dict[str, Any]]) -> None:
    """Print the shards with their times."""
    columns = ("projection", "divide", "shards", "launches", "links", "dense", "speedup")
    for tokens, group in groupby(rows, key=lambda row: row["M"]):
        cells = [
            (
                *(row["projection"], row["divide"]),
                " ".join(["x".join(map(str, shape)) for shape in row["shards"]]),
                *(f"{row[name]:.4g}" for name in ("launches_ms", "collectives_ms", "dense_ms")),
                speedup_range(row["speedup_low"], row["speedup_high"]),
            )
            for row in group
        ]
        show_table(columns, cells, left=columns[:3], title=f"M = {tokens}, times in ms")
    stdout.print(
        f"Modelled times of one of {rows[0]['tp']} ranks on {rows[0]['target']}: a launch of the "
        "pair, or one of each factor with the exchange between them; dense with its own exchange. "
        "`bench model --tp` has whole layers, whose projections share launches."
    )
