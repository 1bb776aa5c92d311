"""The signatures of the engines' sources that this package relies on.

    python tests/engines/sources/signatures.py DIR           # says what moved
    python tests/engines/sources/signatures.py DIR --write   # writes signatures.json anew

`signatures.json` has names and parameters alone, by checkout, file and function; a parameter with a
default ends in `=`. The stand-ins of tests are held to it, and it to the sources where they are.
"""

import ast
import json
import sys
from pathlib import Path

from checkouts import CHECKOUTS

COMMITTED = Path(__file__).with_suffix(".json")
_NXD, _NXDI = "src/neuronx_distributed", "src/neuronx_distributed_inference"
USED = {
    "nxd": {
        f"{_NXD}/parallel_layers/mappings.py": (
            "gather_from_sequence_parallel_region",
            "gather_from_tensor_model_parallel_region",
            "reduce_from_tensor_model_parallel_region",
            "reduce_scatter_to_sequence_parallel_region",
        ),
        f"{_NXD}/parallel_layers/layers.py": (
            "ColumnParallelLinear.__init__",
            "ColumnParallelLinear.forward",
            "RowParallelLinear.__init__",
            "RowParallelLinear.forward",
        ),
        f"{_NXD}/trace/model_builder.py": ("ModelBuilder.shard_checkpoint",),
    },
    "nxdi": {
        f"{_NXDI}/models/application_base.py": (
            "NeuronApplicationBase.get_state_dict",
            "NeuronApplicationBase.shard_weights",
        ),
        f"{_NXDI}/models/llama/modeling_llama.py": (
            "NeuronLlamaForCausalLM.convert_hf_to_neuron_state_dict",
            "NeuronLlamaMLP.__init__",
            "NeuronLlamaMLP._native_mlp",
            "NeuronLlamaMLP.forward",
            "NeuronLlamaModel.init_model",
        ),
        f"{_NXDI}/modules/attention/gqa.py": (
            "GroupQueryAttention_O.forward",
            "GroupQueryAttention_O.preshard_hook",
            "GroupQueryAttention_QKV._native_qkv_forward",
            "GroupQueryAttention_QKV.forward",
            "GroupQueryAttention_QKV.preshard_hook",
        ),
        f"{_NXDI}/modules/lora_serving/lora_module.py": ("is_lora_module",),
    },
    "optimum-neuron": {
        "optimum/neuron/models/inference/auto_models.py": ("register_neuron_model_for_inference",),
        "optimum/neuron/models/inference/backend/pretrained_model.py": (
            "NxDPreTrainedModel.convert_hf_to_neuron_state_dict",
            "NxDPreTrainedModel.get_state_dict",
            "NxDPreTrainedModel.shard_checkpoint",
        ),
        "optimum/neuron/models/inference/backend/modules/attention/gqa.py": (
            "GroupQueryAttention_O.forward",
            "GroupQueryAttention_QKV.forward",
        ),
        "optimum/neuron/models/inference/backend/modules/decoder/modeling_decoder.py": (
            "NxDModelForCausalLM.create_graph_builders",
        ),
        "optimum/neuron/models/inference/llama/modeling_llama.py": (
            "NeuronLlamaMLP.__init__",
            "NeuronLlamaMLP.forward",
        ),
    },
    "vllm-neuron-0.2": {
        "vllm_neuron/worker/neuronx_distributed_model_loader.py": (
            "NeuronCausalLM.forward",
            "_get_neuron_model_cls",
            "get_neuron_model",
        ),
    },
}
Signatures = dict[str, dict[str, list[str] | None]]


def of_arguments(arguments: ast.arguments) -> list[str]:
    """A function's parameters: a name each, `=` where it has a default."""
    plain = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    first = len(plain) - len(arguments.defaults)
    found = [f"{name}=" if index >= first else name for index, name in enumerate(plain)]
    if arguments.vararg:
        found.append(f"*{arguments.vararg.arg}")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(f"{argument.arg}=" if default else argument.arg)
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return found


def read(file: Path, names: tuple[str, ...]) -> dict[str, list[str] | None]:
    """The parameters of functions and methods of a file; None of one that it does not have."""
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
    found: dict[str, list[str] | None] = {}
    for name in names:
        body = tree.body
        for part in name.split("."):
            nodes = [node for node in body if getattr(node, "name", None) == part]
            body = getattr(nodes[-1], "body", []) if nodes else []
            arguments = getattr(nodes[-1], "args", None) if nodes else None
            found[name] = of_arguments(arguments) if arguments else None
    return found


def signatures(directory: Path, folder: str) -> Signatures:
    """All that is used of a checkout."""
    return {file: read(directory / folder / file, names) for file, names in USED[folder].items()}


def committed(folder: str) -> Signatures:
    """The same, as it was when this package was last compared with it."""
    return json.loads(COMMITTED.read_text(encoding="utf-8"))[folder]["signatures"]


def moved(directory: Path, folder: str) -> list[str]:
    """What of a checkout is no longer as committed, a line a function."""
    now = signatures(directory, folder)
    return [
        f"{folder}/{file}: {name} must take {wanted}, got {now.get(file, {}).get(name)}"
        for file, names in committed(folder).items()
        for name, wanted in names.items()
        if now.get(file, {}).get(name) != wanted
    ]


def main() -> int:
    """Compare, or write."""
    directory = Path(sys.argv[1])
    if "--write" in sys.argv:
        document = {
            folder: {
                "repository": CHECKOUTS[folder].repository,
                "commit": CHECKOUTS[folder].commit,
                "signatures": signatures(directory, folder),
            }
            for folder in USED
        }
        COMMITTED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0
    problems = [line for folder in USED for line in moved(directory, folder)]
    print("\n".join(problems) or "all signatures are as committed")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
