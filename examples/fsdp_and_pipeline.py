"""A compressed model under Transformers' FSDP2, trained, and in its pipeline, generating.

    torchrun --nproc-per-node 2 examples/fsdp_and_pipeline.py fsdp DIRECTORY
    torchrun --nproc-per-node 2 examples/fsdp_and_pipeline.py pipeline DIRECTORY

Without arguments it makes a tiny compressed model, and runs both on it in two processes each.
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
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from neuronmm_ops import SVDConfig, demo, hf

IDS = torch.arange(32).view(2, 16)


def train(model: Any) -> None:
    """Three steps on tokens that each process has, then text from the whole model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step}: loss {loss.item():.3f}")
    say("tokens after training:", *generated(model))


def generated(model: Any) -> list[int]:
    """Eight greedy tokens.

    Without a cache: with one, pipelines of Transformers 5.23 give other tokens than one process
    does, of dense models, too.
    """
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_cache": False}
    return model.generate(IDS[:1, :8], **options)[0, 8:].tolist()


def say(*words: object) -> None:
    """Print on the first rank alone."""
    if dist.get_rank() == 0:
        print(*words)


def divided(how: str, directory: str) -> None:
    """Load this process's part, and use it."""
    sizes = {"fsdp": {"fsdp_size": 2}, "pipeline": {"pp_size": 2}}
    plan = DistributedConfig.from_dict(sizes[how])
    model: Any = AutoModelForCausalLM.from_pretrained(directory, distributed_config=plan)
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    count = torch.tensor(sum(part.numel() for part in parts))
    print(f"{how}: rank {dist.get_rank()} holds {count} parameters")
    if how == "fsdp":
        train(model)
    else:
        say("tokens of the pipeline:", *generated(model))
    dist.destroy_process_group()


def start(directory: Path) -> None:
    """Compress the model that ships with the package, and run this program on it."""
    config = SVDConfig(ratio=0.4, block=16, method="plain")
    hf.compress(demo.MODEL, config, demo.CALIBRATION, directory)
    whole = generated(hf.load(directory))
    print("tokens of one process: ", *whole)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for how in "fsdp", "pipeline":
        program = ["--nproc-per-node", "2", __file__, how, str(directory)]
        done = subprocess.run(  # noqa: S603  (this program)
            launcher + program, check=True, env=environment, capture_output=True, text=True
        )
        print(done.stdout, end="")
        if how == "pipeline" and " ".join(map(str, whole)) not in done.stdout:
            raise SystemExit("the pipeline has other tokens than one process")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        divided(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            start(Path(temporary) / "small")
