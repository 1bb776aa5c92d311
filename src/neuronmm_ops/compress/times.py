"""Modelled times of a Linear, dense or a pair, with what ranks exchange for it."""

from functools import cache
from math import ceil

from neuroncore.hardware import PARTITIONS
from neuronmm_ops.plan import plan_op
from neuronmm_ops.plan.exchange import Collectives
from neuronmm_ops.plan.layouts import BY_ROWS, GROUPS, Group, Layout, exchanged, factors
from neuronmm_ops.plan.linear import Linear

PLANNED_RANKS = 8
"""Of a matrix whose times the others lie between."""
_GROUPS: dict[str, Group] = {name: group for group, names in GROUPS.items() for name in names}


def group_of(name: str) -> Group:
    """The group of a Linear, which says how ranks divide it.

    Raises:
        ValueError: its name is none of Llama's.
    """
    last = name.rpartition(".")[2]
    if last not in _GROUPS:
        raise ValueError(
            f"tp knows how ranks divide {', '.join(_GROUPS)}; got {name}: use tp 1 or other targets"
        )
    return _GROUPS[last]


@cache  # many layers are of one shape
def time_us(
    linear: Linear,
    M: int,
    dtype: str,
    target: str,
    lnc: int = 1,
    tp: int = 1,
    group: Group = "gate_up",
) -> float:
    """Return the modelled microseconds of `xuv`, or of the dense `xw`, on each of `tp` ranks.

    Ranks divide a pair in the quickest of the ways of `plan.layouts`, and Linears of one input
    share its exchange. Between two planned ranks r the time is linear.

    Args:
        linear: whole.
        M: tokens.
        dtype: of x.
        target: `trn1`, `trn2` or `trn3`.
        lnc: NeuronCores of a launch.
        tp: ranks of `lnc` NeuronCores each.
        group: of `group_of`, where there are several ranks.
    """
    K, N, r, stored = linear
    divided = (
        linear._replace(K=ceil(K / tp)) if group in BY_ROWS else linear._replace(N=ceil(N / tp))
    )
    links, together = Collectives(target, lnc, tp), len(GROUPS[group])
    # by columns, rows of u would cost a launch that cuts x
    many: tuple[Layout, ...] = ("sum", "both", "rows") if group in BY_ROWS else ("sum", "both")
    layouts = many if tp > 1 else many[:1]

    def launch_us(*matrices: tuple[int, int]) -> float:
        op = "xw" if len(matrices) == 1 else "xuv"
        return 1e3 * plan_op(op, M, matrices, dtype, target, lnc, weight_dtype=stored).time_ms

    def sent_us(layout: Layout, r: int) -> float:
        sent = exchanged(links, group, layout, M, together * r, N)
        return 1e3 * sum([each.ms for each in sent]) / together

    def pair_us(r: int, layout: Layout) -> float:
        first, second = factors(group, layout, divided._replace(r=r), tp)
        if layout == "sum":
            return launch_us(first, second) + sent_us(layout, r)
        return launch_us(first) + launch_us(second) + sent_us(layout, r)

    def planned_us(r: int) -> float:
        parts = ceil(r / (2 * tp)) * 2 * tp  # int4 has no odd rank, nor part of one
        return min([pair_us(parts, layout) for layout in layouts])

    if r is None:
        return launch_us((divided.K, divided.N)) + sent_us("dense", 0)
    # an allocation asks for hundreds of ranks, and a plan takes a second: some are planned
    step = -(-min(K, N) // (PLANNED_RANKS * PARTITIONS)) * PARTITIONS
    least, share = divmod(r, step)
    low = planned_us(max(2, least * step))
    if not share:
        return low
    return low + share / step * (planned_us((least + 1) * step) - low)
