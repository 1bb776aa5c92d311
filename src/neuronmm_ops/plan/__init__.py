"""Plans: which kernel runs a problem, with which arguments, and how long it takes.

A plan is found by tracing the kernel itself on the simulated NeuronCore (`search`) and kept
(`cache`). All times are modelled.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from threading import Lock
from typing import TypedDict, Unpack

from neuroncore.hardware import resolve_target
from neuronmm_ops.kernels import problems
from neuronmm_ops.kernels.problem import Matrices, Other, Plan, Problem
from neuronmm_ops.kernels.problems import mlp_matrices, qkv_matrices
from neuronmm_ops.plan import cache
from neuronmm_ops.plan.search import find_plan, stages_of, traced_again

__all__ = [
    "MAX_INSTRUCTIONS",
    "Matrices",
    "Other",
    "Plan",
    "Problem",
    "mlp_matrices",
    "plan_op",
    "plan_problem",
    "plan_svd_mlp",
    "plan_svd_qkv",
    "plan_xuv",
    "plan_xw",
    "qkv_matrices",
]

MAX_INSTRUCTIONS = 500_000
"""Of a launch: loops unroll, and compilers refuse, or take hours over, a few million."""
_log = logging.getLogger(__name__)
_searching = Lock()
"""The simulator runs one kernel at a time."""


class ProblemOptions(TypedDict, total=False):
    """What may be given by name of any op's problem: as `Problem`."""

    bf16_partial_sums: bool
    weight_dtype: str
    compute: str
    others: tuple[Other, ...]
    tp: int


class PlanOptions(ProblemOptions, total=False):
    """What may be given by name for any op's plan: as `plan_op`."""

    max_instructions: int
    device_loop: bool


def plan_op(
    op: str,
    M: int,
    matrices: Matrices,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    max_instructions: int = MAX_INSTRUCTIONS,
    device_loop: bool = False,
    **options: Unpack[ProblemOptions],
) -> Plan:
    """The quickest plan of an op.

    Args:
        op: its name, that of its folder in `neuronmm_ops.kernels`.
        M: tokens.
        matrices: shapes of its weights in the order of its schema.
        dtype: bfloat16, float16 or float32.
        target: trn1, trn2, trn3 or an alias of theirs; None as `hardware.resolve_target`.
        lnc: NeuronCores that share the launch: 1, or 2 on trn2 and trn3.
        max_instructions: of a launch, for the compiler's sake; more tokens than that are split into
            several launches. One of 128 tokens runs however many instructions it takes.
        device_loop: a launch of more instructions loops over its tokens on the device instead,
            where that makes it shorter: trn2 and trn3, for NKI 0.6 has the loop and documents them.
        **options: `bf16_partial_sums`, `weight_dtype`, `compute`, `others` and `tp`, as `Problem`.

    Raises:
        ValueError: sizes or names that are none, or weights that no plan fits.
    """
    problem = Problem(op, M, matrices, dtype, resolve_target(target).target, lnc, **options)
    return plan_problem(problem, max_instructions, device_loop)


def plan_xw(
    M: int,
    K: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The quickest plan of `x[M, K] @ w[K, N]`; the other arguments as `plan_op`."""
    op, matrices = problems.xw(K, N)
    return plan_op(op, M, matrices, dtype, target, lnc, **options)


def plan_xuv(
    M: int,
    K: int,
    r: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The quickest plan of `(x[M, K] @ u[K, r]) @ v[r, N]`; the other arguments as `plan_op`."""
    op, matrices = problems.xuv(K, r, N)
    return plan_op(op, M, matrices, dtype, target, lnc, **options)


def plan_svd_mlp(
    M: int,
    K: int,
    ranks: tuple[int, int, int],
    inner: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The quickest plan of a gated MLP `[M, K] -> [M, inner] -> [M, N]` of six factors.

    `ranks` are those of gate, up and down; the other arguments as `plan_op`.
    """
    op, matrices = problems.svd_mlp(K, ranks, inner, N)
    return plan_op(op, M, matrices, dtype, target, lnc, **options)


def plan_svd_qkv(
    M: int,
    K: int,
    ranks: tuple[int, int, int],
    outputs: tuple[int, int, int],
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The quickest plan of low-rank query, key and value `[M, K] -> [M, N_q + N_k + N_v]`.

    `ranks` and `outputs` are those of query, key and value; the other arguments as `plan_op`.
    """
    op, matrices = problems.svd_qkv(K, ranks, outputs)
    return plan_op(op, M, matrices, dtype, target, lnc, **options)


@lru_cache(maxsize=4096)
def plan_problem(
    problem: Problem, max_instructions: int = MAX_INSTRUCTIONS, device_loop: bool = False
) -> Plan:
    """The plan of least regret over the DMA models, in launches of at most so many instructions.

    A launch has at least 128 tokens, however many instructions that takes. With `device_loop` one
    that has more loops over its tokens, if that makes it shorter. A plan that was found before is
    taken from `cache`.

    Raises:
        ValueError: no plan fits, or `max_instructions` is less than 1.
    """
    if max_instructions < 1:
        raise ValueError(f"max_instructions must be at least 1, got {max_instructions}")
    key = cache.key_of(problem, max_instructions, device_loop=device_loop)
    plan = cache.load(problem, key)
    if plan is None:
        stages = [plan_problem(stage) for stage in stages_of(problem)]
        with _searching:
            earlier = cache.load_earlier(problem, key)
            _log.info("searching the plan of %s", problem)
            plan = earlier and traced_again(earlier)
            plan = plan or find_plan(
                problem, max_instructions, device_loop=device_loop, stages=stages
            )
        cache.store(key, plan)
    return plan
