"""`estimate.ends`: times at both ends of what is not known, and the range of a ratio."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import neuroncore as nc
from neuroncore.uncertainty import UNCERTAINTIES
from neuronmm_ops.estimate.ends import ENDS, compared, spread, times_at
from neuronmm_ops.kernels.simulated import simulated_kernel

TIMES = st.lists(st.floats(0.5, 2.0), min_size=len(ENDS), max_size=len(ENDS))


def test_times_are_those_of_each_end_alone():
    x, w = (np.zeros(shape, np.float32) for shape in ((1024, 512), (512, 512)))

    def profile(*assume):
        kernel = simulated_kernel("xw", "xw", 1)
        return nc.simulate(kernel, x, w, target="trn2", mode="trace", assume=assume).profile

    found = dict(zip(ENDS, times_at(profile()), strict=True))
    assert found["transfers"] == profile().time_ms
    for each in UNCERTAINTIES:
        time_ms = profile(each.name).time_ms
        assert found["rows" if each.name == "dma" else each.name] == time_ms
    assert found["dma-rate"] < found["transfers"] != found["dma-queues"]
    assert found["matmul-issue"] > found["transfers"]


def test_a_range_by_hand():
    assert spread([2.0, 1.0, 4.0, 3.0]) == pytest.approx((1.0, 6.0))
    ends = "transfers", "rows", "instruction-order"
    of, over = (dict(zip(ends, times, strict=True)) for times in ((1, 2, 1), (4, 2, 3)))
    assert compared(of, over) == pytest.approx({"middle": 3**0.5, "low": 0.75, "high": 4.0})


@given(TIMES, TIMES)
def test_no_end_lies_outside_the_range(of, over):
    found = compared(dict(zip(ENDS, of, strict=True)), dict(zip(ENDS, over, strict=True)))
    ratios = [b / a for a, b in zip(of, over, strict=True)]
    assert found["low"] <= min(ratios) * (1 + 1e-12)
    assert found["high"] >= max(ratios) * (1 - 1e-12)
    assert found["low"] <= found["middle"] * (1 + 1e-12)
    assert found["high"] >= found["middle"] * (1 - 1e-12)
