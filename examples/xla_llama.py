"""A small compressed Llama on an XLA device: what it lowers to, then prefill and decode.

On Trainium each custom call is an NKI kernel. XLA's CPU client has none, so there the example
prints what would run, and asks for plain matmuls (`NEURONMM_XLA=composite`) to generate.

    pip install 'neuronmm-ops[hf,xla]'
    PJRT_DEVICE=CPU python examples/xla_llama.py
"""

import base64
import json
import os
import re
import sys
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops import SVDConfig, compress_

try:
    import torch_xla  # pyright: ignore[reportMissingImports]
    import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:
    sys.exit("torch_xla is not installed; run: pip install 'neuronmm-ops[hf,xla]'")
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

KV_HEADS, HEAD_DIM = 2, 32
CONFIG = LlamaConfig(
    hidden_size=4 * HEAD_DIM,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=KV_HEADS,
    vocab_size=512,
    max_position_embeddings=64,
)
PROMPT, NEW_TOKENS = 16, 8


def next_logits(model: Any, ids: Tensor, cache: StaticCache) -> Tensor:
    """Logits of the token after `ids`, which follow what is in the cache."""
    return model(ids, past_key_values=cache).logits[:, -1]


class Llama:
    """A causal LM with a static cache: two shapes, so two graphs, prefill and decode."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model.to(device), device
        self.cache = self.new_cache()
        self.compiled = torch.compile(self.model, backend="openxla", fullgraph=True, dynamic=False)

    def new_cache(self) -> StaticCache:
        """A cache that lies on the device from the start, so that filling it is one shape."""
        cache = StaticCache(config=CONFIG, max_cache_len=CONFIG.max_position_embeddings)
        cache.early_initialization(1, KV_HEADS, HEAD_DIM, self.model.dtype, self.device)
        return cache

    def lower(self, tokens: int) -> str:
        """The HLO of a pass over `tokens` tokens, without running it."""
        ids = torch.zeros(1, tokens, dtype=torch.long, device=self.device)
        logits = next_logits(self.model, ids, self.new_cache())
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([logits])
        del logits  # a pending tensor would be computed with the next graph
        return hlo

    def generate(self, prompt: Tensor) -> list[int]:
        """Greedy tokens after prompt [1, tokens]."""
        self.cache.reset()  # one cache for every prompt: a new one would compile again
        ids = prompt.to(self.device)
        tokens: list[int] = []
        while len(tokens) < NEW_TOKENS:
            ids = next_logits(self.compiled, ids, self.cache).argmax(-1, keepdim=True)
            tokens.append(int(ids))
        return tokens


def show(call: str) -> None:
    """Print a custom call, and what its config says in place of the config."""
    text, config, rest = re.split(r'backend_config="([^"]+)"', call)
    decoded = json.loads(base64.b64decode(config))
    print(f"  {text}backend_config=...{rest}")
    for name in ("func_name", "grid", "klir_binary", "neuronmm"):
        print(f"    {name}: {decoded[name]}")


def compressed_llama() -> Any:
    """A random Llama, its MLPs replaced by low-rank pairs that keep 60 % of their parameters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    calibration = [torch.randint(CONFIG.vocab_size, (8, 64)) for _ in range(8)]
    compress_(model, SVDConfig(ratio=0.4, block=32), calibration)
    return model


@torch.no_grad()
def main() -> None:
    model = compressed_llama()
    prompt = torch.randint(CONFIG.vocab_size, (1, PROMPT))
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0, PROMPT:]

    device = torch_xla.device()
    llama = Llama(model, device)
    for form, tokens in (("prefill", PROMPT), ("decode", 1)):
        lines = llama.lower(tokens).splitlines()
        calls = [line.strip() for line in lines if " custom-call(" in line]
        dots = sum(" dot(" in line for line in lines)
        print(f"{form}, M = {tokens}: {len(calls)} custom calls, {dots} dots")
        for call in calls:
            show(call)

    if xm.xla_device_hw(device) == "CPU":
        print("XLA:CPU has no NKI kernels: generating with NEURONMM_XLA=composite")
        os.environ["NEURONMM_XLA"] = "composite"
    tokens = llama.generate(prompt)
    print(f"tokens on {device}: {tokens}")
    print(f"as on the CPU: {tokens == expected.tolist()}")


if __name__ == "__main__":
    main()
