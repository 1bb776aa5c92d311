"""`make plans`: plans of the models of `models.py`, for `plan/plans.json`.

Those that `neuronmm plan` shows by default on each target. After a change of the kernels' source
each plan is traced again. Where that gives what was found for it, to the last bit, it is kept, for
a search follows from the times that it traces and nothing else; otherwise it is searched again, as
are those that are missing. A change that makes another candidate quicker and leaves the kept one as
it was is not seen: `--anew` searches all, which takes hours. After a change of the clock alone,
`--retime` keeps all arguments with the times that they now have. An interrupted search goes on
where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from neuroncore.hardware import MACHINES
from neuronmm_ops.kernels.problem import Problem
from neuronmm_ops.kernels.problems import mlp_matrices, qkv_matrices
from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.plan import MAX_INSTRUCTIONS, cache
from neuronmm_ops.plan.search import find_plan, traced_again
from neuronmm_ops.rank import aligned_rank

RATIO = 0.2
TOKENS = (1, 128, 4096)


def problems() -> Iterator[Problem]:
    """All problems, those of trn2 and of small models first."""
    shapes = sorted(SHAPES.values(), key=lambda shape: shape.hidden_size)
    for target in sorted(MACHINES, key=lambda name: name != "trn2"):
        for shape in shapes:
            for tokens in TOKENS:
                yield from _of_model(shape, tokens, target)


def _of_model(shape: ModelShape, tokens: int, target: str) -> Iterator[Problem]:
    sizes = shape.projections
    ranks = {name: r for name, (K, N) in sizes.items() if (r := aligned_rank(K, N, RATIO))}
    for name, (rows, columns) in sizes.items():
        yield Problem("xw", tokens, ((rows, columns),), target=target)
        if r := ranks.get(name):
            yield Problem("xuv", tokens, ((rows, r), (r, columns)), target=target)
    qkv, mlp = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
    (K, query), (_, key), (_, value) = [sizes[name] for name in qkv]
    if ranks.keys() >= set(qkv):
        of_qkv = ranks["q_proj"], ranks["k_proj"], ranks["v_proj"]
        matrices = qkv_matrices(K, of_qkv, (query, key, value))
        yield Problem("svd_qkv", tokens, matrices, target=target)
    yield Problem("xw", tokens, ((K, query + key + value),), target=target)
    inner = sizes["gate_proj"][1]
    if ranks.keys() >= set(mlp):
        of_mlp = ranks["gate_proj"], ranks["up_proj"], ranks["down_proj"]
        yield Problem("svd_mlp", tokens, mlp_matrices(K, of_mlp, inner, K), target=target)


def kept(retime: bool) -> dict[str, dict[str, Any]]:
    """Shipped plans by key: those of these kernels, and those that these leave unchanged.

    Where they are to be timed again, all whose arguments still fit, with what they cost now.
    """
    source, plans = cache.shipped()
    if source == cache.fingerprint():
        return dict(plans)
    entries: dict[str, dict[str, Any]] = {}
    for problem in problems():
        key = _key(problem)
        earlier = cache.load_earlier(problem, key)
        again = earlier and traced_again(earlier)
        if again and (retime or again == earlier):
            entries[key] = cache.entry_of(again)
    print(f"{len(entries)} of {len(plans)} plans are kept", file=sys.stderr)
    return entries


def write(plans: dict[str, dict[str, Any]]) -> None:
    """Write `plans.json`, a line a plan."""
    lines = ",\n".join([f"{json.dumps(key)}: {json.dumps(plan)}" for key, plan in plans.items()])
    text = f'{{"source": "{cache.fingerprint()}", "plans": {{\n{lines}\n}}}}\n'
    cache.SHIPPED.write_text(text)


def main(arguments: list[str] | None = None) -> None:
    """Write the plans, each that is searched as soon as it is found."""
    parser = argparse.ArgumentParser(description="Write plan/plans.json.")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--anew", action="store_true", help="search all plans, which takes hours")
    how.add_argument("--retime", action="store_true", help="search none that still fits")
    options = parser.parse_args(arguments)
    plans = {} if options.anew else kept(options.retime)
    write(plans)
    for problem in problems():
        key = _key(problem)
        if key not in plans:
            plan = find_plan(problem, MAX_INSTRUCTIONS, device_loop=False)
            plans[key] = cache.entry_of(plan)
            write(plans)
            print(f"{len(plans)}: {key} {plan.time_ms:.4f} ms", file=sys.stderr, flush=True)


def _key(problem: Problem) -> str:
    return cache.key_of(problem, MAX_INSTRUCTIONS, device_loop=False)


if __name__ == "__main__":
    main()
