"""Reads, and outputs, of elements that were never written."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from instruction_runs import noted, refused, run, stored
from samples import data

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl


def partly_written(x):
    tile = nl.ndarray((4, 6), nl.float32)
    nisa.memset(tile[:, :5], 0)
    return stored(tile)


def unwritten(x):
    return stored(nl.ndarray((4, 6), nl.float32))


def test_elements_that_were_never_written():
    x = data((4, 6))
    with noted("of which some elements were never written; they hold NaN or 4"):
        got = nc.simulate(partly_written, x).outputs
    assert np.isnan(got[:, 5]).all()
    assert (got[:, :5] == 0).all()
    with refused("of which no element was ever written; write the tile"):
        nc.simulate(unwritten, x)
    with refused("of which some elements were never written; write the tile"):
        nc.simulate(partly_written, x, uninitialised="raise")
    with noted("no element was ever written; they hold NaN or 4"):
        assert np.isnan(nc.simulate(unwritten, x, uninitialised="warn").outputs).all()
    with pytest.raises(ValueError, match="uninitialised must be one of"):
        nc.simulate(unwritten, x, uninitialised="ignore")


@pytest.mark.parametrize("mode", ["execute", "trace"])
def test_a_forgotten_store(mode):
    def kernel(x, columns):
        out = nl.ndarray((4, 6), nl.float32, nl.shared_hbm)
        if columns:
            nisa.dma_copy(out[:, :columns], x[:, :columns])
        return out

    x = data((4, 6)) if mode == "execute" else nc.TensorSpec((4, 6), nl.float32)
    with refused("[4, 6] float32 in shared_hbm at line .* was never written"):
        nc.simulate(kernel, x, 0, mode=mode)
    with noted("is returned, and some of it was never written"):
        nc.simulate(kernel, x, 5, mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nc.simulate(kernel, x, 6, mode=mode)


A, B, ALL, EVEN, ODD = (slice(*ends) for ends in ((32,), (32, 64), (None,), (0, 9, 2), (1, 9, 2)))


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([(A, ALL), (B, ALL)], True),
        ([(ALL, ODD), (ALL, EVEN)], True),
        ([(A, ODD), (A, EVEN), (B, slice(0, 5)), (B, slice(4, 9))], True),
        ([(A, ALL)], False),
        ([(ALL, ODD)], False),
        ([(ALL, slice(0, 9, 8)), (ALL, ODD)], False),
        ([(A, ALL), (B, slice(0, 8))], False),
    ],
)
def test_half_written_tiles(parts, whole):
    def kernel():
        t = nl.ndarray((64, 9), nl.float32)
        for part in parts:
            nisa.memset(t[part], 0)
        return stored(t)

    with nullcontext() if whole else noted("some elements were never written"):
        run(kernel)


@pytest.mark.parametrize(("step", "whole"), [(8, True), (2, False)])
def test_strided_writes_do_not_count_for_their_gaps(step, whole):
    def kernel():
        t = nl.ndarray((4, 9), nl.float32)
        nisa.memset(t[:, ::4], 0)
        nl.copy(t[:, ::4])
        nl.copy(t[:, ::step])  # the same first and last byte

    with nullcontext() if whole else noted("some elements were never written"):
        run(kernel)
