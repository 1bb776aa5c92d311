"""What a model's own compression as its draft may win, over the acceptance; modelled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.runner import run_all
from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.draft.speed import Costs, best_ahead, pass_ms
from neuronmm_ops.estimate.decoder import Decoder
from neuronmm_ops.estimate.linears import linears
from neuronmm_ops.models import SHAPES

TARGET, LNC, STORED, RATIO = "trn2", 2, "float8_e4m3fn", 0.5
CASES = (("Llama-3.1-8B", 1), ("Llama-3.1-70B", 16))
"""Model and ranks; dense in bfloat16."""
AHEAD, ACCEPTANCES, SHARES = (1, 3, 5, 7), (0.5, 0.6, 0.7, 0.8, 0.9), (1, 4)


def run(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Rows of all cases: a draft of all layers, and of a quarter.

    Args:
        progress: called with ("drafts", models done, models in all).
    """
    return [row for rows in run_all("drafts", _rows, CASES, progress) for row in rows]


def _rows(case: tuple[str, int]) -> list[dict[str, Any]]:
    name, tp = case
    shape, on = SHAPES[name], {"target": TARGET, "lnc": LNC, "tp": tp, "batch": 1}
    dense = Decoder.uniform(shape, linears(shape), **on)
    model = {M: pass_ms(dense, M) for M in (1, *[k + 1 for k in AHEAD])}
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        own = replace(shape, layers=shape.layers // share)
        every = linears(own, set(own.projections), STORED, ratio=RATIO)
        costs = Costs(pass_ms(Decoder.uniform(own, every, **on), 1), model)
        best = {a: best_ahead(a, costs, AHEAD) for a in ACCEPTANCES}
        rows.append(
            {"model": name, "tp": tp, "layers": own.layers, "draft_ms": round(costs.draft, 3)}
            | {"model_ms": round(model[1], 3)}
            | {f"{a:g}": f"{speed * model[1] / 1e3:.2f}x, {k}" for a, (k, speed) in best.items()}
        )
    return rows
