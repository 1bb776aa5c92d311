"""vLLM serves compressed checkpoints as they are: `vllm serve DIR`.

vLLM calls `register` in each of its processes, by the entry point `neuronmm` of the group
`vllm.general_plugins`. The factors are then parameters of vLLM's own linear layers, multiplied by
this package's ops. Nothing of vLLM is imported before that call.
"""


def register() -> None:
    """Register the quantization method `neuronmm`; vLLM may call it more than once."""
    from neuronmm_ops.engines.vllm.config import register_config

    register_config()
