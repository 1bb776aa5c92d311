"""The parts of NxD Inference that the integration uses, as far as it does; see nxd_stand_ins."""

import copy
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from nxd_stand_ins import (
    CALLS,
    GROUP,
    BaseParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    missing,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    shard,
    shard_checkpoint,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CALLS", "GROUP", "install", "modules", "shard", "shard_checkpoint"]
NXD, NXDI = "neuronx_distributed", "neuronx_distributed_inference"


# --- neuronx_distributed_inference: attention


class Heads(nn.Module):
    """Pads the heads to a multiple of tp, which either divides the key/value heads or pads them."""

    def __init__(self, hidden_size: int, head_dim: int, heads: int, kv_heads: int, dtype: Any):
        super().__init__()
        tp = GROUP.size()
        self.hidden_size, self.head_dim, self.dtype, self.tp_degree = (
            hidden_size,
            head_dim,
            dtype,
            tp,
        )
        self.num_attention_heads = heads + missing(heads, tp)
        self.num_key_value_heads = kv_heads + missing(kv_heads, tp)

    def padded(self, tensor: Tensor, dim: int, heads: int) -> Tensor:
        extra = heads * self.head_dim - tensor.shape[dim]
        return F.pad(tensor, (0,) * (2 * (tensor.dim() - 1 - dim)) + (0, extra))

    def renamed(self, state: dict[str, Tensor], old: str, new: str) -> None:
        for key in [key for key in state if old in key]:
            state[key.replace(old, new)] = state[key]


class GroupQueryAttention_QKV(Heads):  # noqa: N801
    def __init__(self, config: Any, bias: bool):
        sizes = (config.num_attention_heads, config.num_key_value_heads)
        dtype = config.neuron_config.torch_dtype
        super().__init__(config.hidden_size, config.head_dim, *sizes, dtype)
        self.fused_qkv, self.bias, self.clip_qkv = config.neuron_config.fused_qkv, bias, None
        self.tensor_model_parallel_group = GROUP
        self.sequence_parallel_enabled = config.neuron_config.sequence_parallel_enabled
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        options: dict[str, Any] = {"bias": bias, "gather_output": False, "dtype": dtype}
        if self.fused_qkv:
            self.Wqkv = ColumnParallelLinear(self.hidden_size, q + 2 * kv, **options)
            return
        self.q_proj = ColumnParallelLinear(self.hidden_size, q, **options)
        self.k_proj = ColumnParallelLinear(self.hidden_size, kv, **options)
        self.v_proj = ColumnParallelLinear(self.hidden_size, kv, **options)

    def forward(
        self,
        hidden_states: Tensor,
        rmsnorm: Any = None,
        adapter_ids: Any = None,
        residual: Any = None,
        cos_cache: Any = None,
        sin_cache: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        if self.sequence_parallel_enabled:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)
        return (*self._native_qkv_forward(hidden_states, adapter_ids), residual)

    def _native_qkv_forward(
        self, hidden_states: Tensor, adapter_ids: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert not self.fused_qkv, "the stand-in has no fused product"
        x = hidden_states
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> bool:
        prefix = prefix.rpartition(".")[0]
        outer = prefix.rpartition(".")[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            self.renamed(model_state_dict, f"{outer}.{name}", f"{prefix}.{name}")
            for leaf in ("weight", "bias") if self.bias else ("weight",):
                key = f"{prefix}.{name}.{leaf}"
                is_query = name == "q_proj"
                heads = self.num_attention_heads if is_query else self.num_key_value_heads
                model_state_dict[key] = self.padded(model_state_dict[key], 0, heads)
        return True


class GroupQueryAttention_O(Heads):  # noqa: N801
    def __init__(self, config: Any, bias: bool):
        sizes = (config.num_attention_heads, config.num_key_value_heads)
        options = config.neuron_config
        super().__init__(config.hidden_size, config.head_dim, *sizes, options.torch_dtype)
        self.bias, self.layer_name, self.out_proj_kernel_enabled = bias, "o_proj", False
        self.o_proj = RowParallelLinear(
            self.num_attention_heads * self.head_dim,
            self.hidden_size,
            bias=bias,
            input_is_parallel=True,
            dtype=self.dtype,
            sequence_parallel_enabled=options.sequence_parallel_enabled,
            sequence_dimension=1 if options.sequence_parallel_enabled else None,
            tensor_model_parallel_group=GROUP,
            reduce_dtype=options.rpl_reduce_dtype,
        )

    def forward(self, attention_output: Tensor, adapter_ids: Any = None) -> Tensor:
        return self.o_proj(attention_output)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> bool:
        prefix = prefix.rpartition(".")[0]
        outer = prefix.rpartition(".")[0]
        self.renamed(model_state_dict, f"{outer}.o_proj", f"{prefix}.o_proj")
        key = f"{prefix}.o_proj.weight"
        model_state_dict[key] = self.padded(model_state_dict[key], 1, self.num_attention_heads)
        if self.bias:
            model_state_dict[f"{prefix}.o_proj.bias"] = model_state_dict[f"{prefix}.o_proj.bias"]
        return True


class Attention(nn.Module):
    """Causal attention of a rank's heads, without positions: what stands between the layers."""

    def __init__(self, config: Any, qkv_bias: bool, o_bias: bool):
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv_proj = GroupQueryAttention_QKV(config, qkv_bias)
        self.o_proj = GroupQueryAttention_O(config, o_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key, value, _ = self.qkv_proj(hidden_states)
        query, key, value = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (query, key, value)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2), adapter_ids=None)


# --- neuronx_distributed_inference: models


class NeuronLlamaMLP(nn.Module):
    def __init__(self, config: Any, tensor_model_parallel_group: Any = None):
        super().__init__()
        self.config, self.neuron_config = config, config.neuron_config
        self.tensor_model_parallel_group = tensor_model_parallel_group
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.act_fn = {"silu": F.silu, "relu6": F.relu6}[config.hidden_act]
        options = config.neuron_config
        self.sequence_parallel_enabled = options.sequence_parallel_enabled
        self.sequence_dimension = 1 if self.sequence_parallel_enabled else None
        bias = getattr(config, "mlp_bias", False)
        column: dict[str, Any] = {"bias": bias, "gather_output": False, "pad": True}
        column |= {"dtype": options.torch_dtype}
        self.gate_proj = ColumnParallelLinear(self.hidden_size, self.intermediate_size, **column)
        self.up_proj = ColumnParallelLinear(self.hidden_size, self.intermediate_size, **column)
        self.down_proj = RowParallelLinear(
            self.intermediate_size,
            self.hidden_size,
            bias=bias,
            input_is_parallel=True,
            dtype=options.torch_dtype,
            pad=True,
            sequence_parallel_enabled=self.sequence_parallel_enabled,
            sequence_dimension=self.sequence_dimension,
            reduce_dtype=options.rpl_reduce_dtype,
        )

    def forward(
        self, x: Tensor, rmsnorm: Any = None, residual: Any = None, adapter_ids: Any = None
    ) -> tuple[Tensor, Any]:
        assert rmsnorm is None
        assert residual is None
        return self._native_mlp(x, adapter_ids=adapter_ids), None

    def _native_mlp(self, x: Tensor, adapter_ids: Any = None) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> bool:
        prefix = prefix.rpartition(".")[0]
        for name in ("gate_proj", "up_proj", "down_proj"):
            hook = getattr(self, name).preshard_hook
            hook(model_state_dict, f"{prefix}.{name}.weight")
        return True


class MultiLoraModule(nn.Module):
    """What NxD Inference wraps around a layer that adapters adapt."""

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer, self.bias = base_layer, base_layer.bias

    def forward(self, x: Tensor, adapter_ids: Any) -> Tensor:
        return self.base_layer(x) + adapter_ids


def is_lora_module(module: Any) -> bool:
    return isinstance(module, MultiLoraModule)


class DecoderLayer(nn.Module):
    def __init__(self, config: Any, qkv_bias: bool, o_bias: bool):
        super().__init__()
        self.self_attn = Attention(config, qkv_bias, o_bias)
        self.mlp = NeuronLlamaMLP(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.self_attn(hidden_states)
        return hidden_states + self.mlp(hidden_states, rmsnorm=None, adapter_ids=None)[0]


class NeuronBaseModel(nn.Module):
    def __init__(self, config: Any, optimize_inference: bool = True):
        super().__init__()
        self.config, self.neuron_config = config, config.neuron_config
        self.init_model(config)

    def init_model(self, config: Any) -> None:
        has_bias = getattr(config, "attention_bias", False)
        count = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, has_bias, has_bias) for _ in count)

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class NeuronLlamaModel(NeuronBaseModel):
    pass


class NeuronQwen3Model(NeuronBaseModel):
    pass


class NeuronBaseForCausalLM(nn.Module):
    _model_cls: Any = None

    def __init__(self, model_path: str, config: Any = None, neuron_config: Any = None):
        super().__init__()
        self.validate_config(config)
        self.config, self.model_path = config, model_path

    @classmethod
    def validate_config(cls, config: Any) -> None:
        assert config.neuron_config is not None

    @classmethod
    def get_state_dict(cls, model_name_or_path: str, config: Any) -> dict[str, Tensor]:
        found = load_file(f"{model_name_or_path}/model.safetensors")
        state = {name.removeprefix("model."): tensor for name, tensor in found.items()}
        return cls.convert_hf_to_neuron_state_dict(state, config)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: dict[str, Tensor], config: Any
    ) -> dict[str, Tensor]:
        if config.neuron_config.fused_qkv:
            for index in range(config.num_hidden_layers):
                prefix = f"layers.{index}.self_attn"
                names = [f"{prefix}.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
                parts = [state_dict.pop(name) for name in names]
                state_dict[f"{prefix}.Wqkv.weight"] = torch.cat(parts)
        prefixes = ("layers.",)
        return {name: t for name, t in state_dict.items() if name.startswith(prefixes)}


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronLlamaModel


class NeuronQwen3ForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronQwen3Model


class NeuronConfig:
    """The options that the integration reads, with NxD Inference's defaults."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "tp_degree": 1,
            "seq_len": 128,
            "on_cpu": False,
            "cp_degree": 1,
            "mlp_cp_degree": 1,
            "attention_dp_degree": 1,
            "torch_dtype": torch.bfloat16,
            "rpl_reduce_dtype": None,
            "fused_qkv": False,
            "sequence_parallel_enabled": False,
            "lora_config": None,
            "quantized": False,
            "qkv_kernel_enabled": False,
            "qkv_nki_kernel_enabled": False,
            "qkv_kernel_fuse_residual_add": False,
            "out_proj_kernel_enabled": False,
            "attn_block_tkg_nki_kernel_enabled": False,
            "mlp_kernel_enabled": False,
            "quantized_mlp_kernel_enabled": False,
            "activation_quantization_type": None,
            "is_eagle_draft": False,
            "padded_hidden_size": None,
        }
        assert set(options) <= set(defaults), set(options) - set(defaults)
        vars(self).update({**defaults, **options})


class InferenceConfig:
    """What is in config.json, and the `neuron_config`."""

    def __init__(self, neuron_config: NeuronConfig, **fields: Any) -> None:
        vars(self).update(copy.deepcopy(fields))
        self.neuron_config = neuron_config


# --- modules


def modules() -> dict[str, types.ModuleType]:
    """The stand-ins by the names of NxD's modules."""
    layers = (ColumnParallelLinear, RowParallelLinear, BaseParallelLinear)
    mappings = (
        reduce_from_tensor_model_parallel_region,
        gather_from_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    llama, qwen3 = (NeuronLlamaMLP, NeuronLlamaForCausalLM), (NeuronQwen3ForCausalLM,)
    contents: dict[str, tuple[Any, ...]] = {
        f"{NXD}.parallel_layers.layers": layers,
        f"{NXD}.parallel_layers.mappings": mappings,
        f"{NXDI}.models.llama.modeling_llama": llama,
        f"{NXDI}.models.qwen3.modeling_qwen3": qwen3,
        f"{NXDI}.modules.attention.gqa": (GroupQueryAttention_QKV, GroupQueryAttention_O),
        f"{NXDI}.modules.lora_serving.lora_module": (is_lora_module,),
        f"{NXDI}.utils.constants": (),
        f"{NXDI}.inference_demo": (),
    }
    found: dict[str, types.ModuleType] = {}
    for path, members in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        for member in members:
            setattr(found[path], member.__name__, member)
    for name, module in found.items():
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
    # Two tables, as in the source.
    for path in ("utils.constants", "inference_demo"):
        llamas = {"causal-lm": NeuronLlamaForCausalLM}
        found[f"{NXDI}.{path}"].MODEL_TYPES = {"llama": llamas}  # pyright: ignore
    return found


def install() -> None:
    """Make the stand-ins importable in this process, for good: for the process of a rank."""
    sys.modules.update(modules())
