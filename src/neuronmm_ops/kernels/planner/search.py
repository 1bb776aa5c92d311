"""From shapes, dtype and target to a `Plan`: which kernel runs, in which blocks, at which cost.

The feasible plans of an op are enumerated under the machine's model and the quickest one taken: no
table, no search at run time, no simulation, no torch. All times are modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TypeVar

from neuronmm_ops.hardware import Machine, resolve_target
from neuronmm_ops.kernels.planner.prefill import Costs
from neuronmm_ops.kernels.planner.problem import Matrices, Plan, Problem, mlp_matrices
from neuronmm_ops.kernels.planner.timeline import Program, Timeline, sbuf_peak
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, STAGED_TILES, tiles_in

T = TypeVar("T")
WIDTHS = (512, 1024, 1536, 2048)
"""Tokens of a block."""
SMALL_WIDTHS = (256, 128)
"""Where no larger one fits."""
AHEAD_BYTES = 16384
"""SBUF per partition that is left to loads ahead where x does not stay whole."""
MAX_INSTRUCTIONS = 500_000
"""Of a launch: loops unroll, and compilers refuse, or take hours over, a few million."""
TIE = 1.002
"""Plans within this factor of the least predicted time count as equally quick."""


def plan_op(
    op: str,
    M: int,
    matrices: Matrices,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    max_instructions: int = MAX_INSTRUCTIONS,
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

    Raises:
        ValueError: sizes or names that are none, or weights that no plan fits.
    """
    problem = Problem(op, M, matrices, dtype, resolve_target(target).target, lnc)
    return quickest(problem, max_instructions)


def plan_xw(
    M: int,
    K: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    max_instructions: int = MAX_INSTRUCTIONS,
) -> Plan:
    """The quickest plan of `x[M, K] @ w[K, N]`; the other arguments as `plan_op`."""
    return plan_op("xw", M, ((K, N),), dtype, target, lnc, max_instructions)


def plan_xuv(
    M: int,
    K: int,
    r: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    bf16_partial_sums: bool = False,
    max_instructions: int = MAX_INSTRUCTIONS,
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
        max_instructions: as `plan_op`.

    Raises:
        ValueError: sizes or names that are none.
    """
    machine = resolve_target(target)
    matrices = ((K, r), (r, N))
    problem = Problem("xuv", M, matrices, dtype, machine.target, lnc, bf16_partial_sums)
    return quickest(problem, max_instructions)


def plan_svd_mlp(
    M: int,
    K: int,
    ranks: tuple[int, int, int],
    inner: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    max_instructions: int = MAX_INSTRUCTIONS,
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
        max_instructions: as `plan_op`.

    Raises:
        ValueError: sizes or names that are none.
    """
    matrices = mlp_matrices(K, ranks, inner, N)
    return plan_op("svd_mlp", M, matrices, dtype, target, lnc, max_instructions)


@lru_cache(maxsize=4096)
def quickest(problem: Problem, max_instructions: int = MAX_INSTRUCTIONS) -> Plan:
    """The plan of least predicted time, in launches of so many instructions if 128 tokens take less.

    Raises:
        ValueError: no plan fits, or `max_instructions` is less than 1.
    """
    if max_instructions < 1:
        raise ValueError(f"max_instructions must be at least 1, got {max_instructions}")
    tiles, launches = tiles_in(problem.M, PARTITIONS), 1
    while True:
        each = tiles_in(tiles, launches)
        tokens = min(problem.M, each * PARTITIONS)
        found = candidates(replace(problem, M=tokens))
        if tokens < problem.M:  # decode's arguments are for one number of tokens
            found = [plan for plan in found if plan.phase == "prefill"]
        if not found:
            raise ValueError(f"no plan of {problem} fits SBUF on {problem.target}; split K or N")
        if found[0].instructions <= max_instructions or each == 1:
            return _launched(problem, found[0])
        wanted = launches * found[0].instructions // max_instructions
        launches = max(wanted, tiles_in(tiles, each - 1))


def _launched(problem: Problem, first: Plan) -> Plan:
    """The plan of a problem in launches of as many tokens as `first`, the last of the rest."""
    count, rest = divmod(problem.M, first.problem.M)
    plans = [first] * count + ([plan_part(first, rest)] if rest else [])
    return replace(
        first,
        problem=problem,
        time_ms=sum([plan.time_ms for plan in plans]),
        hbm_bytes=sum([plan.hbm_bytes for plan in plans]),
        instructions=sum([plan.instructions for plan in plans]),
        launches=tuple([plan.problem.M for plan in plans]),
    )


def plan_part(plan: Plan, tokens: int) -> Plan:
    """The plan of one of `plan.launches`: the same arguments for some of the tokens."""
    part: Plan | None = _module(plan.problem).plan_with(
        replace(plan.problem, M=tokens), plan.arguments
    )
    if part is None:
        raise ValueError(f"{plan.kernel} does not fit with {plan.arguments} for {tokens} tokens")
    return part


def _module(problem: Problem) -> ModuleType:
    """`plan.py` of the op: its `candidates`, and `plan_with` given arguments."""
    return import_module(f"neuronmm_ops.kernels.{problem.op}.plan")


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit: the choice first, then by predicted time."""
    found: list[Plan] = _module(problem).candidates(problem)
    found.sort(key=lambda plan: (plan.time_ms, plan.hbm_bytes, plan.blocks))
    if not found or problem.op == "svd_mlp":  # its plan of least traffic is the slowest to start
        return found
    # of plans that are as quick as the model can tell, the one that moves least goes first
    ties = [plan for plan in found if plan.time_ms <= TIE * found[0].time_ms]
    first = min(ties, key=lambda plan: plan.hbm_bytes)
    return [first, *[plan for plan in found if plan is not first]]


# what the ops' plan.py share in trying arguments of the prefill kernels


def token_blocks(problem: Problem) -> Iterator[list[int]]:
    """Widths of token blocks worth trying together; each list is for where none before fits."""
    tokens = problem.core_tokens[0]
    yield [w for w in WIDTHS if w < tokens] + [w for w in WIDTHS if w >= tokens][:1]
    yield from [[width] for width in SMALL_WIDTHS]


def fitting_residents(
    c: Costs, K: int, width: int, peak: Callable[[int], int], parts: int = 1
) -> list[int]:
    """How many x^T tiles may stay in SBUF: all, or as many as fit, or fewer to fetch ahead.

    `peak` of so many, whose tiles are [128, width]; several `parts` of tokens want all.
    """
    count, room = tiles_in(K, PARTITIONS), c.machine.usable_sbuf_bytes
    if peak(count) <= room:
        return [count]
    least = peak(0) if parts == 1 else room + 1
    if least > room:
        return []
    most = min(count - 1, (room - least - AHEAD_BYTES) // (width * c.item))
    found = {max(0, most), max(0, most) * 5 // 8}
    if c.layout == "pe":
        found = {n - n % STAGED_TILES for n in found}
    return sorted(found - {0}) or [0]


def quickest_stages(
    machine: Machine, arguments: Iterable[T], stage: Callable[[T], Program], live: int = 0
) -> list[T]:
    """Arguments of stages that fit beside `live` bytes of SBUF, by their time alone."""
    found: list[tuple[float, T]] = []
    for chosen in arguments:
        program = stage(chosen)
        if sbuf_peak([program], live) <= machine.usable_sbuf_bytes:
            timeline = Timeline(machine)
            timeline.repeat([program], 1)
            found.append((timeline.end_ns, chosen))
    return [chosen for _, chosen in sorted(found, key=lambda entry: entry[0])]
