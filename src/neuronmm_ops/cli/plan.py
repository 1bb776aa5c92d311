"""`plan`: which kernel plan each projection of a model gets, and where low rank pays."""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from neuronmm_ops.cli.console import COMPACT, stdout
from neuronmm_ops.cli.parser import add_command, add_shape, add_tokens, tokens_of
from neuronmm_ops.compress.rank import aligned_rank
from neuronmm_ops.kernels import Plan, plan_svd_mlp, plan_xuv, plan_xw
from neuronmm_ops.models import ModelShape, model_shape, shape_from_config

MLP = ("gate_proj", "up_proj", "down_proj")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "plan",
        _plan,
        _show,
        "a model's kernel plans, and where low rank pays",
    )
    add_shape(command, required=True, help="a shape by name, or the path of a config.json")
    command.add_argument("--ratio", type=float, default=0.2, help="compression ratio (default 0.2)")
    add_tokens(command, [1, 128, 4096])
    command.add_argument("--target", help="trn1, trn2 or trn3 (default: this machine's or trn2)")
    command.add_argument("--lnc", type=int, default=1, help="cores that share a launch (default 1)")
    command.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")


def _plan(options: argparse.Namespace) -> list[dict[str, Any]]:
    if not 0 < options.ratio < 1:
        raise ValueError(f"--ratio must be between 0 and 1, got {options.ratio}")
    path = Path(options.model)
    shape = shape_from_config(path) if path.exists() else model_shape(options.model)
    machine = (options.dtype, options.target, options.lnc)
    rows: list[dict[str, Any]] = []
    for tokens in tokens_of(options):
        for name, (k, n) in shape.projections.items():
            rank = aligned_rank(k, n, options.ratio)
            dense = plan_xw(tokens, k, n, *machine)
            plan = plan_xuv(tokens, k, rank, n, *machine) if rank else dense
            rows.append(_row(name, plan, dense.time_ms, (k, rank, n)))
        rows.extend(_mlp(shape, tokens, options.ratio, machine))
    return rows


def _mlp(
    shape: ModelShape, tokens: int, ratio: float, machine: tuple[str, str, int]
) -> list[dict[str, Any]]:
    """The three projections of the MLP in one launch, against three dense ones; none if dense."""
    sizes = [shape.projections[name] for name in MLP]
    ranks = [aligned_rank(k, n, ratio) for k, n in sizes]
    gate, up, down = ranks
    if gate is None or up is None or down is None:
        return []
    width, inner = sizes[0]
    plan = plan_svd_mlp(tokens, width, (gate, up, down), inner, width, *machine)
    dense = sum([plan_xw(tokens, k, n, *machine).time_ms for k, n in sizes])
    return [_row("mlp", plan, dense, (width, max(gate, up, down), inner))]


def _row(
    projection: str, plan: Plan, dense_ms: float, sizes: tuple[int, int | None, int]
) -> dict[str, Any]:
    k, r, n = sizes
    return {
        "projection": projection,
        "M": plan.problem.M,
        "K": k,
        "r": r,
        "N": n,
        "target": plan.problem.target,
        "form": plan.phase,
        "blocks": plan.arguments,
        "time_ms": plan.time_ms,
        "dense_ms": dense_ms,
        "hbm_bytes": plan.hbm_bytes,
        "instructions": plan.instructions,
        "bound": plan.bound,
        "worth_it": plan.time_ms < dense_ms,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(**COMPACT)
    for column in (
        "M",
        "projection",
        "K",
        "r",
        "N",
        "form",
        "ms",
        "dense ms",
        "speedup",
        "bound",
        "instr",
    ):
        table.add_column(column, justify="left" if column == "projection" else "right")
    for row in rows:
        speedup = row["dense_ms"] / row["time_ms"]
        table.add_row(
            str(row["M"]),
            row["projection"],
            str(row["K"]),
            str(row["r"] or "dense"),
            str(row["N"]),
            row["form"],
            f"{row['time_ms']:.4g}",
            f"{row['dense_ms']:.4g}",
            f"{speedup:.2f}x",
            row["bound"],
            f"{row['instructions']:,}",
        )
    stdout.print(table)
    losing = [row for row in rows if not row["worth_it"]]
    stdout.print(f"Modelled times on {rows[0]['target']}; --json shows the blocks of each plan.")
    for tokens in dict.fromkeys([row["M"] for row in losing]):
        names = ", ".join([row["projection"] for row in losing if row["M"] == tokens])
        stdout.print(f"Low rank does not pay at M = {tokens}: {names}", soft_wrap=True)
