"""From shapes, dtype and target to a `Plan`: which kernel runs, in which blocks, at which cost.

The feasible plans of an op are enumerated under every DMA model, and the one is taken that is never
far from the quickest: no table, no search at run time, no simulation, no torch. All times are
modelled.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType

from neuronmm_ops.hardware import DMA_MODELS, DmaModel, resolve_target
from neuronmm_ops.kernels.planner.decode_search import DecodeCosts, evaluated
from neuronmm_ops.kernels.planner.prefill import layouts
from neuronmm_ops.kernels.planner.prefill_search import Prefill
from neuronmm_ops.kernels.planner.problem import (
    Matrices,
    Plan,
    Problem,
    mlp_matrices,
    qkv_matrices,
)
from neuronmm_ops.kernels.stages.tiling import PARTITIONS, tiles_in

MAX_INSTRUCTIONS = 500_000
"""Of a launch: loops unroll, and compilers refuse, or take hours over, a few million."""
TIE = 1.002
"""Plans within this factor of the least predicted time count as equally quick."""
TRIED = 16
"""Plans of each DMA model that are tried under the others."""


def plan_op(
    op: str,
    M: int,
    matrices: Matrices,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    max_instructions: int = MAX_INSTRUCTIONS,
    device_loop: bool = False,
    weight_dtype: str = "",
    compute: str = "x",
    inputs: int = 1,
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
        weight_dtype: as `Problem`.
        compute: as `Problem`.
        inputs: as `Problem`.

    Raises:
        ValueError: sizes or names that are none, or weights that no plan fits.
    """
    machine = resolve_target(target)
    problem = Problem(
        *(op, M, matrices, dtype, machine.target, lnc),
        weight_dtype=weight_dtype,
        compute=compute,
        inputs=inputs,
    )
    return quickest(problem, max_instructions, device_loop)


def plan_xw(
    M: int,
    K: int,
    N: int,
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    max_instructions: int = MAX_INSTRUCTIONS,
    device_loop: bool = False,
    weight_dtype: str = "",
    compute: str = "x",
) -> Plan:
    """The quickest plan of `x[M, K] @ w[K, N]`; the other arguments as `plan_op`."""
    options = (dtype, target, lnc, max_instructions, device_loop, weight_dtype, compute)
    return plan_op("xw", M, ((K, N),), *options)


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
    device_loop: bool = False,
    weight_dtype: str = "",
    compute: str = "x",
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
        device_loop: as `plan_op`.
        weight_dtype: as `Problem`.
        compute: as `Problem`.

    Raises:
        ValueError: sizes or names that are none.
    """
    machine = resolve_target(target)
    problem = Problem(
        *("xuv", M, ((K, r), (r, N)), dtype, machine.target, lnc, bf16_partial_sums),
        weight_dtype=weight_dtype,
        compute=compute,
    )
    return quickest(problem, max_instructions, device_loop)


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
    device_loop: bool = False,
    weight_dtype: str = "",
    compute: str = "x",
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
        device_loop: as `plan_op`.
        weight_dtype: as `Problem`.
        compute: as `Problem`.

    Raises:
        ValueError: sizes or names that are none.
    """
    options = (dtype, target, lnc, max_instructions, device_loop, weight_dtype, compute)
    return plan_op("svd_mlp", M, mlp_matrices(K, ranks, inner, N), *options)


def plan_svd_qkv(
    M: int,
    K: int,
    ranks: tuple[int, int, int],
    outputs: tuple[int, int, int],
    dtype: str = "bfloat16",
    target: str | None = None,
    lnc: int = 1,
    max_instructions: int = MAX_INSTRUCTIONS,
    device_loop: bool = False,
    weight_dtype: str = "",
    compute: str = "x",
) -> Plan:
    """The quickest plan of low-rank query, key and value `[M, K] -> [M, N_q + N_k + N_v]`.

    Args:
        M: tokens.
        K: input features.
        ranks: of query, key and value.
        outputs: features of query, key and value.
        dtype: as `plan_op`.
        target: as `plan_op`.
        lnc: as `plan_op`.
        max_instructions: as `plan_op`.
        device_loop: as `plan_op`.
        weight_dtype: as `Problem`.
        compute: as `Problem`.

    Raises:
        ValueError: sizes or names that are none.
    """
    options = (dtype, target, lnc, max_instructions, device_loop, weight_dtype, compute)
    return plan_op("svd_qkv", M, qkv_matrices(K, ranks, outputs), *options)


@lru_cache(maxsize=4096)
def quickest(
    problem: Problem, max_instructions: int = MAX_INSTRUCTIONS, device_loop: bool = False
) -> Plan:
    """The plan of least regret over the DMA models, in launches of at most so many instructions.

    A launch has at least 128 tokens, however many instructions that takes. With `device_loop` one
    that has more loops over its tokens, if that makes it shorter.

    Raises:
        ValueError: no plan fits, or `max_instructions` is less than 1.
    """
    if max_instructions < 1:
        raise ValueError(f"max_instructions must be at least 1, got {max_instructions}")
    tiles, launches = tiles_in(problem.M, PARTITIONS), 1
    while True:
        each = tiles_in(tiles, launches)
        tokens = min(problem.M, each * PARTITIONS)
        # decode's arguments are for one number of tokens
        found = _of_least_regret(replace(problem, M=tokens), prefill_only=tokens < problem.M)
        if not found:
            raise ValueError(f"no plan of {problem} fits SBUF on {problem.target}; split K or N")
        long = found.instructions > max_instructions
        if long and device_loop and launches == 1 and (looped := _looped(found)):
            return looped
        if not long or each == 1:
            return _launched(problem, found)
        wanted = launches * found.instructions // max_instructions
        launches = max(wanted, tiles_in(tiles, each - 1))


def _looped(plan: Plan) -> Plan | None:
    """The plan with its blocks of tokens as a loop of the device; None if that is not shorter."""
    if plan.phase != "prefill" or plan.problem.machine.generation < 3:
        return None
    looped = _timed_for(plan, plan.problem, device_loop=True)
    return looped if looped.instructions < plan.instructions else None


def _launched(problem: Problem, first: Plan) -> Plan:
    """The plan of a problem in launches of as many tokens as `first`, the last of the rest."""
    count, rest = divmod(problem.M, first.problem.M)
    plans = [first] * count + ([plan_part(first, rest)] if rest else [])
    return replace(
        first,
        problem=problem,
        time_ms=sum([plan.time_ms for plan in plans]),
        times_ms=tuple([sum(times) for times in zip(*[p.times_ms for p in plans], strict=True)]),
        hbm_bytes=sum([plan.hbm_bytes for plan in plans]),
        instructions=sum([plan.instructions for plan in plans]),
        launches=tuple([plan.problem.M for plan in plans]),
    )


def _of_least_regret(problem: Problem, *, prefill_only: bool) -> Plan | None:
    """The plan whose worst share over the quickest, of all DMA models, is least."""
    shortlist: dict[tuple[str, object], Plan] = {}
    own_ms: list[float] = []
    for model in DMA_MODELS:
        found = candidates(replace(problem, dma_model=model))
        if prefill_only:
            found = [plan for plan in found if plan.phase == "prefill"]
        if not found:
            return None
        own_ms.append(min([plan.time_ms for plan in found]))
        for plan in found[:TRIED]:
            shortlist.setdefault((plan.phase, plan.blocks), plan)
    under = [[_under(plan, model) for model in DMA_MODELS] for plan in shortlist.values()]
    tried: list[Plan] = []
    # a model's own candidates may lack its quickest
    quickest_ms = [min(own, *[plans[n].time_ms for plans in under]) for n, own in enumerate(own_ms)]
    for plans in under:
        shares = [plan.time_ms / ms for plan, ms in zip(plans, quickest_ms, strict=True)]
        tried.append(_with_times(problem, plans, regret=max(shares) - 1))
    least = min(tried, key=lambda plan: (plan.regret, plan.hbm_bytes, plan.blocks))
    prefill = _prefill(problem)
    if prefill is None or not prefill.tie_to_traffic:
        return least
    ties = [plan for plan in tried if 1 + plan.regret <= TIE * (1 + least.regret)]
    return min(ties, key=lambda plan: (plan.hbm_bytes, plan.regret))


def _under(plan: Plan, model: DmaModel) -> Plan:
    """The same arguments under a DMA model."""
    problem = replace(plan.problem, dma_model=model)
    if problem == plan.problem:
        return plan
    if plan.phase == "prefill":
        return _with_arguments(plan, problem)
    return evaluated(DecodeCosts(problem), _module(problem).decode_stages, plan.arguments)


@lru_cache(maxsize=4096)
def plan_part(plan: Plan, tokens: int) -> Plan:
    """The plan of one of `plan.launches`: the same arguments for some of the tokens.

    Kept, for launchers ask for it at every call.
    """
    return _timed_for(plan, replace(plan.problem, M=tokens))


def _timed_for(plan: Plan, problem: Problem, *, device_loop: bool = False) -> Plan:
    """A prefill plan's arguments for another problem of the same shapes, under every DMA model."""
    models = [replace(problem, dma_model=model) for model in DMA_MODELS]
    plans = [_with_arguments(plan, each, device_loop=device_loop) for each in models]
    return _with_times(problem, plans, plan.regret)


def _with_times(problem: Problem, plans: list[Plan], regret: float) -> Plan:
    """Of one plan under each DMA model that of the problem's, with the times under all."""
    own = plans[DMA_MODELS.index(problem.dma_model)]
    return replace(own, times_ms=tuple([plan.time_ms for plan in plans]), regret=regret)


def _with_arguments(plan: Plan, problem: Problem, *, device_loop: bool = False) -> Plan:
    """A prefill plan's arguments for another problem of the same shapes."""
    arguments = plan.arguments
    prefill: Prefill = _module(problem).Prefill(problem, arguments["layout"])
    numbers = tuple([int(arguments[name]) for name in prefill.names])
    double_row = bool(arguments.get("double_row", False))
    found = prefill.plan(numbers, device_loop=device_loop, double_row=double_row)
    if found is None:
        raise ValueError(f"{plan.kernel} does not fit with {arguments} for {problem.M} tokens")
    return found


def _module(problem: Problem) -> ModuleType:
    """`plan.py` of the op: its class `Prefill`, and `decode` with plans of up to 128 tokens."""
    return import_module(f"neuronmm_ops.kernels.{problem.op}.plan")


def _prefill(problem: Problem) -> type[Prefill] | None:
    """The op's class `Prefill`, if it has one: lm_head takes up to 128 tokens."""
    return getattr(_module(problem), "Prefill", None)


def candidates(problem: Problem) -> list[Plan]:
    """All plans that fit, by predicted time under the problem's DMA model."""
    module = _module(problem)
    found: list[Plan] = module.decode(problem) if problem.M <= PARTITIONS else []
    if (prefill := _prefill(problem)) is not None:
        for layout in layouts(problem):
            found += prefill(problem, layout).plans()
    return sorted(found, key=lambda plan: (plan.time_ms, plan.hbm_bytes, plan.blocks))
