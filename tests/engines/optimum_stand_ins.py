"""The parts of optimum-neuron that the adapter uses, as far as it does; see nxd_stand_ins.

Signatures are those of huggingface/optimum-neuron 0.4.6.dev4: forward methods without adapters,
classes that are given `neuron_config` beside `config`, `fused_qkv` by default.
"""

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import nxdi_stand_ins as nxdi
import torch
from nxd_stand_ins import GROUP, ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn import functional as F

REGISTERED: dict[tuple[str, str], Any] = {}
ROOT = "optimum.neuron.models.inference"


class NxDNeuronConfig:
    """The options that the adapter reads, with optimum-neuron's defaults."""

    def __init__(
        self,
        sequence_length: int | None = 128,
        tp_degree: int | None = 1,
        torch_dtype: Any = torch.bfloat16,
        fused_qkv: bool | None = True,
    ) -> None:
        self.sequence_length, self.tp_degree = sequence_length, tp_degree
        self.torch_dtype, self.fused_qkv = torch_dtype, fused_qkv


class QKV(nxdi.Heads):
    """`GroupQueryAttention_QKV`."""

    preshard_hook = nxdi.GroupQueryAttention_QKV.preshard_hook

    def __init__(self, config: Any, neuron_config: Any, bias: bool) -> None:
        sizes = (config.head_dim, config.num_attention_heads, config.num_key_value_heads)
        super().__init__(config.hidden_size, *sizes, neuron_config.torch_dtype)
        self.fused_qkv, self.bias, self.clip_qkv = neuron_config.fused_qkv, bias, None
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        options: dict[str, Any] = {"bias": bias, "gather_output": False, "dtype": self.dtype}
        names = (
            {"Wqkv": q + 2 * kv} if self.fused_qkv else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        )
        for name, size in names.items():
            setattr(self, name, ColumnParallelLinear(self.hidden_size, size, **options))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert not self.fused_qkv, "the stand-in has no fused product"
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)


class O(nxdi.Heads):  # noqa: E742
    """`GroupQueryAttention_O`."""

    preshard_hook = nxdi.GroupQueryAttention_O.preshard_hook

    def __init__(self, config: Any, neuron_config: Any, bias: bool) -> None:
        sizes = (config.head_dim, config.num_attention_heads, config.num_key_value_heads)
        super().__init__(config.hidden_size, *sizes, neuron_config.torch_dtype)
        self.bias = bias
        self.o_proj = RowParallelLinear(
            self.num_attention_heads * self.head_dim,
            self.hidden_size,
            bias=bias,
            input_is_parallel=True,
            dtype=self.dtype,
            reduce_dtype=None,
        )

    def forward(self, attention_output: Tensor) -> Tensor:
        return self.o_proj(attention_output)


class Attention(nn.Module):
    def __init__(self, config: Any, neuron_config: Any) -> None:
        super().__init__()
        bias = getattr(config, "attention_bias", False)
        self.head_dim = config.head_dim
        self.qkv_proj, self.o_proj = (kind(config, neuron_config, bias) for kind in (QKV, O))

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key, value = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in self.qkv_proj(hidden_states=hidden_states)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class NeuronLlamaMLP(nn.Module):
    def __init__(self, config: Any, neuron_config: Any) -> None:
        super().__init__()
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.act_fn = {"silu": F.silu, "relu6": F.relu6}[config.hidden_act]
        options: dict[str, Any] = {"bias": getattr(config, "mlp_bias", False), "pad": True}
        options["dtype"] = neuron_config.torch_dtype
        sizes, column = (self.hidden_size, self.intermediate_size), {"gather_output": False}
        self.gate_proj = ColumnParallelLinear(*sizes, **options, **column)
        self.up_proj = ColumnParallelLinear(*sizes, **options, **column)
        self.down_proj = RowParallelLinear(
            *sizes[::-1], **options, input_is_parallel=True, reduce_dtype=neuron_config.torch_dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, neuron_config: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config, neuron_config)
        self.mlp = NeuronLlamaMLP(config, neuron_config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.self_attn(hidden_states)
        return hidden_states + self.mlp(hidden_states)


class NxDLlamaModel(nn.Module):
    def __init__(self, config: Any, neuron_config: Any) -> None:
        super().__init__()
        self.config, self.neuron_config = config, neuron_config
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([DecoderLayer(config, neuron_config) for _ in count])

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class LlamaNxDModelForCausalLM:
    _model_cls: Any = NxDLlamaModel

    @classmethod
    def create_graph_builders(cls, config: Any, neuron_config: Any) -> dict[str, Any]:
        return {"model": lambda: cls._model_cls(config, neuron_config)}

    def checkpoint_loader_fn(self, path: Any, config: Any, neuron_config: Any) -> dict[str, Tensor]:
        """Cast floats, one-byte ones too."""
        state, dtype = self.get_state_dict(path, config, neuron_config), neuron_config.torch_dtype
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}

    @classmethod
    def get_state_dict(cls, model_path: str, config: Any, neuron_config: Any) -> dict[str, Tensor]:
        found = nxdi.load_file(f"{model_path}/model.safetensors")
        state = {name.removeprefix("model."): tensor for name, tensor in found.items()}
        return cls.convert_hf_to_neuron_state_dict(state, config, neuron_config)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, Tensor], config: Any, neuron_config: Any
    ) -> dict[str, Tensor]:
        if neuron_config.fused_qkv:
            for index in range(config.num_hidden_layers):
                prefix = f"layers.{index}.self_attn"
                names = [f"{prefix}.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
                state_dict[f"{prefix}.Wqkv.weight"] = torch.cat([state_dict[n] for n in names])
                for name in names:
                    del state_dict[name]
        return state_dict


class Qwen2NxDModelForCausalLM(LlamaNxDModelForCausalLM):
    pass


class Qwen3NxDModelForCausalLM(LlamaNxDModelForCausalLM):
    pass


def register_neuron_model_for_inference(model_type: str, task: str) -> Any:
    def wrapper(cls: Any) -> Any:
        REGISTERED[model_type, task] = cls
        return cls

    return wrapper


def modules() -> dict[str, types.ModuleType]:
    """The stand-ins by the names of optimum-neuron's modules, and those of NxD."""
    families = (LlamaNxDModelForCausalLM, Qwen2NxDModelForCausalLM, Qwen3NxDModelForCausalLM)
    contents: dict[str, tuple[Any, ...]] = {
        f"{ROOT}.{name}.modeling_{name}": (family,)
        for name, family in zip(("llama", "qwen2", "qwen3"), families, strict=True)
    }
    contents[f"{ROOT}.auto_models"] = (register_neuron_model_for_inference,)
    contents["optimum.exporters.neuron.__main__"] = ()
    found = {name: m for name, m in nxdi.modules().items() if name.startswith(nxdi.NXD + ".")}
    found[nxdi.NXD] = types.ModuleType(nxdi.NXD)
    for path, members in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        for member in members:
            setattr(found[path], member.__name__, member)
    for name, module in found.items():
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
    return found


def install() -> None:
    """Make the stand-ins importable in this process, for good: for the process of a rank."""
    sys.modules.update(modules())


__all__ = ["GROUP", "NxDNeuronConfig", "install", "modules"]
