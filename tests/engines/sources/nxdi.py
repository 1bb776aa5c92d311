"""Compares the integration with Transformers on NxD Inference's public source, on the CPU.

    python nxdi.py NXD_SRC NXDI_SRC TP [CASE ...]

The sources are the folders `src` of checkouts of neuronx-distributed and of
neuronx-distributed-inference; the environment has torch, transformers 4.57, and this package
without extras. Nothing of a device is tested: NxD's layers, `ModelBuilder.shard_checkpoint` and
NxD Inference's models and generation are, over gloo. Ranks compute with the tensors that
`shard_checkpoint` wrote for them. Prints a row a case, as JSON; exit code 1 where tokens differ.
"""

import json
import os
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import neuron_only
import torch
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).parents[1]))
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
TOLERANCE = 1e-5


def prepare(nxd: str, nxdi: str) -> None:
    """Make both sources importable, without NxD's own `__init__`, which imports its training."""
    sys.path[:0] = [nxd, nxdi]
    neuron_only.install()
    neuron_only.bare_package("neuronx_distributed", f"{nxd}/neuronx_distributed")


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
    """Return the tokens, and the logits of each new one."""
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


def made(directory: Path, tp: int, **options: Any) -> Any:
    """NxD Inference's model with our class, as its own demo makes it."""
    from neuronx_distributed_inference.utils import hf_adapter

    from neuronmm_ops.engines.nxdi import causal_lm

    family = causal_lm(json.loads((directory / "config.json").read_text())["model_type"])
    options |= {"torch_dtype": "float32", "attn_kernel_enabled": False}
    neuron_config = family.get_neuron_config_cls()(
        tp_degree=tp, batch_size=2, seq_len=64, **options
    )
    load_config = hf_adapter.load_pretrained_config(str(directory))
    config = family.get_config_cls()(neuron_config, load_config=load_config)
    return family(str(directory), config)


def shard(nxd: str, nxdi: str, tp: int, cases: dict[Path, dict[str, Any]]) -> None:
    """Write each rank's tensors by NxD's `ModelBuilder.shard_checkpoint`, as before a compile."""
    warnings.simplefilter("ignore")
    prepare(nxd, nxdi)
    for directory, options in cases.items():
        model = made(directory, tp, save_sharded_checkpoint=True, **options)
        model.shard_weights(str(directory))


def run(directory: Path, rank: int, tp: int, options: dict[str, Any], ids: Any, new: int) -> Any:
    """Generate with NxD Inference on this rank, from the rank's file of `shard_checkpoint`."""
    from neuronx_distributed_inference.models import application_base
    from neuronx_distributed_inference.utils import hf_adapter
    from safetensors.torch import load_file

    model = made(directory, tp, on_cpu=True, **options)
    model.to_cpu()
    # The ranks are joined from now on, and stay so.
    os.environ.pop("WORLD_SIZE", None)
    application_base.initialize_model_parallel = lambda **_: None  # pyright: ignore
    own = load_file(directory / "weights" / f"tp{rank}_sharded_checkpoint.safetensors")
    module = model.context_encoding_model.model
    names = {name for name, _ in module.named_parameters()} - own.keys()
    assert not [name for name in names if "kv_mgr" not in name], names
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan) if parameter.is_floating_point() else None
    assert not module.load_state_dict(own, strict=False).unexpected_keys
    return generate(hf_adapter.HuggingFaceGenerationAdapter(model), ids, new)


def work(
    rank: int, nxd: str, nxdi: str, tp: int, cases: dict[str, tuple[Path, Any]], port: int
) -> None:
    """All cases on one rank; rank 0 compares and prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    here = {"RANK": rank, "WORLD_SIZE": tp, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in here.items()} | {"NXD_CPU_MODE": "1"}
    prepare(nxd, nxdi)
    ids = torch.randint(0, 256, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    is_bad = False
    for name, (directory, options) in cases.items():
        # On the CPU one model does both phases, and single tokens are no sequence to divide.
        new = 1 if options.get("sequence_parallel_enabled") else NEW
        tokens, logits = run(directory, rank, tp, options, ids, new)
        if rank == 0:
            expected, wanted = reference(directory, ids, new)
            error = float((logits - wanted).abs().max() / wanted.abs().max())
            is_equal = torch.equal(tokens, expected) and error <= TOLERANCE
            is_bad |= not is_equal
            row = {"case": name, "ranks": tp, "new_tokens": 2 * new}
            print(json.dumps(row | {"equal": is_equal, "error": error}), flush=True)
    if is_bad:
        raise SystemExit(1)


def main() -> None:
    """Write the checkpoints and start the ranks."""
    from nxdi_checkpoints import make

    from neuronmm_ops.engines.nxdi import export

    nxd, nxdi, tp, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        cases: dict[str, tuple[Path, Any]] = {}
        for index, name in enumerate(names or CASES):
            arguments, options, neuron = CASES[name]
            source = make(Path(folder) / str(index), **arguments)
            cases[name] = Path(folder) / f"{index}-export", neuron
            export(source, cases[name][0], tp=int(tp), **options)
        context = mp.get_context("spawn")
        sharding = context.Process(target=shard, args=(nxd, nxdi, int(tp), dict(cases.values())))
        sharding.start()
        sharding.join()
        if sharding.exitcode:
            raise SystemExit(1)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(work, (nxd, nxdi, int(tp), cases, port), nprocs=int(tp))  # pyright: ignore


if __name__ == "__main__":
    main()
