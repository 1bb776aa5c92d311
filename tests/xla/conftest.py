"""Real torch_xla on its CPU client, with the C host handler registered for the custom call."""

import gc
import os
import warnings

import pytest
import torch
import torch_xla
from host import build_c_handler, handler_address, register

from neuronmm_ops.ops import xla


@pytest.fixture(scope="session")
def handler(tmp_path_factory):
    """The C handler's library, registered with XLA's CPU client."""
    # torch_xla appends every graph to this file, and graphs.py reads them there.
    os.environ["XLA_SAVE_TENSORS_FMT"] = "hlo"
    os.environ["XLA_SAVE_TENSORS_FILE"] = str(tmp_path_factory.mktemp("graphs") / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        xla._warn_where_it_cannot_run(xla.API_NEURON)  # said once, and not in the tests
    library = build_c_handler(tmp_path_factory.mktemp("host_call"))
    register(handler_address(library))
    gc.freeze()  # of the modules: the collection after each test sees its own objects only
    return library


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
