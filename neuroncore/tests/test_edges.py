"""`with_schedule`: named instructions wait for others, and for nothing that they cannot."""

import numpy as np
import pytest
from samples import values

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl

X = values(0, (64, 512)) + 9


@nc.jit
def two_engines(x, repeat=False):
    """The scheduling guide's example: neither of the named instructions needs the other."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile, a, b, c = [nl.ndarray(x.shape, x.dtype) for _ in range(4)]
    nisa.dma_copy(tile, x, name="load")
    nisa.activation(a, nl.exp, tile, name="exp")
    nisa.tensor_scalar(b, tile, nl.add, 1.0, name="plus1")
    if repeat:
        nisa.tensor_scalar(b, b, nl.add, 0.0, name="plus1")
    nisa.tensor_tensor(c, a, b, nl.add)
    if nl.program_id(0) == 0:
        nisa.dma_copy(out, c, name="store")
    return out


def times(kernel) -> dict[str, tuple[float, float]]:
    (core,) = nc.simulate(kernel, X, target="trn2").profile.schedule.cores
    return {n: (core.start[i], core.end[i]) for n, (i,) in core.trace.names.items()}


def test_engines_run_side_by_side_unless_told_otherwise():
    free = times(two_engines)
    assert free["plus1"][0] == free["exp"][0]
    ordered = times(two_engines.with_schedule([("plus1", "exp")]))
    assert ordered["plus1"][0] >= ordered["exp"][1]
    assert times(two_engines.with_schedule([("plus1", ["load", "exp"])])) == ordered


def test_a_schedule_is_of_one_kernel_and_all_its_cores():
    ordered = two_engines.with_schedule([("plus1", "exp")])
    assert two_engines.schedule == ()
    assert ordered[2].schedule == ordered.schedule == (("plus1", "exp"),)
    assert ordered[2].with_schedule([]).lnc == 2
    np.testing.assert_array_equal(ordered[2](X), two_engines(X))
    for core in nc.simulate(ordered[2], X, target="trn2").profile.schedule.cores:
        assert core.start[core.trace.names["plus1"][0]] >= core.end[core.trace.names["exp"][0]]


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ([("plus1", "absent")], "0 instructions are named 'absent'"),
        ([("absent", "plus1")], "named are 'load', 'exp', 'plus1', 'store'"),
        ([("exp", "plus1")], "'plus1', which is issued later; simulated engines run in"),
        ([("exp", "exp")], "which is issued as the same instruction"),
    ],
)
def test_what_no_schedule_can_be_is_refused_when_the_kernel_runs(schedule, text):
    with pytest.raises(nc.NkiValidationError, match=text) as raised:
        nc.simulate(two_engines.with_schedule(schedule), X, target="trn2")
    assert "\n" not in str(raised.value)


def test_a_name_of_several_instructions_is_refused_where_it_is_used():
    nc.simulate(two_engines.with_schedule([("store", "exp")]), X, True, target="trn2")
    with pytest.raises(nc.NkiValidationError, match="2 instructions are named 'plus1'"):
        nc.simulate(two_engines.with_schedule([("plus1", "exp")]), X, True, target="trn2")


@pytest.mark.parametrize("pair", ["ab", ("a",), ("a", "b", "c"), (1, "b"), ("a", [2]), None])
def test_what_is_no_pair_of_names_is_refused(pair):
    with pytest.raises(nc.NkiValidationError, match="each entry is"):
        two_engines.with_schedule([pair])
    with pytest.raises(nc.NkiValidationError, match="each entry is"):
        two_engines.with_schedule(pair)
