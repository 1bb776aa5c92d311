"""A small compressed Llama on an XLA device: what it lowers to, then prefill and decode.

On Trainium each custom call is an NKI kernel. XLA's CPU client has none, so there the example
says what would run, and asks for plain matmuls (`NEURONMM_XLA=composite`) to generate.

    pip install 'neuronmm-ops[hf,xla]'
    PJRT_DEVICE=CPU python examples/xla_llama.py --dtype bfloat16 --target trn2
"""

import argparse
import base64
import json
import os
import re
import sys
from typing import Any

import torch
from torch import Tensor

from neuroncore.hardware import TARGET_VARIABLE
from neuronmm_ops import SVDConfig, compress_
from neuronmm_ops.ops.backends.environment import core
from neuronmm_ops.plan import Plan, plan_svd_mlp

try:
    import torch_xla  # pyright: ignore[reportMissingImports]
    import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:
    sys.exit("torch_xla is not installed; run: pip install 'neuronmm-ops[hf,xla]'")
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

KV_HEADS, HEAD_DIM = 2, 64
PROMPT, NEW_TOKENS = 256, 8
CONFIG = LlamaConfig(
    hidden_size=4 * HEAD_DIM,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=KV_HEADS,
    vocab_size=512,
    max_position_embeddings=PROMPT + NEW_TOKENS,
)
COLUMNS = "{:<12}{:>8}{:>14}{:>6}  {:<16}{:<9}{:>12}"


def next_logits(model: Any, ids: Tensor, cache: StaticCache) -> Tensor:
    """Logits of the token after `ids`, which follow what is in the cache."""
    return model(ids, cache=cache).logits[:, -1]  # before Transformers 5.24: past_key_values


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


def plan_of(model: Any, tokens: int) -> Plan:
    """How the chosen core runs one MLP of the model on so many tokens."""
    mlp, chosen = model.model.layers[0].mlp, core()
    ranks = (mlp.gate_proj.rank, mlp.up_proj.rank, mlp.down_proj.rank)
    K, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    dtype = str(model.dtype).removeprefix("torch.")
    return plan_svd_mlp(tokens, K, ranks, inner, K, dtype, chosen.target, chosen.lnc)


def row(name: str, plan: Plan, hlo: str) -> str:
    """A pass as a line of the table: its HLO, and the plan of its kernels."""
    configs = re.findall(r' custom-call\(.*backend_config="([^"]+)"', hlo)
    kernels = {json.loads(base64.b64decode(config))["func_name"] for config in configs}
    time_us = f"{1e3 * plan.time_ms:.1f}"
    cells = (
        plan.problem.M,
        len(configs),
        hlo.count(" dot("),
        "+".join(kernels),
        plan.phase,
        time_us,
    )
    return COLUMNS.format(name, *cells)


def compressed_llama(dtype: torch.dtype) -> Any:
    """A random Llama, its MLPs replaced by low-rank pairs that keep 62 % of their parameters."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG).eval()
    compress_(model, SVDConfig(ratio=0.4, method="plain", allocation="uniform"))
    return model.to(dtype)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--target", choices=("trn1", "trn2", "trn3"), help="default: this machine's, else trn2"
    )
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    given = arguments()
    if given.target is not None:
        os.environ[TARGET_VARIABLE] = given.target
    model = compressed_llama(getattr(torch, given.dtype))
    prompt = torch.randint(CONFIG.vocab_size, (1, PROMPT))
    expected = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0, PROMPT:]

    chosen = core()
    print(f"{given.dtype}, planned for {chosen.target}, lnc {chosen.lnc} ({chosen.source})\n")
    columns = ("pass", "tokens", "custom calls", "dots", "kernel", "form", "modelled us")
    print(COLUMNS.format(*columns))
    device = torch_xla.device()
    llama = Llama(model, device)
    for name, tokens in (("prompt", PROMPT), ("next token", 1)):
        print(row(name, plan_of(model, tokens), llama.lower(tokens)))

    if xm.xla_device_hw(device) == "CPU":
        print("\nXLA:CPU has no NKI kernels: generating with NEURONMM_XLA=composite")
        os.environ["NEURONMM_XLA"] = "composite"
    tokens = llama.generate(prompt)
    same = sum(a == b for a, b in zip(tokens, expected.tolist(), strict=True))
    print(f"tokens on {device}: {tokens}; {same} of {len(tokens)} as on the CPU")


if __name__ == "__main__":
    main()
