"""From shapes, dtype and target to a `Plan`: which kernel runs, in which blocks, at which cost.

The feasible plans of an op are enumerated under the machine's model and the quickest one taken: no
table, no search at run time, no simulation, no torch. All times are modelled.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from neuronmm_ops.hardware import resolve_target
from neuronmm_ops.kernels.planner.problem import Matrices, Plan, Problem, mlp_matrices

TIE = 1.002
"""Plans within this factor of the least predicted time count as equally quick."""


def plan_op(
    op: str,
    M: int,
    matrices: Matrices,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
) -> Plan:
    """The quickest plan of an op.

    Args:
        op: its name, that of its folder in `neuronmm_ops.kernels`.
        M: tokens.
        matrices: shapes of its weights in the order of its schema.
        dtype: bfloat16, float16 or float32.
        target: trn1, trn2, trn3 or an alias of theirs; None as `hardware.resolve_target`.
        lnc: NeuronCores that share the launch: 1, or 2 on trn2 and trn3.

    Raises:
        ValueError: sizes or names that are none, or weights that no plan fits.
    """
    return quickest(Problem(op, M, matrices, dtype, resolve_target(target).target, lnc))


def plan_xw(
    M: int, K: int, N: int, dtype: str = "bfloat16", target: str | None = None, lnc: int = 1
) -> Plan:
    """The quickest plan of `x[M, K] @ w[K, N]`; `dtype`, `target` and `lnc` as `plan_op`."""
    return plan_op("xw", M, ((K, N),), dtype, target, lnc)


def plan_xuv(
    M: int,
    K: int,
    r: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    bf16_partial_sums: bool = False,
) -> Plan:
    """The quickest plan of `(x[M, K] @ u[K, r]) @ v[r, N]`.

    Args:
        M: tokens.
        K: input features.
        r: rank.
        N: output features.
        dtype: as `plan_op`.
        target: as `plan_op`.
        lnc: as `plan_op`.
        bf16_partial_sums: partial sums in SBUF may be rounded to dtype: less HBM traffic at large
            r and M, less accuracy.

    Raises:
        ValueError: sizes or names that are none.
    """
    machine = resolve_target(target)
    matrices = ((K, r), (r, N))
    return quickest(Problem("xuv", M, matrices, dtype, machine.target, lnc, bf16_partial_sums))


def plan_svd_mlp(
    M: int,
    K: int,
    ranks: tuple[int, int, int],
    inner: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
) -> Plan:
    """The quickest plan of a gated MLP `[M, K] -> [M, inner] -> [M, N]` of six factors.

    Args:
        M: tokens.
        K: input features.
        ranks: of gate, up and down.
        inner: features between them.
        N: output features.
        dtype: as `plan_op`.
        target: as `plan_op`.
        lnc: as `plan_op`.

    Raises:
        ValueError: sizes or names that are none.
    """
    return plan_op("svd_mlp", M, mlp_matrices(K, ranks, inner, N), dtype, target, lnc)


@lru_cache(maxsize=4096)
def quickest(problem: Problem) -> Plan:
    """The plan of least predicted time. Raises ValueError where no plan fits."""
    found = candidates(problem)
    if not found:
        raise ValueError(f"no plan of {problem} fits SBUF on {problem.target}; split K or N")
    return found[0]


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit: the choice first, then by predicted time."""
    module = import_module(f"neuronmm_ops.kernels.{problem.op}.plan")
    found: list[Plan] = module.candidates(problem)
    found.sort(key=lambda plan: (plan.time_ms, plan.hbm_bytes, plan.blocks))
    if not found or problem.op == "svd_mlp":  # its plan of least traffic is the slowest to start
        return found
    # of plans that are as quick as the model can tell, the one that moves least goes first
    ties = [plan for plan in found if plan.time_ms <= TIE * found[0].time_ms]
    first = min(ties, key=lambda plan: plan.hbm_bytes)
    return [first, *[plan for plan in found if plan is not first]]
