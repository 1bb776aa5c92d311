"""Compares the integration with Transformers on optimum-neuron's public source, on the CPU.

    python optimum_neuron.py NXD_SRC OPTIMUM_NEURON TP [CASE ...]

Real are optimum-neuron's models, generation and loading, by NxD's `ModelBuilder.shard_checkpoint`;
what the compiler makes of the models is stood in for by the same modules, over gloo.
"""

import json
import os
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nxdi
import torch
import torch.multiprocessing as mp

from neuronmm_ops.engines import optimum

CASES = ("llama", "llama mixed", "qwen2", "qwen3")


class Traced:
    """A compiled model: it keeps its weights when it is loaded, and its cache between calls."""

    def __init__(self, rank: int) -> None:
        self.rank, self.module, self.weights = rank, None, {}
        self.nxd_model = SimpleNamespace(initialize=self._initialize)

    def _initialize(self, weights: list[dict[str, torch.Tensor]], start_rank: Any) -> None:
        self.weights = weights[self.rank]

    def make(self, builder: Any) -> None:
        """Make the module of one of optimum-neuron's graph builders, and load it."""
        instance = builder.get_model_instance()
        instance.load_module()
        self.module = instance.module
        assert not self.module.load_state_dict(self.weights, strict=False).unexpected_keys

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        assert self.module is not None
        result, *cache = self.module(*inputs)
        for old, new in zip(self.module.kv_mgr.past_key_values, cache, strict=True):
            old.data.copy_(new)
        return result


def run(directory: Path, rank: int, tp: int, ids: torch.Tensor) -> torch.Tensor:
    """Generate on this rank."""
    from neuronx_distributed.parallel_layers import parallel_state  # pyright: ignore
    from optimum.neuron.models.auto_model import get_neuron_model_class  # pyright: ignore
    from optimum.neuron.models.inference.backend import pretrained_model  # pyright: ignore
    from optimum.neuron.models.inference.backend.config import NxDNeuronConfig  # pyright: ignore
    from optimum.neuron.models.inference.backend.modules import rms_norm  # pyright: ignore
    from optimum.neuron.models.inference.backend.modules.kvcache import (  # pyright: ignore
        kv_cache_manager,
    )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    options = NxDNeuronConfig(
        batch_size=len(ids),
        sequence_length=64,
        tp_degree=tp,
        torch_dtype=torch.float32,
        fused_qkv=True,
    )
    cls = get_neuron_model_class(config.model_type, task="text-generation", mode="inference")
    assert cls.__name__.startswith("NeuronSVD"), cls
    builders, traced = cls.create_graph_builders(config, options), Traced(rank)
    model = cls(config, options, {"model": traced}, builders)
    os.environ.pop("NXD_CPU_MODE", None)
    pretrained_model.get_neuron_device_memory = str  # it is read from the driver
    rms_norm.RmsNorm = SimpleNamespace(apply=_rms_norm)  # a custom call of torch_neuronx
    kv_cache_manager.fill_prefix = _fill_prefix  # written in HLO
    model.load_weights(str(directory))
    os.environ["NXD_CPU_MODE"] = "1"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, skip_collective_init=True
    )
    with torch.no_grad():
        traced.make(builders["model"]["token_generation"])
        sampled = {"max_new_tokens": nxdi.NEW, "do_sample": False, "pad_token_id": 256}
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=999, **sampled
        )
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return tokens


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dim: int) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[dim],), weight, eps)


def _fill_prefix(cache: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    filled = cache.clone()
    filled[tuple(slice(size) for size in update.shape)] = update
    return filled


def work(rank: int, nxd: str, source: str, tp: int, cases: dict[str, Path], port: int) -> None:
    """All cases on one rank; rank 0 compares and prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    nxdi.prepare(nxd, source)
    optimum.register()
    ids = torch.randint(0, 256, (2, nxdi.TOKENS), generator=torch.Generator().manual_seed(3))
    is_bad = False
    for name, directory in cases.items():
        tokens = run(directory, rank, tp, ids)
        if rank == 0:
            is_equal = torch.equal(tokens, nxdi.reference(directory, ids, nxdi.NEW)[0])
            is_bad |= not is_equal
            row = {"case": name, "ranks": tp, "new_tokens": 2 * nxdi.NEW, "equal": is_equal}
            print(json.dumps(row), flush=True)
    if is_bad:
        raise SystemExit(1)


def main() -> None:
    """Write the checkpoints and start the ranks."""
    from nxdi_checkpoints import make

    from neuronmm_ops.engines.nxdi import export

    nxd, source, tp, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        cases: dict[str, Path] = {}
        for index, name in enumerate(names or CASES):
            arguments, options, _ = nxdi.CASES[name]
            cases[name] = Path(folder) / f"{index}-export"
            export(make(Path(folder) / str(index), **arguments), cases[name], tp=int(tp), **options)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(work, (nxd, source, int(tp), cases, port), nprocs=int(tp))  # pyright: ignore


if __name__ == "__main__":
    main()
