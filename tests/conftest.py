"""Settings of every test: one hypothesis profile, one torch thread in each process."""

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

# The tensors are small and pytest-xdist brings the processes. The variable is for their children:
# OpenMP's threads wait by spinning, which on busy cores takes minutes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Precompiled headers pay when inductor compiles more than these few files.
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"

# torch_xla needs a torch of its own: `make test-xla` sets this and runs that folder alone.
collect_ignore = [] if "PJRT_DEVICE" in os.environ else ["xla"]
