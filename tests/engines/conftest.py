"""The packages of engines, by stand-ins, for the length of a test."""

import sys

import nxdi_stand_ins
import pytest
import vllm_neuron_engine

from neuronmm_ops.engines import nxdi


@pytest.fixture
def nxd(monkeypatch):
    """NxD's modules in this process."""
    found = nxdi_stand_ins.modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    nxdi.causal_lm.cache_clear()
    nxdi_stand_ins.CALLS.clear()
    yield found
    nxdi.causal_lm.cache_clear()
    sys.modules.pop("neuronmm_ops.engines.nxdi.layers", None)


@pytest.fixture
def vllm_neuron_packages():
    """Whatever is installed of vllm_neuron_engine is taken away again."""
    yield
    vllm_neuron_engine.uninstall()
