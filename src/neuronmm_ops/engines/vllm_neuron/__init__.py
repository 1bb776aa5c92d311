"""Low-rank Llama and Qwen3 in vLLM-Neuron, the successor of vLLM on NxD Inference.

`register` is the entry point in the group `vllm.general_plugins`. It gives vLLM's registry one more
architecture, whose factory takes the engine's own model and puts low-rank layers in place of those
that the checkpoint has. Needs the core of this package, never Transformers.
(AWS: "How to onboard a model to vLLM Neuron"; "Scalable Model Registry Design", out-of-tree.)
"""

from importlib import import_module
from importlib.util import find_spec

ARCHITECTURE = "NeuronMMForCausalLM"
"""The name to give in `--hf-overrides`: the engine takes back its own, `LlamaForCausalLM`."""
_FACTORY = "neuronmm_ops.engines.vllm_neuron.factory:NeuronMMForCausalLM"


def register() -> None:
    """Register the models of the plugin for Neuron that is installed; may be called again.

    Of vLLM-Neuron, the architecture with vLLM. The plugin on NxD Inference has the same name and no
    models of its own: there NxD Inference's classes are replaced, and optimum-neuron's in its own.
    """
    if find_spec("vllm_neuron") is None:
        if find_spec("optimum") is not None and find_spec("optimum.neuron") is not None:
            import_module("neuronmm_ops.engines.optimum").register()
        return
    if find_spec("vllm_neuron.model") is None:
        if find_spec("neuronx_distributed_inference") is not None:
            import_module("neuronmm_ops.engines.nxdi").register()
        return
    from vllm import ModelRegistry  # pyright: ignore

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, _FACTORY)
