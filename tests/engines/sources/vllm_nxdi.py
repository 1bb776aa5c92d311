"""Generates with vllm-neuron 0.2's own model loader on NxD Inference's source, on the CPU.

    python vllm_nxdi.py NXD_SRC NXDI_SRC VLLM_NEURON 1 [CASE ...]

Our entry point is called as vLLM calls it in its engine process; then the plugin's
`get_neuron_model` finds the class, makes its config and model, and serves requests token by token.
vLLM itself is an empty stand-in, and so is the compiler: `compile` does nothing and `load` puts the
model on the CPU. One rank.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import neuron_only
import nxdi
import torch

CASES = ("llama", "llama mixed", "qwen2", "qwen3")


def load(directory: Path) -> Any:
    """The plugin's model for an exported checkpoint."""
    from neuronx_distributed_inference.models.application_base import NeuronApplicationBase
    from transformers import AutoConfig
    from vllm_neuron.worker.neuronx_distributed_model_loader import get_neuron_model

    NeuronApplicationBase.compile = lambda *_, **__: None
    NeuronApplicationBase.load = lambda model, *_, **__: model.to_cpu()
    config = AutoConfig.from_pretrained(directory)
    model = SimpleNamespace(hf_config=config, model=str(directory), dtype=torch.float32)
    cache = SimpleNamespace(
        block_size=32, num_gpu_blocks_override=None, enable_prefix_caching=False
    )
    scheduler = SimpleNamespace(
        chunked_prefill_enabled=False, max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64
    )
    override = {"on_cpu": True, "attn_kernel_enabled": False, "on_device_sampling_config": None}
    additional = {"override_neuron_config": override | {"enable_bucketing": False}}
    ranks = SimpleNamespace(tensor_parallel_size=1)
    made = get_neuron_model(model, cache, ranks, scheduler, None, additional_config=additional)
    made.is_reorder_needed = True  # as the runner does without chunked prefill
    return made


def serve(model: Any, prompt: list[int], new: int) -> list[int]:
    """Answer a request as the plugin's runner does: the prompt, then a token at a time."""
    tokens = list(prompt)
    for step in range(new):
        own = tokens if step == 0 else tokens[-1:]
        positions = range(len(tokens) - len(own), len(tokens))
        logits = model.forward(
            input_ids=torch.tensor([own]),
            input_block_ids=torch.tensor([0]),
            position_ids=torch.tensor([list(positions)]),
            block_tables=None,
            slot_mapping=None,
            full_context_lens=torch.tensor([[len(tokens)]]),
            computed_context_lens=torch.tensor([[len(tokens) - len(own)]]),
            sampling_params=torch.tensor([[1.0, 1.0, 1.0]]),
            adapter_ids=None,
            prefill_completion_state=None,
        )
        tokens.append(int(logits[0].argmax()))
    return tokens


def main() -> None:
    """Serve a request of each case."""
    from nxdi_checkpoints import make

    from neuronmm_ops.engines.nxdi import export
    from neuronmm_ops.engines.vllm_neuron import register

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    nxd, source, plugin, _, *names = sys.argv[1:]
    nxdi.prepare(nxd, source)
    neuron_only.install("vllm", "torchvision")
    sys.path.insert(0, plugin)
    register()
    is_bad = False
    ids = torch.randint(0, 256, (1, nxdi.TOKENS), generator=torch.Generator().manual_seed(3))
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(names or CASES):
            arguments, options, _ = nxdi.CASES[name]
            exported = Path(folder) / f"{index}-export"
            export(make(Path(folder) / str(index), **arguments), exported, tp=1, **options)
            expected, _ = nxdi.reference(exported, ids, nxdi.NEW)
            model = load(exported)
            assert type(model.model).__name__.startswith("NeuronSVD"), type(model.model)
            is_equal = serve(model, ids[0].tolist(), nxdi.NEW) == expected[0].tolist()
            is_bad |= not is_equal
            row = {"case": name, "ranks": 1, "new_tokens": nxdi.NEW, "equal": is_equal}
            print(json.dumps(row), flush=True)
    if is_bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
