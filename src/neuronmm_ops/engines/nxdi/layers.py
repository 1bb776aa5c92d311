"""Low-rank attention projections and MLPs as subclasses of NxD Inference's. Imports NxD.

A dense module of NxD Inference becomes one of these by `compress_layer`: its class is changed and
the members that are low-rank are replaced, everything else stays what NxD Inference made of its
config. torch changes the class of a module in the same way, to parametrize or shard it.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from neuronmm_ops.engines.nxdi.factors import (
    WholeU,
    column_u,
    column_v,
    reduced,
    row_u,
    row_v,
)
from neuronmm_ops.engines.nxdi.record import COLUMNS
from neuronmm_ops.ops import mlp, svd_mlp, svd_qkv, xw
from neuronmm_ops.parallel.sharding import Divide

_mappings = import_module("neuronx_distributed.parallel_layers.mappings")
_inference = "neuronx_distributed_inference."
_llama = import_module(_inference + "models.llama.modeling_llama")
_gqa = import_module(_inference + "modules.attention.gqa")
_lora = import_module(_inference + "modules.lora_serving.lora_module")

# The names of config.hidden_act, and the ops' own.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class NeuronSVDMLP(_llama.NeuronLlamaMLP):
    """`NeuronLlamaMLP` with low-rank projections; forward and its result are that class's."""

    def _native_mlp(self, x: Tensor, adapter_ids: Any = None) -> Tensor:
        group = self.group
        if self.sequence_parallel_enabled:
            x = _mappings.gather_from_sequence_parallel_region(
                x, self.sequence_dimension, process_group=group
            )
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        activation = _ACTIVATIONS.get(self.config.hidden_act)
        biases = (gate.bias, up.bias, down.bias) if self.is_low_rank else ()
        if self.is_low_rank and activation and biases == (None, None, None):
            u, v = self.low_rank_u, self.low_rank_v
            if group.size() == 1 and v.bias is None:
                factors = (u.gate_proj, gate.weight, u.up_proj, up.weight, down.weight)
                return svd_mlp(x, *factors, v.weight, activation)
            hidden = u(x)
            weights = (gate.weight, up.weight, down.weight)
            partial = mlp(hidden["gate_proj"], *weights, hidden["up_proj"], activation)
        else:
            gated, raised = _columns(self, COLUMNS["mlp"], x, adapter_ids)
            inner = self.act_fn(gated) * raised
            if not hasattr(self, "low_rank_v"):
                return _dense(down, inner, adapter_ids)
            partial = xw(inner, down.weight)
        return self.low_rank_v(reduced(down, partial))


class NeuronSVDQKV(_gqa.GroupQueryAttention_QKV):
    """`GroupQueryAttention_QKV` with low-rank projections, whose heads it replicates and pads."""

    def _native_qkv_forward(
        self, hidden_states: Tensor, adapter_ids: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        names, u = COLUMNS["self_attn"], self.low_rank_u
        if isinstance(u, WholeU) and len(u.ranks) == len(names):
            layers = [getattr(self, name) for name in names]
            pairs = zip(names, layers, strict=True)
            factors: list[Any] = [t for name, v in pairs for t in (u.get_parameter(name), v.weight)]
            widths = [layer.weight.shape[1] for layer in layers]
            biases: list[Any] = [layer.bias for layer in layers]
            query, key, value = svd_qkv(hidden_states, *factors, *biases).split(widths, -1)
        else:
            query, key, value = _columns(self, names, hidden_states, adapter_ids)
        if self.clip_qkv is not None:
            low, high = -self.clip_qkv, self.clip_qkv
            return query.clamp(low, high), key.clamp(low, high), value.clamp(low, high)
        return query, key, value


class NeuronSVDO(_gqa.GroupQueryAttention_O):
    """`GroupQueryAttention_O` with a low-rank projection, whose heads it pads."""

    def forward(self, attention_output: Tensor, adapter_ids: Any = None) -> Tensor:
        """Return the projection `[B, S, H]` of a rank's heads `[B, S, heads * head_dim / tp]`."""
        return self.low_rank_v(reduced(self.o_proj, xw(attention_output, self.o_proj.weight)))


def compress_layer(layer: Any, ranks: Mapping[str, int], divide: Divide) -> None:
    """Make the low-rank members of one of NxD Inference's decoder layers low-rank, in place.

    Args:
        layer: with `mlp`, and `self_attn` with `qkv_proj` and `o_proj`.
        ranks: by the names in the layer, such as `mlp.gate_proj`.
        divide: which factors ranks divide.
    """
    own = {block: _of_block(block, ranks) for block in ("self_attn", "mlp")}
    if own["mlp"]:
        _compress_mlp(layer.mlp, own["mlp"], divide)
    attention = own["self_attn"]
    row = attention.pop("o_proj", None)
    if attention:
        _compress_qkv(layer.self_attn.qkv_proj, attention, divide)
    if row is not None:
        _compress_o(layer.self_attn.o_proj, row, divide)


def _of_block(block: str, ranks: Mapping[str, int]) -> dict[str, int]:
    return {n.removeprefix(f"{block}."): r for n, r in ranks.items() if n.startswith(f"{block}.")}


def _compress_mlp(module: Any, ranks: dict[str, int], divide: Divide) -> None:
    dtype, group = module.neuron_config.torch_dtype, module.down_proj.tensor_parallel_group
    columns = {name: ranks[name] for name in COLUMNS["mlp"] if name in ranks}
    size = module.intermediate_size
    for name, r in columns.items():
        bias = getattr(module, name).bias is not None
        setattr(module, name, column_v(r, size, bias, dtype, group, pad=True))
    if columns:
        module.low_rank_u = column_u(module.hidden_size, columns, dtype, group, divide)
    if "down_proj" in ranks:
        dense, r = module.down_proj, ranks["down_proj"]
        module.down_proj = row_u(dense, size, r, dtype, pad=True)
        bias = dense.bias is not None
        module.low_rank_v = row_v(r, module.hidden_size, bias, dtype, group, divide)
    module.group, module.is_low_rank = group, len(ranks) == 3
    module.__class__ = NeuronSVDMLP


def _compress_qkv(module: Any, ranks: dict[str, int], divide: Divide) -> None:
    # A parent class's fused weight goes: low-rank members share one product and one gather anyway.
    if module.fused_qkv:
        group, has_bias = module.Wqkv.tensor_parallel_group, module.Wqkv.bias is not None
        del module.Wqkv
        module.fused_qkv = False
    else:
        group = module.q_proj.tensor_parallel_group
        has_bias = module.q_proj.bias is not None
    columns = {name: ranks[name] for name in COLUMNS["self_attn"] if name in ranks}
    for name, r in columns.items():
        heads = module.num_attention_heads if name == "q_proj" else module.num_key_value_heads
        size = heads * module.head_dim
        setattr(module, name, column_v(r, size, has_bias, module.dtype, group))
    module.low_rank_u = column_u(module.hidden_size, columns, module.dtype, group, divide)
    module.__class__ = NeuronSVDQKV


def _compress_o(module: Any, r: int, divide: Divide) -> None:
    dense, dtype = module.o_proj, module.dtype
    group, size = dense.tensor_parallel_group, module.num_attention_heads * module.head_dim
    module.o_proj = row_u(dense, size, r, dtype)
    module.low_rank_v = row_v(r, module.hidden_size, module.bias, dtype, group, divide)
    module.bias = False  # it is low_rank_v's
    module.__class__ = NeuronSVDO


def _columns(module: Any, names: tuple[str, ...], x: Tensor, adapter_ids: Any) -> list[Tensor]:
    """Call a block's column layers, low-rank or dense, one by one."""
    hidden = module.low_rank_u(x) if hasattr(module, "low_rank_u") else {}
    results: list[Tensor] = []
    for name in names:
        layer = getattr(module, name)
        if name in hidden:
            results.append(xw(hidden[name], layer.weight, layer.bias))
        else:
            results.append(_dense(layer, x, adapter_ids))
    return results


def _dense(layer: Any, x: Tensor, adapter_ids: Any) -> Tensor:
    return layer(x, adapter_ids) if _lora.is_lora_module(layer) else layer(x)
