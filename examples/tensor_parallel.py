"""A compressed model divided among processes, each of which loads its part alone.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py DIRECTORY

Without a directory it makes a tiny compressed model, and starts two processes by itself.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed.configuration_utils import DistributedConfig

from neuronmm_ops import SVDLinear, hf, swap_


def generate(directory: str) -> None:
    """Load this process's part, generate together, and say what each process holds."""
    plan = DistributedConfig(tp_plan="auto")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, distributed_config=plan)
    ids = torch.arange(8).unsqueeze(0)
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    held = sum(parameter.to_local().numel() for parameter in divided(model))
    whole = sum(parameter.numel() for parameter in divided(model))
    rank, tp = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {tp}: {held} of {whole} divided parameters")
    if rank == 0:
        print("tokens:", *tokens[0, 8:].tolist())
    dist.destroy_process_group()


def divided(model: torch.nn.Module) -> list[DTensor]:
    """Return the parameters of which a process holds a part."""
    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def start(directory: Path) -> None:
    """Make a tiny compressed model, and run this program on it in two processes."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    model = AutoModelForCausalLM.from_config(config)
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("proj"):
            layer = SVDLinear.from_linear(module, rank=16)
            factors[name] = (layer.u, layer.v)
    swap_(model, factors)
    hf.save(model, directory)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc-per-node", "2", __file__, str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(launcher + program, check=True, env=environment)  # noqa: S603  (this program)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        generate(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            start(Path(temporary) / "small")
