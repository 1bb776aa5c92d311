"""The search for a plan: a coordinate descent whose cost of a candidate is the kernel, traced.

A kernel's `knobs.py` says what may vary. What the simulated core refuses does not fit. One trace
gives the times under every DMA model, with the other issue of matmuls, and with serial column
groups where these would hold decode up; the plan that is never far from the quickest is taken. The
search has no randomness and reads no clock: it finds the same everywhere. All times are modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module

from neuroncore.alike import alike_launches
from neuroncore.collector import no_collection
from neuroncore.hardware import PARTITIONS
from neuronmm_ops.kernels.knobs import Arguments, Axis, Knobs
from neuronmm_ops.kernels.problem import Plan, Problem
from neuronmm_ops.kernels.stages.tiling import tiles_in
from neuronmm_ops.plan.tracing import Cost, of_least_regret, traced, weighed

EFFORT = 300_000
"""Instructions traced in rounds over all knobs, up to which there is another."""
WORTH = 0.001
"""Share of a candidate's time that a round must gain for another to follow, after its first knob.

The others have all been tried with what that one gained.
"""
STEP = 0.0001
"""The same of a knob, for the others to be tried with its value: less is no way to more."""
SHORT_MS = 0.008
"""A launch takes about as long whatever runs: below, the first arguments that fit are taken."""
DESCENT_TOKENS = 2048
"""Of a core, at most, in a descent: the best of each block of tokens are then traced with all."""
MANY_WEIGHTS = 2**27
"""Elements from which a descent has half as many tokens: a trace has an instruction a tile."""
DECODED_TOKENS = 64
"""Up to so many, decode is the quicker kernel wherever it fits, but of `FEW_WEIGHTS`."""
FEW_WEIGHTS = 2**23
"""Elements up to which both kernels are traced: a launch is as short as its DMAs' latency."""
REPEATED = ("token_block", "layout", "k_block")
"""What each block of tokens repeats: the best candidate of each value is traced with all tokens."""
FAR = 1.25
"""Times of the quickest by the first DMA model, beyond which the other models are not asked."""
NEAR = 1.1
"""Times of the best, beyond which a candidate is no finalist."""


@dataclass(frozen=True)
class Candidate:
    """Arguments of a kernel that fit, and what so many repeats of it in a launch cost."""

    kernel: str
    arguments: Arguments
    cost: Cost
    gain: float = 1.0
    repeats: int = 1

    @property
    def rank(self) -> tuple[float, int, int, str]:
        """What a descent makes least."""
        cost = self.cost
        return sum(cost.times_ms), cost.hbm_bytes, cost.sbuf_bytes, repr(self.arguments)


def find_plan(
    problem: Problem, max_instructions: int, *, device_loop: bool, stages: Sequence[Plan] = ()
) -> Plan:
    """The plan of a problem.

    Args:
        problem: what is planned.
        stages: the plans of `stages_of` it.
        max_instructions: of a launch, beyond which it is split by its tokens, down to 128.
        device_loop: a longer launch loops over its tokens on the device, if that is shorter.

    Raises:
        ValueError: nothing fits.
    """
    with alike_launches(), no_collection():
        best = best_candidate(problem, tuple(stages))
        return _launched(problem, *best, max_instructions, device_loop)


def stages_of(problem: Problem) -> list[Problem]:
    """Problems whose plans the knobs of this one are made of."""
    module = import_module(f"neuronmm_ops.kernels.{problem.op}.knobs")
    return module.stages(problem) if hasattr(module, "stages") else []


@lru_cache(maxsize=256)
def best_candidate(problem: Problem, stages: tuple[Plan, ...] = ()) -> tuple[Candidate, float]:
    """What one launch is quickest with, and its regret. Raises ValueError where nothing fits."""
    candidates: list[Candidate] = []
    for phase in ("decode", "prefill") if problem.M <= PARTITIONS else ("prefill",):
        small = problem.weight_elements <= FEW_WEIGHTS
        if not candidates or problem.M > DECODED_TOKENS or small:
            candidates += _candidates(problem, phase, stages)
    if not candidates:
        remedy = "split K or N" if problem.matrices else "take fewer tokens, or a shorter T"
        raise ValueError(f"no plan of {problem} fits SBUF on {problem.target}; {remedy}")
    return _chosen(candidates)


def knobs_of(problem: Problem, phase: str, stages: Sequence[Plan] = ()) -> Sequence[Knobs]:
    """Knobs of the op's kernels of a phase."""
    module = import_module(f"neuronmm_ops.kernels.{problem.op}.knobs")
    planned = [stage.arguments for stage in stages]
    return getattr(module, phase)(problem, *planned) if hasattr(module, phase) else []


def _candidates(problem: Problem, phase: str, stages: tuple[Plan, ...]) -> list[Candidate]:
    """Candidates that fit, with what they cost for all tokens."""
    halves = 1 + (problem.weight_elements > MANY_WEIGHTS)
    tokens = min(problem.M, problem.lnc * DESCENT_TOKENS // halves)
    if not problem.matrices:  # of which sequence a token is, a part of them does not say
        tokens = problem.M
    ends = weighed(problem)
    part = replace(problem, M=tokens)
    weighed_ends = ends if part == problem else ()
    met = sorted(_met(part, phase, weighed_ends, stages), key=lambda c: c.rank)
    if tokens == problem.M:
        return met
    candidates: dict[object, Candidate] = {}
    for each in met:
        kind = each.gain, *[each.arguments.get(name) for name in REPEATED]
        is_finalist = kind not in candidates and each.rank[0] <= NEAR * met[0].rank[0]
        if is_finalist and (cost := traced(problem, each.kernel, each.arguments, ends)):
            candidates[kind] = replace(each, cost=cost)
    return list(candidates.values())


@lru_cache(maxsize=64)
def _met(
    problem: Problem, phase: str, otherwise: tuple[str, ...], stages: tuple[Plan, ...]
) -> tuple[Candidate, ...]:
    """The candidates of all kernels of a phase; more tokens share those of a few."""
    every = knobs_of(problem, phase, stages)
    return tuple([c for knobs in every for c in descend(problem, knobs, otherwise)])


def descend(problem: Problem, knobs: Knobs, otherwise: Sequence[str] = ()) -> list[Candidate]:
    """All candidates that fit, of those met on the way to the best, but the slowest."""
    met: dict[str, Candidate | None] = {}
    quickest_ms = math.inf

    def candidate(arguments: Arguments) -> Candidate | None:
        nonlocal quickest_ms
        key = repr(sorted(arguments.items()))
        if key not in met:
            most_ms, repeats = FAR * quickest_ms, knobs.repeats
            cost = traced(problem, knobs.kernel, arguments, otherwise, most_ms, repeats)
            met[key] = cost and Candidate(knobs.kernel, arguments, cost, knobs.gain, repeats)
            quickest_ms = min(quickest_ms, cost.times_ms[0]) if cost else quickest_ms
        return met[key]

    best = _first(knobs.starts, candidate)
    if best is None:
        return []
    gained = math.inf
    while gained > WORTH * best.rank[0] and max(best.cost.times_ms) > SHORT_MS:
        before = _best(knobs, knobs.axes[:1], best, candidate)
        best = _best(knobs, knobs.axes[1:], before, candidate)
        gained = before.rank[0] - best.rank[0]
        if sum([each.cost.instructions for each in met.values() if each]) > EFFORT:
            break
    return [each for each in met.values() if each]


def _best(
    knobs: Knobs,
    axes: Sequence[Axis],
    best: Candidate,
    candidate: Callable[[Arguments], Candidate | None],
) -> Candidate:
    """The best of what one knob after the other makes of a candidate."""
    for axis in axes:
        values = axis(best.arguments) if callable(axis) else axis
        changed = [{**best.arguments, **value} for value in values]
        tried = [candidate(each) for each in changed if knobs.allows(each)]
        quickest = min([best, *[each for each in tried if each]], key=lambda c: c.rank)
        if best.rank[0] - quickest.rank[0] > STEP * best.rank[0]:
            best = quickest
    return best


def _first(
    starts: Iterable[Arguments], candidate: Callable[[Arguments], Candidate | None]
) -> Candidate | None:
    for start in starts:
        if (best := candidate(start)) is not None:
            return best
    return None


def _chosen(candidates: list[Candidate]) -> tuple[Candidate, float]:
    """The candidate of least regret, and how much that is; of equal ones the least by `rank`.

    Regret is over the DMA models and the other ends of what is `tracing.weighed`.
    """
    usual = min([sum(c.cost.times_ms) for c in candidates if c.gain == 1.0], default=math.inf)
    allowed = [c for c in candidates if c.gain == 1.0 or sum(c.cost.times_ms) <= c.gain * usual]
    allowed.sort(key=lambda c: c.rank)
    number, regret = of_least_regret([(*c.cost.times_ms, *c.cost.other_ms) for c in allowed])
    return allowed[number], regret


def _launched(
    problem: Problem, best: Candidate, regret: float, max_instructions: int, device_loop: bool
) -> Plan:
    """The plan, split into launches or looped on the device where it is too long."""
    arguments, cost = best.arguments, best.cost
    if best.repeats > 1:
        of_one = traced(problem, best.kernel, arguments)
        assert of_one is not None, f"{best.kernel} fits {best.repeats} times, but not once"
        cost = of_one
    is_decode = best.kernel.endswith("_decode")
    long = cost.instructions > max_instructions and not is_decode
    if long and device_loop and problem.machine.has("device_loops"):
        looped = {**arguments, "device_loop": True}
        of_loop = traced(problem, best.kernel, looped)
        if of_loop is not None and of_loop.instructions < cost.instructions:
            arguments, cost, long = looped, of_loop, False
    parts = [(problem.M, cost)]
    if long:
        parts = _parts(problem, best, max_instructions)
    return _plan(problem, replace(best, arguments=arguments), regret, parts)


def traced_again(plan: Plan) -> Plan | None:
    """What a plan of other kernels costs with these; None where its arguments do not fit."""
    problem, parts = plan.problem, list[tuple[int, Cost]]()
    costs: dict[int, Cost | None] = {}
    for tokens in plan.launches:
        if tokens not in costs:
            part = replace(problem, M=tokens)
            try:
                costs[tokens] = traced(part, plan.kernel, plan.arguments)
            except (AttributeError, TypeError, AssertionError):  # another kernel, or its arguments
                costs[tokens] = None
        cost = costs[tokens]
        if cost is None:
            return None
        parts.append((tokens, cost))
    return _plan(problem, Candidate(plan.kernel, plan.arguments, parts[0][1]), plan.regret, parts)


def _plan(
    problem: Problem, candidate: Candidate, regret: float, parts: list[tuple[int, Cost]]
) -> Plan:
    """The plan of launches of so many tokens each, with what each costs."""
    launches = tuple([tokens for tokens, _ in parts])
    costs = [each for _, each in parts]
    times_ms = tuple([sum(times) for times in zip(*[c.times_ms for c in costs], strict=True)])
    return Plan(
        problem,
        "decode" if candidate.kernel.endswith("_decode") else "prefill",
        candidate.kernel,
        tuple(candidate.arguments.items()),
        times_ms[0],
        sum([c.hbm_bytes for c in costs]),
        max([c.sbuf_bytes for c in costs]),
        max([c.psum_banks for c in costs]),
        costs[0].bound,
        sum([c.instructions for c in costs]),
        launches,
        times_ms,
        regret,
    )


def _parts(problem: Problem, best: Candidate, max_instructions: int) -> list[tuple[int, Cost]]:
    """Tokens and costs of launches that are short enough, all but the last of one size."""
    tiles, launches = tiles_in(problem.M, PARTITIONS), 1

    def cost_of(tokens: int) -> Cost:
        cost = traced(replace(problem, M=tokens), best.kernel, best.arguments)
        if cost is None:
            raise ValueError(
                f"{best.kernel} does not fit with {best.arguments} for {tokens} tokens"
            )
        return cost

    while True:
        each = tiles_in(tiles, launches)
        tokens = min(problem.M, each * PARTITIONS)
        cost = cost_of(tokens) if tokens < problem.M else best.cost
        if cost.instructions <= max_instructions or each == 1:
            count, rest = divmod(problem.M, tokens)
            return [(tokens, cost)] * count + ([(rest, cost_of(rest))] if rest else [])
        wanted = launches * cost.instructions // max_instructions
        launches = max(wanted, tiles_in(tiles, each - 1))
