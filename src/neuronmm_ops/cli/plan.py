"""`plan`: which kernel plan each projection of a model gets, and where low rank pays."""

import argparse
from itertools import groupby
from typing import TYPE_CHECKING, Any

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


def _plan(options: argparse.Namespace) -> list[dict[str, Any]]:
    from neuronmm_ops.models import resolve_shape
    from neuronmm_ops.plan import plan_xuv, plan_xw
    from neuronmm_ops.rank import aligned_rank
    from neuronmm_ops.storages import COMPUTES, checked, dtype_name

    if not 0 < options.ratio < 1:
        raise ValueError(f"--ratio must be between 0 and 1, got {options.ratio}")
    shape = resolve_shape(options.model)
    machine = (options.dtype, options.target, options.lnc)
    if options.compute not in COMPUTES:
        raise ValueError(f"--compute must be {' or '.join(COMPUTES)}, got {options.compute!r}")
    stored = dtype_name(checked(options.storage, "--storage")) or ""
    rows: list[dict[str, Any]] = []
    if options.tp != 1:
        from neuronmm_ops.cli.plan_ranks import Settings, rank_rows

        settings = Settings(options.ratio, *machine, stored, options.compute)
        for tokens in tokens_of(options):
            rows.extend(rank_rows(shape, tokens, options.tp, settings))
        return rows
    for tokens in tokens_of(options):
        for name, (k, n) in shape.projections.items():
            rank = aligned_rank(k, n, options.ratio)
            dense = plan_xw(tokens, k, n, *machine)
            plan = (
                plan_xuv(tokens, k, rank, n, *machine, weight_dtype=stored, compute=options.compute)
                if rank
                else dense
            )
            rows.append(_row(name, plan, [dense]))
        rows.extend(_together(shape, tokens, options.ratio, machine, stored, options.compute))
    return rows


def _together(
    shape: "ModelShape",
    tokens: int,
    ratio: float,
    machine: tuple[str, str, int],
    stored: str,
    compute: str,
) -> list[dict[str, Any]]:
    """What is one launch of three pairs; nothing where one of its projections stays dense.

    Dense, query, key and value are one product with their weights side by side, too.
    """
    from neuronmm_ops.plan import plan_svd_mlp, plan_svd_qkv, plan_xw
    from neuronmm_ops.rank import aligned_rank

    rows: list[dict[str, Any]] = []
    for name, projections in TOGETHER.items():
        sizes = [shape.projections[projection] for projection in projections]
        first, second, third = [aligned_rank(k, n, ratio) for k, n in sizes]
        if first is None or second is None or third is None:
            continue
        (width, one), (_, two), (_, three) = sizes
        ranks = first, second, third
        if name == "qkv":
            plan = plan_svd_qkv(
                *(tokens, width, ranks, (one, two, three), *machine),
                weight_dtype=stored,
                compute=compute,
            )
            dense = [plan_xw(tokens, width, one + two + three, *machine)]
        else:
            plan = plan_svd_mlp(
                *(tokens, width, ranks, one, width, *machine), weight_dtype=stored, compute=compute
            )
            dense = [plan_xw(tokens, k, n, *machine) for k, n in sizes]
        rows.append(_row(name, plan, dense))
    return rows


def _row(projection: str, plan: "Plan", dense: "list[Plan]") -> dict[str, Any]:
    """One row; of three pairs r is the largest rank, and N of the MLP the intermediate size.

    The speed-up over the dense launches is a range over the DMA models.
    """
    problem = plan.problem
    dense_ms = [sum(times) for times in zip(*[d.times_ms for d in dense], strict=True)]
    speedups = [d / p for d, p in zip(dense_ms, plan.times_ms, strict=True)]
    return {
        "projection": projection,
        "M": problem.M,
        "K": problem.K,
        "r": max(problem.ranks, default=None),
        "N": problem.inner or problem.N,
        "weight_dtype": problem.weight_dtype or problem.dtype,
        "compute": problem.compute,
        "target": problem.target,
        "form": plan.phase,
        "blocks": plan.arguments,
        "time_ms": plan.time_ms,
        "time_low_ms": plan.time_low_ms,
        "time_high_ms": plan.time_high_ms,
        "regret": plan.regret,
        "dense_ms": sum([d.time_ms for d in dense]),
        "speedup_low": min(speedups),
        "speedup_high": max(speedups),
        "hbm_bytes": plan.hbm_bytes,
        "instructions": plan.instructions,
        "launches": len(plan.launches),
        "bound": plan.bound,
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
                *(f"{row['time_ms']:.4g}", f"{row['dense_ms']:.4g}"),
                *(speedup_range(row["speedup_low"], row["speedup_high"]), row["bound"]),
            )
            for row in group
        ]
        show_table(columns, cells, left=["projection"], title=f"M = {tokens}, {phase}")
    losing = [row for row in rows if not row["worth_it"]]
    longest = max(rows, key=lambda row: row["instructions"])
    stdout.print(f"Modelled times on {rows[0]['target']}; --json shows the blocks of each plan.")
    stdout.print(
        "Speed-ups are ranges over what small DMAs may cost; no plan is more than "
        f"{max(row['regret'] for row in rows):.1%} slower than the quickest under either model."
    )
    launches = f", in {longest['launches']} launches" if longest["launches"] > 1 else ""
    stdout.print(f"The longest plan has {longest['instructions']:,} instructions{launches}.")
    for tokens in dict.fromkeys([row["M"] for row in losing]):
        names = ", ".join([row["projection"] for row in losing if row["M"] == tokens])
        stdout.print(f"Low rank does not pay at M = {tokens}: {names}")


def speedup_range(low: float, high: float) -> str:
    """A speed-up, or its range where both ends differ in print."""
    first, last = f"{low:.2f}", f"{high:.2f}"
    return f"{first}x" if first == last else f"{first}-{last}x"
