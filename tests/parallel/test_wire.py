"""Bytes on the wire are those of the formula, counted from what ranks really send."""

import pytest
import torch
from parallel.divided import Sent, linear, mesh, mlp, values
from ranks import run
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from neuronmm_ops.parallel import SVDColumnwise, SVDMLPParallel, SVDRowwise
from neuronmm_ops.parallel.sharding import DIVIDES, exchanges, part, wire_bytes

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
        expected = sum(M * wire_bytes(kind, n, r, tp, divide, 4) for kind, n, r, divide in formulas)
        collectives = sum(len(exchanges(kind, n, r, divide)) for kind, n, r, divide in formulas)
        found[case] = (sent.bytes, expected, len(sent.collectives), collectives)

    whole, own = slice(None), part(K, rank, tp, "K")
    dense = nn.Linear(K, N)
    count("dense row", dense, RowwiseParallel(), own, ("row", N, None, "both"))
    for divide in DIVIDES:
        for r in (10, 12):
            column, row = ("column", N, r, divide), ("row", N, r, divide)
            count(f"column {divide} {r}", linear(K, N, r), SVDColumnwise(divide), whole, column)
            count(f"row {divide} {r}", linear(K, N, r), SVDRowwise(divide), own, row)
        count(f"wide {divide}", linear(K, 8, 11), SVDRowwise(divide), own, ("row", 8, 11, divide))
        both = ("column", 30, (10, 7), divide), ("row", K, 9, divide)
        count(f"mlp {divide}", mlp(K, 30, (10, 7, 9)), SVDMLPParallel(divide), whole, *both)
    return found


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_what_ranks_send_is_what_the_formula_says(tp):
    for found in run(counted, tp, tp):
        assert len(found) == 13
        for case, (sent, expected, collectives, formula) in found.items():
            # N and K of a gather are padded in DTensor as in the formula
            assert sent == pytest.approx(expected), case
            assert collectives == formula, case
