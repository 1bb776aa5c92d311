"""What a process reads of safetensors files, and the memory of its own that it takes meanwhile."""

import re
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from neuronmm_ops import hf, swap_

KIND = "RssAnon"  # of /proc/self/status: what is mapped of a file belongs to all processes
SAMPLE_S = 0.002
RATIO = 0.2
# Llama-3.1-70B has 7.1 times these widths, and 50 times these parameters.
SIZES: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4032,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 18,
    "vocab_size": 2560,
    "tie_word_embeddings": False,
}


class Read(NamedTuple):
    """Bytes of the tensors that were read, and by how many private memory grew at most."""

    tensors: int
    peak: int


class _Counted:
    """A file or a slice of one, that counts what is taken out of it."""

    def __init__(self, of: Any, sizes: list[int]) -> None:
        self._of, self._sizes = of, sizes

    def __enter__(self) -> "_Counted":
        return _Counted(self._of.__enter__(), self._sizes)

    def __exit__(self, *error: Any) -> None:
        self._of.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._count(self._of[index])

    def get_tensor(self, name: str) -> Tensor:
        return self._count(self._of.get_tensor(name))

    def get_slice(self, name: str) -> "_Counted":
        return _Counted(self._of.get_slice(name), self._sizes)

    def _count(self, tensor: Tensor) -> Tensor:
        self._sizes.append(tensor.nbytes)
        return tensor


@contextmanager
def counted() -> Generator[list[Read]]:
    """Fill the list with what was read in the block, when that ends."""
    sizes: list[int] = []
    found: list[Read] = []
    original: Any = safetensors.safe_open
    holders = [m for m in sys.modules.values() if vars(m).get("safe_open") is original]
    before = peak = private_bytes()
    over = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not over.wait(SAMPLE_S):
            peak = max(peak, private_bytes())

    thread = threading.Thread(target=sample)
    for module in holders:
        vars(module)["safe_open"] = lambda *a, **o: _Counted(original(*a, **o), sizes)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        for module in holders:
            vars(module)["safe_open"] = original
    found.append(Read(sum(sizes), peak - before))


def private_bytes() -> int:
    """Return what the process has in memory that is no file's."""
    (found,) = re.findall(rf"{KIND}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024


def write_70b_shaped(path: Path, shard: str, **sizes: Any) -> Path:
    """Write a compressed Llama in bfloat16, all of whose values are one, in shards of that size."""
    with torch.device("meta"):
        config = LlamaConfig(**{**SIZES, **sizes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:
            K, N = module.in_features, module.out_features
            r = int(K * N * (1 - RATIO) / (K + N)) // 8 * 8
            u, v = torch.ones(K, r), torch.ones(r, N)
            factors[name] = (u.bfloat16(), v.bfloat16())
    for module in model.modules():
        for name, tensor in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones_like(tensor, device="cpu")))
    swap_(model, factors)
    hf.save(model, path, max_shard_size=shard)
    return path
