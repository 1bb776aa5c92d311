"""Shared by the tests of the simulated NeuronCore: what Hypothesis draws."""

from hypothesis import settings
from hypothesis import strategies as st

from neuroncore import language as nl

few = settings(max_examples=20)
pick = st.sampled_from
either = st.booleans()
both_ways = st.tuples(either, either)
seeds = st.integers(0, 2**16)
shapes = st.tuples(st.integers(1, 128), st.integers(1, 24))
steps = pick([1, 2, 3])
memories = pick([nl.sbuf, nl.psum])
kinds = pick(["float32", "bfloat16", "float16", "float8_e5m2", "int32", "uint8"])
