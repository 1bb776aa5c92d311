"""Settings of every test: one hypothesis profile, one torch thread in each process.

Commands of `neuronmm` and of `python benchmarks` are tested on a tiny model and a text.
"""

import os
import signal
from pathlib import Path

import hypothesis_settings  # noqa: F401
import pytest
import torch
from outcomes import TEXT

# The tensors are small and pytest-xdist brings the processes. The variable is for their children:
# OpenMP's threads wait by spinning, which on busy cores takes minutes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# No test waits for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Precompiled headers pay when inductor compiles more than these few files.
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"

# Read when Triton is imported, by torch's compiler, too: kernels for GPUs are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# These engines have environments of their own: `make test-xla` and `make test-vllm` set the
# variables, and each runs its folder alone.
ENGINES = {"xla": "PJRT_DEVICE", "vllm": "VLLM_CPU_KVCACHE_SPACE"}
collect_ignore = [folder for folder, name in ENGINES.items() if name not in os.environ]

# A shell that starts the tests in the background has SIGINT ignored, by all their children, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import tiny_directory  # not above: it brings Transformers

    return tiny_directory(tmp_path_factory.mktemp("model") / "dense")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data sets are looked for in an empty cache, and nowhere else; returns the hub's."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    # lm-eval asks for it, and it runs programs for two seconds.
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
    return tmp_path / "hub"
