"""From shapes, dtype and target to a `Plan`: which kernel runs, in which blocks, at which cost.

Every feasible plan is enumerated under the machine's model and the quickest one taken: no table,
no search at run time, no simulation, no torch. All times are modelled.
"""

from __future__ import annotations

from functools import lru_cache

from neuronmm_ops.hardware import resolve_target
from neuronmm_ops.kernels.planner.problem import Plan, Problem

TIE = 1.002
"""Plans within this factor of the least predicted time count as equally quick."""


def plan_xw(
    M: int, K: int, N: int, dtype: str = "bfloat16", target: str | None = None, lnc: int = 1
) -> Plan:
    """The quickest plan of `x[M, K] @ w[K, N]`. Raises ValueError for sizes or names that are none.

    Args:
        M: tokens.
        K: contraction.
        N: output features.
        dtype: bfloat16, float16 or float32.
        target: trn1, trn2, trn3 or an alias of theirs; None as `hardware.resolve_target`.
        lnc: NeuronCores that share the launch: 1, or 2 on trn2 and trn3.
    """
    return quickest(Problem("xw", M, K, (), N, 0, dtype, resolve_target(target).target, lnc))


def plan_xuv(
    M: int,
    K: int,
    r: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    packed: bool = False,
    rounds: bool = False,
) -> Plan:
    """The quickest plan of `(x[M, K] @ u[K, r]) @ v[r, N]`.

    Args:
        M: tokens.
        K: input features.
        r: rank.
        N: output features.
        dtype: as `plan_xw`.
        target: as `plan_xw`.
        lnc: as `plan_xw`.
        packed: u lies in the order of `SVDLinear.pack_`, so that its tiles load in long runs.
        rounds: partial sums in SBUF may be rounded to dtype: less HBM traffic at large r and M,
            less accuracy.

    Raises:
        ValueError: sizes or names that are none, or packed with K no multiple of 128.
    """
    return quickest(
        Problem("xuv", M, K, (r,), N, 0, dtype, resolve_target(target).target, lnc, packed, rounds)
    )


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
        dtype: as `plan_xw`.
        target: as `plan_xw`.
        lnc: as `plan_xw`.

    Raises:
        ValueError: sizes or names that are none.
    """
    return quickest(
        Problem("svd_mlp", M, K, ranks, N, inner, dtype, resolve_target(target).target, lnc)
    )


@lru_cache(maxsize=4096)
def quickest(problem: Problem) -> Plan:
    """The plan of least predicted time. Raises ValueError where no plan fits."""
    found = candidates(problem)
    if not found:
        raise ValueError(f"no plan of {problem} fits SBUF on {problem.target}; split K or N")
    return found[0]


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit: the choice first, then by predicted time."""
    from neuronmm_ops.kernels.planner import decode, prefill, prefill_mlp

    found = decode.candidates(problem)
    of_prefill = prefill_mlp if problem.op == "svd_mlp" else prefill
    found.extend(of_prefill.candidates(problem))
    found.sort(key=lambda plan: (plan.time_ms, plan.hbm_bytes, plan.blocks))
    if not found or problem.op == "svd_mlp":  # what moves least there is what waits most
        return found
    # of plans that are as quick as the model can tell, the one that moves least goes first
    ties = [plan for plan in found if plan.time_ms <= TIE * found[0].time_ms]
    first = min(ties, key=lambda plan: plan.hbm_bytes)
    return [first, *[plan for plan in found if plan is not first]]
