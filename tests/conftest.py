"""Settings of every test: one hypothesis profile, one torch thread in each worker."""

import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "neuronmm",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("neuronmm")

# The tensors are small and pytest-xdist brings the processes.
torch.set_num_threads(1)

# torch_xla needs a torch of its own: `make test-xla` sets this and runs that folder alone.
collect_ignore = [] if "PJRT_DEVICE" in os.environ else ["xla"]
