"""Real torch_xla on its CPU client, with a handler registered for the custom call."""

import gc
import os
import warnings

import pytest
import torch
import torch_xla
from host import Handler, register

from neuronmm_ops.ops.backends import xla


@pytest.fixture(scope="session")
def handler(tmp_path_factory):
    """The handler that is registered with XLA's CPU client: it calls the reference."""
    # torch_xla appends every graph to this file, and graphs.py reads them there.
    os.environ["XLA_SAVE_TENSORS_FMT"] = "hlo"
    os.environ["XLA_SAVE_TENSORS_FILE"] = str(tmp_path_factory.mktemp("graphs") / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        xla._warn_where_it_cannot_run(xla.API_NEURON)  # said once, and not in the tests
    reference = Handler()
    register(reference.address)
    gc.freeze()  # of the modules: the collection after each test sees its own objects only
    return reference


@pytest.fixture(autouse=True)
def host(handler):
    """Lower for the host, start without compiled graphs, and leave no lazy tensor behind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with xla.api_version(xla.API_HOST):
        yield
    gc.collect()


@pytest.fixture
def device():
    return torch_xla.device()
