"""The factory that vLLM's registry calls, as the engine's own factories are made.

It refuses what cannot be served with one line, before a weight is read.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from neuroncore.hardware import instance_type
from neuronmm_ops.checkpoint import check_tensors, inspect_headers, read_config
from neuronmm_ops.engines.vllm_neuron import engine
from neuronmm_ops.engines.vllm_neuron.launch import Kernels
from neuronmm_ops.engines.vllm_neuron.model import put_low_rank_
from neuronmm_ops.engines.vllm_neuron.weights import check_loading_
from neuronmm_ops.parallel.sharding import check_heads

FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose blocks in the engine are as `put_low_rank_` expects."""

ONE_RANK_ENDS = "trn2.48xlarge"
"""The instance type on which a single rank of the engine ends in a segmentation fault."""


class NeuronMMForCausalLM(nn.Module):
    """A compressed Llama or Qwen3: the engine's own model with low-rank layers.

    The engine calls `from_configs` alone. The rest is what vLLM asks of an architecture's class
    before it takes it for one that generates text (`vllm.model_executor.models.interfaces_base`).

    Args:
        vllm_config: vLLM's whole configuration.
        prefix: unused: the model is no part of another.
    """

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.model: Any = self.from_configs(vllm_config.model_config.hf_config, None)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embed tokens `[T]` as `[T, K]`."""
        return self.model.model.embed_tokens(input_ids)

    def forward(self, input_ids: Tensor, positions: Tensor, **kwargs: Any) -> Any:
        """Call the engine's model, which returns logits, or tokens where it samples."""
        return self.model(input_ids, positions, **kwargs)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return what `forward` did: the engine's models end with logits."""
        return hidden_states

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any) -> nn.Module:
        """Return the engine's model with empty parameters, which its `load_weights` fills.

        Raises:
            CheckpointError: the checkpoint is not compressed, of another format or damaged.
            ValueError: its architecture, dtype or biases are not served here, the ranks do not
                divide the heads, or an option of the engine asks for another division.
            ImportError, RuntimeError: see `Kernels`.
        """
        directory = Path(engine.model_path())
        report, headers = inspect_headers(directory)
        check_tensors(headers, report.layers)
        config = read_config(directory)
        family = _family(config, directory)
        _check(hf_config, neuron_config)
        group, can_run = engine.tp_group(), engine.kernel_test()
        check_heads(hf_config.num_attention_heads, _kv_heads(hf_config), group.world_size)
        if can_run("neuron"):
            _check_device(hf_config.num_attention_heads, group.world_size)
        model = _factory(family).from_configs(_dense(hf_config, config, family), neuron_config)
        layers = {layer.name: layer for layer in report.layers}
        kernels = Kernels(can_run)
        put_low_rank_(model, layers, headers, group, kernels)
        check_loading_(model)
        return model


def _dense(hf_config: Any, config: Mapping[str, Any], family: str) -> Any:
    """What the engine's factory is to read, from the server's and the checkpoint's own config.

    The engine would take the record for a quantization that it does not know. Its Qwen3 reads
    `rope_theta`, which Transformers 5 writes into `rope_parameters`, takes its own where there is
    none, and knows no other rotation.
    """
    made = copy.deepcopy(hf_config)
    vars(made).pop("quantization_config", None)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is not None:
        made.rope_theta = theta
    kind = rope.get("rope_type", "default")
    if family != "LlamaForCausalLM" and kind != "default":
        raise ValueError(f"rope_type must be default in vLLM-Neuron's {family}, got {kind!r}")
    return made


def _family(config: Mapping[str, Any], directory: Path) -> str:
    """The architecture in the checkpoint's own config: the server's was overridden."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"architectures must be [{'] or ['.join(FAMILIES)}] for vLLM-Neuron, "
            f"{directory / 'config.json'} has {architectures!r:.80}"
        )
    return name


def _factory(family: str) -> Any:
    factories = engine.factories()
    if family not in factories:
        raise ValueError(
            f"the installed vllm-neuron must serve {family}, it has {', '.join(factories)}; "
            "install a later one"
        )
    return factories[family]


def _kv_heads(hf_config: Any) -> int:
    kv_heads = getattr(hf_config, "num_key_value_heads", None)
    return hf_config.num_attention_heads if kv_heads is None else kv_heads


def _check_device(heads: int, tp: int) -> None:
    """Refuse ranks with which the engine's own kernels end without a message."""
    if heads // tp % 2:
        raise ValueError(
            f"a rank must have an even number of heads in vLLM-Neuron's decode kernel, got {heads} "
            f"heads and tp = {tp}; use another --tensor-parallel-size"
        )
    if tp == 1 and instance_type() == ONE_RANK_ENDS:
        raise ValueError(
            f"vLLM-Neuron must have two ranks or more on {ONE_RANK_ENDS}, where one ends in a "
            "segmentation fault, got tp = 1; use --tensor-parallel-size 2 or more"
        )


def _check(hf_config: Any, neuron_config: Any) -> None:
    """Refuse what the low-rank layers do not compute."""
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(hf_config, name, False):
            raise ValueError(f"{name} must be false in vLLM-Neuron's model, config.json has true")
    if getattr(hf_config, "hidden_act", "silu") != "silu":
        raise ValueError(
            f"hidden_act must be silu in vLLM-Neuron's model, got {hf_config.hidden_act!r}"
        )
    allowed = {
        "attention_dp_size": (1,),
        "mlp_dp_size": (1,),
        "apply_prefill_dcp": (False,),
        "quantization": (None, "bf16"),
    }
    for name, values in allowed.items():
        value = getattr(neuron_config, name, values[0])
        if value not in values:
            raise ValueError(
                f"neuron_config.{name} must be {values[0]!r} with low-rank layers, got {value!r}; "
                "leave it out"
            )
