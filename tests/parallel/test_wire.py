"""Bytes on the wire are those of the formula, counted from what ranks really send."""

import pytest
import torch
from parallel.divided import Sent, linear, mesh, mlp, values
from ranks import run
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from neuronmm_ops.parallel import SVDColumnwise, SVDMLPParallel, SVDRowwise
from neuronmm_ops.parallel.sharding import DIVIDES, part
from neuronmm_ops.plan.exchange import Collectives
from neuronmm_ops.plan.layouts import exchanged

pytestmark = pytest.mark.slow
M, K, N = 6, 24, 36


def counted(rank: int, tp: int) -> dict[str, tuple[float, float, int, int]]:
    """Bytes sent and those of the formula, collectives and those of the formula, by case."""
    found: dict[str, tuple[float, float, int, int]] = {}

    @torch.no_grad()
    def count(case: str, layer: nn.Module, style: object, width: slice, *formulas: tuple) -> None:
        parallelize_module(layer, mesh(), style)
        with Sent() as sent:
            layer(values(M, K)[:, width])
        links = Collectives("trn2", 1, tp)
        expected = [each for formula in formulas for each in exchanged(links, *formula)]
        wire_bytes = 2 * sum(each.wire_bytes for each in expected)  # in float32, not in bfloat16
        found[case] = (sent.bytes, wire_bytes, len(sent.collectives), len(expected))

    whole, own = slice(None), part(K, rank, tp, "K")
    dense = nn.Linear(K, N)
    count("dense row", dense, RowwiseParallel(), own, ("down", "dense", M, 0, N))
    for divide in DIVIDES:
        for r in (10, 12):
            column, row = ("gate_up", divide, M, r, N), ("down", divide, M, r, N)
            count(f"column {divide} {r}", linear(K, N, r), SVDColumnwise(divide), whole, column)
            count(f"row {divide} {r}", linear(K, N, r), SVDRowwise(divide), own, row)
        wide = ("down", "sum" if divide == "one" else divide, M, 11, 8)
        count(f"wide {divide}", linear(K, 8, 11), SVDRowwise(divide), own, wide)
        both = ("gate_up", divide, M, 36, 30), ("down", divide, M, 9, K)
        count(f"mlp {divide}", mlp(K, 30, (24, 12, 9)), SVDMLPParallel(divide), whole, *both)
    return found


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_what_ranks_send_is_what_the_formula_says(tp):
    for found in run(counted, tp, tp):
        assert len(found) == 13
        for case, (sent, expected, collectives, formula) in found.items():
            # N and K of a gather are padded in DTensor as in the formula
            assert sent == pytest.approx(expected), case
            assert collectives == formula, case
