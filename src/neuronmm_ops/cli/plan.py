"""`plan`: which kernel plan each projection of a model gets, and where low rank pays."""

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from neuroncore.cli.console import show_table, stdout
from neuronmm_ops.cli.parser import add_command, add_shape, add_tokens, tokens_of

if TYPE_CHECKING:
    from neuronmm_ops.models import ModelShape
    from neuronmm_ops.plan import Plan

TOGETHER = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_DESCRIPTION = "a model's kernel plans, and where low rank pays"


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description, options = _DESCRIPTION, ("--ratio", "--target", "--lnc")
    example = "--model Qwen/Qwen3-4B --tokens 1,4096 --target trn2"
    command = add_command(commands, "plan", _plan, _show, description, *options, example=example)
    add_shape(command, required=True)
    add_tokens(command, [1, 128, 4096])
    command.add_argument(
        "--tp", type=int, default=1, help="ranks that divide each projection (default 1)"
    )
    command.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    command.add_argument("--storage", help="of the factors: fp8, int8 or int4 (default: --dtype)")
    command.add_argument(
        "--compute",
        default="x",
        help="fp8: prefill may also round activations, with fp8 factors",
    )


class Settings(NamedTuple):
    """What all plans of a call share; names as the options."""

    ratio: float
    dtype: str
    target: str | None
    lnc: int
    stored: str
    compute: str

    @property
    def machine(self) -> tuple[str, str | None, int]:
        """The last positional arguments of a plan."""
        return self.dtype, self.target, self.lnc

    @property
    def of_weights(self) -> dict[str, Any]:
        """The named arguments of a plan of low rank."""
        return {"weight_dtype": self.stored, "compute": self.compute}


def _plan(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.models import resolve_shape
    from neuronmm_ops.storages import COMPUTES, checked, dtype_name

    if not 0 < options.ratio < 1:
        raise ValueError(f"--ratio must be between 0 and 1, got {options.ratio}")
    shape = resolve_shape(options.model)
    if options.compute not in COMPUTES:
        raise ValueError(f"--compute must be {' or '.join(COMPUTES)}, got {options.compute!r}")
    stored = dtype_name(checked(options.storage, "--storage")) or ""
    machine = options.dtype, options.target, options.lnc
    settings = Settings(options.ratio, *machine, stored, options.compute)
    if options.tp != 1:
        from neuronmm_ops.cli.plan_ranks import rank_rows

        each = [rank_rows(shape, tokens, options.tp, settings) for tokens in tokens_of(options)]
    else:
        each = [_rows(shape, tokens, settings) for tokens in tokens_of(options)]
    return [row for rows in each for row in rows]


def _rows(shape: "ModelShape", tokens: int, settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each projection, then for what is one launch of three pairs.

    There is none of the latter where one of its projections stays dense. Dense, query, key and
    value are one product with their weights side by side, too.
    """
    from neuronmm_ops.plan import plan_svd_mlp, plan_svd_qkv, plan_xuv, plan_xw
    from neuronmm_ops.rank import aligned_rank

    machine, of_weights = settings.machine, settings.of_weights
    sizes = shape.projections
    ranks = {name: aligned_rank(*size, settings.ratio) for name, size in sizes.items()}
    for name, (k, n) in sizes.items():
        r, dense = ranks[name], plan_xw(tokens, k, n, *machine)
        yield _row(name, plan_xuv(tokens, k, r, n, *machine, **of_weights) if r else dense, [dense])
    for name, projections in TOGETHER.items():
        (width, one), (_, two), (_, three) = [sizes[each] for each in projections]
        first, second, third = [ranks[each] for each in projections]
        if first is None or second is None or third is None:
            continue
        pairs = first, second, third
        if name == "qkv":
            outputs = (one, two, three)
            plan = plan_svd_qkv(tokens, width, pairs, outputs, *machine, **of_weights)
            dense = [plan_xw(tokens, width, sum(outputs), *machine)]
        else:
            plan = plan_svd_mlp(tokens, width, pairs, one, width, *machine, **of_weights)
            dense = [plan_xw(tokens, *sizes[each], *machine) for each in projections]
        yield _row(name, plan, dense)


def _row(projection: str, plan: "Plan", dense: "list[Plan]") -> dict[str, Any]:
    """One row; of three pairs r is the largest rank, and N of the MLP the intermediate size."""
    problem = plan.problem
    return {
        "projection": projection,
        "M": problem.M,
        "K": problem.K,
        "r": max(problem.ranks, default=None),
        "N": problem.inner or problem.N,
        "weight_dtype": problem.weight_dtype or problem.dtype,
        "compute": problem.compute,
        "target": problem.target,
        "blocks": plan.arguments,
        "regret": plan.regret,
        "bound": plan.bound,
        **compared_plans([plan], dense),
    }


def compared_plans(
    plans: "list[Plan]", dense: "list[Plan]", links_ms: float = 0.0, dense_links_ms: float = 0.0
) -> dict[str, Any]:
    """Launches next to the dense ones; speed-ups over these are a range over the DMA models.

    Args:
        plans: one after the other.
        dense: those of the dense matrices.
        links_ms: what ranks exchange in addition.
        dense_links_ms: what ranks of the dense model exchange.
    """
    times = [sum(each) + links_ms for each in zip(*[p.times_ms for p in plans], strict=True)]
    over = [sum(each) + dense_links_ms for each in zip(*[d.times_ms for d in dense], strict=True)]
    speedups = [dense_ms / ms for dense_ms, ms in zip(over, times, strict=True)]
    return {
        "form": plans[0].phase,
        "time_ms": times[0],
        "time_low_ms": min(times),
        "time_high_ms": max(times),
        "dense_ms": over[0],
        "speedup_low": min(speedups),
        "speedup_high": max(speedups),
        "hbm_bytes": sum([plan.hbm_bytes for plan in plans]),
        "instructions": sum([plan.instructions for plan in plans]),
        "launches": sum([len(plan.launches) for plan in plans]),
        "worth_it": min(speedups) > 1,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    if "tp" in rows[0]:
        from neuronmm_ops.cli.plan_ranks import show_rank_rows

        show_rank_rows(rows)
        return
    columns = ("projection", "K", "r", "N", "ms", "dense ms", "speedup", "bound")
    for (tokens, phase), group in groupby(rows, key=lambda row: (row["M"], row["form"])):
        cells = [
            (
                *(row["projection"], row["K"], row["r"] or "dense", row["N"]),
                *(time_range(row["time_low_ms"], row["time_high_ms"]), f"{row['dense_ms']:.4g}"),
                *(speedup_range(row["speedup_low"], row["speedup_high"]), row["bound"]),
            )
            for row in group
        ]
        show_table(columns, cells, left=["projection"], title=f"M = {tokens}, {phase}")
    losing = [row for row in rows if not row["worth_it"]]
    longest = max(rows, key=lambda row: row["instructions"])
    stdout.print(f"Modelled times on {rows[0]['target']}; --json shows the blocks of each plan.")
    stdout.print(
        "Times and speed-ups are ranges over what small DMAs may cost (`bench model`: over all "
        f"that is not known); no plan is more than {max(row['regret'] for row in rows):.1%} slower "
        "than the quickest under either model."
    )
    launches = f", in {longest['launches']} launches" if longest["launches"] > 1 else ""
    stdout.print(f"The longest plan has {longest['instructions']:,} instructions{launches}.")
    for tokens in dict.fromkeys([row["M"] for row in losing]):
        names = ", ".join([row["projection"] for row in losing if row["M"] == tokens])
        stdout.print(f"Low rank does not pay at M = {tokens}: {names}")


def time_range(low: float, high: float) -> str:
    """A time, or its range where both ends differ in print."""
    first, last = f"{low:.4g}", f"{high:.4g}"
    return first if first == last else f"{first}-{last}"


def speedup_range(low: float, high: float) -> str:
    """A speed-up, or its range where both ends differ in print."""
    first, last = f"{low:.2f}", f"{high:.2f}"
    return f"{first}x" if first == last else f"{first}-{last}x"
