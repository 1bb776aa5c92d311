"""Threads of a run: of the cores of a launch, and of NumPy's BLAS."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import commands
import pytest
from samples import data
from threadpoolctl import threadpool_info, threadpool_limits

import neuroncore as nc
from neuroncore import language as nl

INTERRUPTED = """
import os, signal, sys, threading
import numpy as np
import neuroncore as nc
from neuroncore import isa as nisa, language as nl

def kernel(x, forever):
    me, out = nl.program_id(0), nl.ndarray((4, 6), nl.float32, nl.shared_hbm)
    if forever and me == forever - 1:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while True:
            nisa.memset(nl.ndarray((4, 6), nl.float32), 0)
    tile = nl.load(x)
    nisa.core_barrier(x, (0, 1))
    nisa.dma_copy(out[2 * me : 2 * me + 2], tile[2 * me : 2 * me + 2] if not me else nl.load(x[2:]))
    return out

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
x = np.ones((4, 6), np.float32)
for forever in (1, 2):
    try:
        nc.simulate(nc.jit(kernel)[2], x, forever, target="trn2")
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        pass
    assert threading.active_count() == 1, threading.enumerate()
    assert (nc.simulate(nc.jit(kernel)[2], x, 0, target="trn2").outputs == 1).all()
"""


PROFILED = """
import sys
import numpy as np
import neuroncore as nc
from neuroncore import isa as nisa, language as nl

def kernel(x, forever):
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    while forever:
        nisa.memset(nl.ndarray((4, 6), nl.float32), 0)
    nisa.dma_copy(dst=out, src=x)
    return out

x = np.ones((4, 6), np.float32)
for forever in (False, True):
    try:
        nc.simulate(kernel, x, forever, target="trn2", budget=nc.Budget(seconds=0.2))
    except nc.NkiValidationError:
        assert forever
    sys.setprofile(lambda *event: None)
    sum([len(str(n)) for n in range(1000)])  # functions, loops
    sorted(range(1000), key=lambda n: -n)
    sys.setprofile(None)
"""


SCRIPTS = {"Ctrl-C ends both cores": INTERRUPTED, "a profiler goes on": PROFILED}


@pytest.mark.parametrize("script", SCRIPTS)
def test_after_an_interrupt(script):
    """A pending exception that is NULL keeps Python 3.11 from leaving a traced instruction."""
    commands.run(sys.executable, "-c", SCRIPTS[script])


@pytest.mark.parametrize(("lnc", "ranks"), [(2, None), (1, 2)])
def test_cores_that_sleep_are_left_behind(lnc, ranks):
    """In a thread that no signal reaches."""

    @nc.jit
    def kernel(x):
        if nl.program_id(0) == lnc - 1:
            time.sleep(10**6)
        return x

    with ThreadPoolExecutor(1) as pool:
        budget = nc.Budget(seconds=0.1)
        done = pool.submit(nc.simulate, kernel[lnc], data((4, 6)), ranks=ranks, budget=budget)
        with pytest.raises(nc.NkiValidationError, match=r"ran for more than 0\.1 s and"):
            done.result(60)


def test_a_core_that_fails_ends_the_launch_before_the_other_starts():
    ran = []

    def kernel(x):
        ran.append(nl.program_id(0))
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        nc.simulate(nc.jit(kernel)[2], data((4, 6)), target="trn2")
    assert ran == [0]


def test_a_run_uses_one_thread_of_numpys_blas_and_restores_the_rest():
    def threads():  # SciPy brings a BLAS of its own, which the simulator does not use
        return {p["num_threads"] for p in threadpool_info() if "numpy" in p["filepath"]}

    seen = []
    with threadpool_limits(2, user_api="blas"):
        nc.simulate(lambda x: seen.append(threads()) or x, data((4, 6)))
        assert threads() == {2}
    assert seen == [{1}]
