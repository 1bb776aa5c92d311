"""Reads, and outputs, of elements that were never written."""

import warnings

import numpy as np
import pytest
from instruction_runs import data, noted, refused, stored

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
