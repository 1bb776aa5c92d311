"""Dense matrices whose rows share scales: the order in which they are rounded, and the scales."""

import torch

from neuronmm_ops.compress.quantize import quantize_matrix
from neuronmm_ops.nn.nearest import nearest
from neuronmm_ops.storages import STORAGES, dequantized

GROUP = 128


def problem(seed=0):
    """Return a matrix of two groups of rows, and a moment of inputs of very unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(2 * GROUP, 6, dtype=torch.float64, generator=generator)
    lengths = torch.rand(2 * GROUP, dtype=torch.float64, generator=generator) ** 4
    mix = torch.randn(2 * GROUP, 2 * GROUP, dtype=torch.float64, generator=generator)
    x = (0.3 * mix + torch.eye(2 * GROUP)) * lengths
    return w, x.t() @ x


def lost(found, w, moment):
    error = found - w
    return float((error * (moment @ error)).sum())


def test_rows_of_a_group_are_rounded_in_the_order_of_their_inputs():
    """So that it does not matter in which they lie."""
    w, moment = problem()
    order = torch.cat([torch.randperm(GROUP) + start for start in (0, GROUP)])
    found, turned = (
        dequantized(*quantize_matrix(a, "int4", h), torch.float64)
        for a, h in ((w, moment), (w[order], moment[order][:, order]))
    )
    torch.testing.assert_close(turned, found[order])


def test_scales_cut_off_what_costs_less_than_it_takes_of_the_others():
    """Where inputs are alike and independent, nothing else differs from rounding to nearest."""
    w, _ = problem()
    unit = torch.eye(len(w)).double()
    ours = dequantized(*quantize_matrix(w, "int4", unit), torch.float64)
    plain = dequantized(*nearest(w, STORAGES["int4"]), torch.float64)
    assert lost(ours, w, unit) < 0.9 * lost(plain, w, unit)


def test_feedback_wins_most_where_inputs_are_unequal():
    w, moment = problem()
    ours = dequantized(*quantize_matrix(w, "int4", moment), torch.float64)
    plain = dequantized(*nearest(w, STORAGES["int4"]), torch.float64)
    assert lost(ours, w, moment) < 0.5 * lost(plain, w, moment)
