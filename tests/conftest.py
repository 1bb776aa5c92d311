"""Settings of every test: one hypothesis profile, one torch thread in each worker."""

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
