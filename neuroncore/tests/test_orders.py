"""Values in other orders of the cores: those of a race change, and no others."""

import numpy as np
import pytest
import torch
from outcomes import refused
from scale_kernels import X

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl

ROWS = np.arange(256, dtype=np.float32).reshape(2, 128)


@nc.jit
def swapped(x, waits, change=False):
    """Each core writes its row of a shared tensor, then reads the other's."""
    between = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    mine, other = nl.program_id(), 1 - nl.program_id()
    tile = nl.ndarray((1, 128), x.dtype)
    nisa.memset(tile, 0.0)
    nisa.dma_copy(between[mine : mine + 1], tile)
    nisa.core_barrier(between, (0, 1))
    nisa.dma_copy(tile, x[mine : mine + 1])
    nisa.dma_copy(between[mine : mine + 1], tile)
    if waits:
        nisa.core_barrier(between, (0, 1))
    nisa.dma_copy(tile, between[other : other + 1])
    nisa.dma_copy(out[mine : mine + 1], tile)
    if change:
        nisa.dma_copy(x[mine : mine + 1], tile)
    return out


def test_a_kernel_that_waits_has_the_same_values_in_all_orders():
    run = nc.simulate(swapped[2], ROWS, True, target="trn2", schedules=8)
    np.testing.assert_array_equal(run.outputs, ROWS[::-1])


def test_orders_of_bfloat16_tensors_are_compared_by_their_bits():
    given = torch.from_numpy(ROWS).bfloat16()
    run = nc.simulate(swapped[2], given, True, target="trn2", schedules=2)
    assert torch.equal(run.outputs, given.flip(0))


@pytest.mark.filterwarnings("ignore::neuroncore.NkiWarning")
def test_a_race_is_refused_with_both_lines():
    first = swapped.func.__code__.co_firstlineno
    with pytest.raises(nc.NkiValidationError, match="a race; core 0 writes") as raised:
        nc.simulate(swapped[2], ROWS, False, target="trn2", schedules=8)
    assert f"at line {first + 11}" in str(raised.value)
    assert f"at line {first + 14}" in str(raised.value)


@nc.jit
def handed_over(x):
    """The second core reads what the first writes, if that came before."""
    between = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    tile = nl.ndarray(x.shape, x.dtype)
    if nl.program_id() == 0:
        nisa.dma_copy(tile, x)
        nisa.dma_copy(between, tile)
    else:
        nisa.dma_copy(tile, between)
        nisa.dma_copy(out, tile)
    return out


@pytest.mark.filterwarnings("ignore::neuroncore.NkiWarning")
def test_what_was_not_yet_written_is_a_race():
    assert nc.simulate(handed_over[2], ROWS, target="trn2").outputs.shape == ROWS.shape
    with pytest.raises(nc.NkiValidationError, match=r"a race: .* not in order \d+: .*written"):
        nc.simulate(handed_over[2], ROWS, target="trn2", schedules=8)


def test_each_run_begins_with_the_operands_as_they_were():
    given = ROWS.copy()
    nc.simulate(swapped[2], given, True, True, target="trn2", schedules=3)
    np.testing.assert_array_equal(given, ROWS[::-1])


@pytest.mark.parametrize(
    ("kernel", "options", "line"),
    [
        (swapped[2], {"schedules": -1}, "schedules must be a number"),
        (swapped[2], {"schedules": 2, "mode": "trace"}, "in mode 'trace'"),
    ],
)
def test_what_has_no_orders(kernel, options, line):
    with pytest.raises(ValueError, match=line):
        nc.simulate(kernel, ROWS, True, target="trn2", **options)


def test_the_command_takes_them_for_two_cores(simulate, file):
    outcome = simulate(f"{file}:scale", *X, "--schedules", 2)
    refused(outcome, "the kernel runs on one")
