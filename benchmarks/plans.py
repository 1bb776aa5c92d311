"""`make plans`: plans of the models of `models.py`, for `plan/plans.json`.

Those that `neuronmm plan` shows by default on each target. Entries of these kernels are kept, so
that an interrupted run goes on; those of other kernels are traced again, which takes minutes.
Without the file all are searched, which takes hours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from neuroncore.hardware import MACHINES
from neuronmm_ops.compress.rank import aligned_rank
from neuronmm_ops.kernels.problem import Problem, mlp_matrices, qkv_matrices
from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.plan import MAX_INSTRUCTIONS, cache
from neuronmm_ops.plan.search import find_plan, traced_again

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


def main() -> None:
    """Write the plans that are missing, each as soon as it is found."""
    source, plans = cache.shipped()
    plans = dict(plans) if source == cache.fingerprint() else {}
    for problem in problems():
        key = cache.key_of(problem, MAX_INSTRUCTIONS, device_loop=False)
        if key not in plans:
            earlier = cache.load_earlier(problem, key)
            plan = earlier and traced_again(earlier)
            plan = plan or find_plan(problem, MAX_INSTRUCTIONS, device_loop=False)
            plans[key] = cache.entry_of(plan)
            lines = ",\n".join([f"{json.dumps(k)}: {json.dumps(v)}" for k, v in plans.items()])
            text = f'{{"source": "{cache.fingerprint()}", "plans": {{\n{lines}\n}}}}\n'
            cache.SHIPPED.write_text(text)
            print(f"{len(plans)}: {key} {plan.time_ms:.4f} ms", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
