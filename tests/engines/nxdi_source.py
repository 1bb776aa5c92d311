"""Compares the integration with Transformers on NxD Inference's public source, on the CPU.

    python nxdi_source.py NXD_SRC NXDI_SRC TP [CASE ...]

The sources are the folders `src` of checkouts of aws-neuron's neuronx-distributed and
neuronx-distributed-inference; the environment has torch, transformers 4.57, and this package
without extras. Packages that come as wheels for Neuron alone are replaced by empty stand-ins, so
nothing of a device is tested: NxD's layers, sharding and state dicts, and NxD Inference's models
and generation are, over gloo. Prints a line a case; exit code 1 where tokens or logits differ.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

NEURON_ONLY = {"torch_xla", "torch_neuronx", "neuronxcc", "nki", "nkilib", "libneuronxla"}
# Name of the case: arguments of the checkpoint, of `export`, and of NeuronConfig.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}, {}),
    "llama one": ({}, {"divide": "one"}, {}),
    "llama fused": ({}, {}, {"fused_qkv": True}),
    "llama sequence": ({}, {"divide": "one"}, {"sequence_parallel_enabled": True}),
    "llama heads": ({"num_attention_heads": 6, "num_key_value_heads": 2}, {}, {}),
    "llama mha": ({"num_attention_heads": 6, "num_key_value_heads": 6}, {}, {}),
    "llama mlp": ({"dense": ("q_proj", "k_proj", "v_proj", "o_proj")}, {}, {"fused_qkv": True}),
    "llama mixed": (
        {"dense": ("0.self_attn.k_proj", "1.mlp.up_proj", "0.mlp.down_proj", "1.self_attn.o_proj")},
        {},
        {},
    ),
    "llama biases": ({"attention_bias": True, "mlp_bias": True, "intermediate_size": 176}, {}, {}),
    "llama int8": ({"storage": "int8"}, {}, {}),
    "qwen2": ({"model_type": "qwen2"}, {}, {}),
    "qwen2 fused": ({"model_type": "qwen2"}, {}, {"fused_qkv": True}),
    "qwen3": ({"model_type": "qwen3"}, {}, {}),
    "qwen3 one": ({"model_type": "qwen3"}, {"divide": "one"}, {}),
    "mistral": ({"model_type": "mistral", "sliding_window": None}, {}, {}),
}
TOKENS, NEW = 12, 16


class _Anything(type):
    """A class that stands for whatever it is asked for: decorator, base class, kernel."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(cls, name)

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _anything(name: str) -> Any:
    def decorate(self: Any, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def make(cls: Any, *args: Any, **options: Any) -> Any:
        return decorate(object.__new__(cls), *args, **options)

    members = {"__new__": make, "__init__": lambda *_, **__: None, "__call__": decorate}
    members |= {"__getattr__": _attribute, "__getitem__": lambda self, _: self}
    return _Anything(name, (), members)


def _attribute(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _anything(name)


class _Module(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"REDUCE_SUM": "sum", "REDUCE_MAX": "max", "REDUCE_MIN": "min"}
        value = known.get(name, _anything(name))
        if name == "get_platform_target":
            value = lambda: "trn1"  # noqa: E731
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in NEURON_ONLY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def prepare(nxd: str, nxdi: str) -> None:
    """Make both sources importable, without NxD's own `__init__`, which imports its training."""
    os.environ["NXD_CPU_MODE"] = "1"
    sys.path[:0] = [nxd, nxdi]
    sys.meta_path.insert(0, _Finder())
    torch.classes.neuron = _anything("neuron")  # pyright: ignore
    package = types.ModuleType("neuronx_distributed")
    package.__path__ = [f"{nxd}/neuronx_distributed"]
    sys.modules["neuronx_distributed"] = package


def reference(directory: Path, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate with Transformers from the same weights, multiplied out."""
    from nxdi_checkpoints import dense_weights
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(dense_weights(load_file(directory / "model.safetensors")))
    return generate(model, ids, new)


def generate(model: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=256,
        eos_token_id=999,
    )
    return found.sequences, torch.stack(found.logits)


def run(directory: Path, tp: int, options: dict[str, Any], ids: torch.Tensor, new: int) -> Any:
    """Generate with NxD Inference on this rank."""
    from neuronx_distributed_inference.models import application_base
    from neuronx_distributed_inference.utils import hf_adapter

    from neuronmm_ops.engines.nxdi import causal_lm

    family = causal_lm(json.loads((directory / "config.json").read_text())["model_type"])
    neuron_config = family.get_neuron_config_cls()(
        tp_degree=tp,
        batch_size=len(ids),
        seq_len=64,
        torch_dtype="float32",
        on_cpu=True,
        attn_kernel_enabled=False,
        **options,
    )
    load_config = hf_adapter.load_pretrained_config(str(directory))
    config = family.get_config_cls()(neuron_config, load_config=load_config)
    model = family(str(directory), config)
    model.to_cpu()
    # The ranks are joined from now on, and stay so.
    os.environ.pop("WORLD_SIZE", None)
    application_base.initialize_model_parallel = lambda **_: None  # pyright: ignore
    return generate(hf_adapter.HuggingFaceGenerationAdapter(model), ids, new)


def work(rank: int, nxd: str, nxdi: str, tp: int, names: list[str], folder: str, port: int) -> None:
    """All cases on one rank; rank 0 compares and prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    here = {"RANK": rank, "WORLD_SIZE": tp, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in here.items()}
    prepare(nxd, nxdi)
    ids = torch.randint(0, 256, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    is_bad = False
    for index, name in enumerate(names):
        directory, options = Path(folder) / f"{index}-export", CASES[name][2]
        # On the CPU one model does both phases, and single tokens are no sequence to divide.
        new = 1 if options.get("sequence_parallel_enabled") else NEW
        try:
            tokens, logits = run(directory, tp, options, ids, new)
        except Exception:
            print(f"tp {tp} {name}: {traceback.format_exc()}", flush=True)
            os._exit(1)
        if rank == 0:
            expected, wanted = reference(directory, ids, new)
            error = float((logits - wanted).abs().max() / wanted.abs().max())
            same = torch.equal(tokens, expected)
            is_bad |= not same or error > 1e-5
            print(
                f"tp {tp} {name}: tokens {'equal' if same else 'differ'}, {error:.1e}", flush=True
            )
    if is_bad:
        raise SystemExit(1)


def main() -> None:
    """Write the checkpoints and start the ranks."""
    import socket

    from nxdi_checkpoints import make

    from neuronmm_ops.engines.nxdi import export

    nxd, nxdi, tp, *names = sys.argv[1:]
    names = names or list(CASES)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        for index, name in enumerate(names):
            made, options, _ = CASES[name]
            source = make(Path(folder) / str(index), **made)
            export(source, Path(folder) / f"{index}-export", tp=int(tp), **options)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(work, (nxd, nxdi, int(tp), names, folder, port), nprocs=int(tp))  # pyright: ignore


if __name__ == "__main__":
    main()
