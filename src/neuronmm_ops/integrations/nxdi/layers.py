"""Low-rank attention projections and MLPs as subclasses of NxD Inference's. Imports NxD.

A dense module of NxD Inference becomes one of these by `compress_block`: its class is changed and
the members that are low-rank are replaced, everything else stays what NxD Inference made of its
config. Factors are in the modules as the ops take them, `[K, r]` and `[r, N]`.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.integrations.nxdi.convert import padded
from neuronmm_ops.integrations.nxdi.record import COLUMNS
from neuronmm_ops.ops import mlp, svd_mlp, svd_qkv, xw
from neuronmm_ops.parallel.sharding import Divide

_parallel = import_module("neuronx_distributed.parallel_layers.layers")
_mappings = import_module("neuronx_distributed.parallel_layers.mappings")
_inference = "neuronx_distributed_inference."
_llama = import_module(_inference + "models.llama.modeling_llama")
_gqa = import_module(_inference + "modules.attention.gqa")
_lora = import_module(_inference + "modules.lora_serving.lora_module")

# The names of config.hidden_act, and the ops' own.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class CutU(_parallel.ColumnParallelLinear):
    """The factors u of a block's column layers side by side, divided by the ranks.

    Args:
        K: columns of x.
        ranks: of the members, in the order of their columns.
        dtype: of the parameter.
        group: of the ranks.
    """

    def __init__(self, K: int, ranks: Mapping[str, int], dtype: torch.dtype, group: Any) -> None:
        width = padded(sum(ranks.values()), group.size())
        super().__init__(K, width, **_column(dtype, group))
        self.weight = _operand(self.weight)
        self.ranks = dict(ranks)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return `x @ u` `[..., r]` of each member, for x `[..., K]`; one gather for all."""
        hidden = _gathered(xw(x, self.weight), self.tensor_parallel_group)
        parts = hidden.split([*self.ranks.values(), hidden.shape[-1] - sum(self.ranks.values())], -1)
        return dict(zip(self.ranks, parts, strict=False))  # the last part is padding


class WholeU(nn.ParameterDict):
    """The factors u `[K, r]` of a block's column layers, whole on every rank."""

    def __init__(self, K: int, ranks: Mapping[str, int], dtype: torch.dtype) -> None:
        super().__init__({name: _whole((K, r), dtype) for name, r in ranks.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return `x @ u` `[..., r]` of each member, for x `[..., K]`."""
        return {name: xw(x, u) for name, u in self.items()}


class CutV(_parallel.ColumnParallelLinear):
    """The factor v `[r, N]` of a row layer, divided by the ranks at N."""

    def __init__(self, r: int, N: int, bias: bool, dtype: torch.dtype, group: Any) -> None:
        super().__init__(r, padded(N, group.size()), **{**_column(dtype, group), "bias": bias})
        self.weight = _operand(self.weight)
        self.columns = N

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden @ v + bias` `[..., N]`, whole on every rank, for hidden `[..., r]`."""
        result = _gathered(xw(hidden, self.weight, self.bias), self.tensor_parallel_group)
        return result if result.shape[-1] == self.columns else result[..., : self.columns]


class WholeV(nn.Module):
    """The factor v `[r, N]` of a row layer, whole on every rank."""

    def __init__(self, r: int, N: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _whole((r, N), dtype)
        self.bias = _whole((N,), dtype) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden @ v + bias` `[..., N]` for hidden `[..., r]`."""
        return xw(hidden, self.weight, self.bias)


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
                factors = (u["gate_proj"], gate.weight, u["up_proj"], up.weight, down.weight)
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
        return self.low_rank_v(_reduced(down, partial))


class NeuronSVDQKV(_gqa.GroupQueryAttention_QKV):
    """`GroupQueryAttention_QKV` with low-rank projections, whose heads it replicates and pads."""

    def _native_qkv_forward(
        self, hidden_states: Tensor, adapter_ids: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        layers = [getattr(self, name) for name in COLUMNS["self_attn"]]
        if isinstance(self.low_rank_u, WholeU) and len(self.low_rank_u) == len(layers):
            us = self.low_rank_u.values()
            factors = [t for u, layer in zip(us, layers, strict=True) for t in (u, layer.weight)]
            widths = [layer.weight.shape[1] for layer in layers]
            biases = [layer.bias for layer in layers]
            query, key, value = svd_qkv(hidden_states, *factors, *biases).split(widths, -1)
        else:
            query, key, value = _columns(self, COLUMNS["self_attn"], hidden_states, adapter_ids)
        if self.clip_qkv is not None:
            low, high = -self.clip_qkv, self.clip_qkv
            return query.clamp(low, high), key.clamp(low, high), value.clamp(low, high)
        return query, key, value


class NeuronSVDO(_gqa.GroupQueryAttention_O):
    """`GroupQueryAttention_O` with a low-rank projection, whose heads it pads."""

    def forward(self, attention_output: Tensor, adapter_ids: Any = None) -> Tensor:
        """Return the projection `[B, S, H]` of a rank's heads `[B, S, heads * head_dim / tp]`."""
        return self.low_rank_v(_reduced(self.o_proj, xw(attention_output, self.o_proj.weight)))


def compress_layer(layer: nn.Module, ranks: Mapping[str, int], divide: Divide) -> None:
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
        options = {**_column(dtype, group), "bias": bias, "pad": True}
        setattr(module, name, _with_operand(_parallel.ColumnParallelLinear(r, size, **options)))
    if columns:
        module.low_rank_u = _u(module.hidden_size, columns, dtype, group, divide)
    if "down_proj" in ranks:
        dense, r = module.down_proj, ranks["down_proj"]
        module.down_proj = _row(dense, size, r, dtype, group, pad=True)
        bias = dense.bias is not None
        module.low_rank_v = _v(r, module.hidden_size, bias, dtype, group, divide)
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
        options = {**_column(module.dtype, group), "bias": has_bias}
        linear = _parallel.ColumnParallelLinear(r, heads * module.head_dim, **options)
        setattr(module, name, _with_operand(linear))
    module.low_rank_u = _u(module.hidden_size, columns, module.dtype, group, divide)
    module.__class__ = NeuronSVDQKV


def _compress_o(module: Any, r: int, divide: Divide) -> None:
    dense, dtype = module.o_proj, module.dtype
    group, size = dense.tensor_parallel_group, module.num_attention_heads * module.head_dim
    module.o_proj = _row(dense, size, r, dtype, group)
    module.low_rank_v = _v(r, module.hidden_size, module.bias, dtype, group, divide)
    module.bias = False  # it is low_rank_v's
    module.__class__ = NeuronSVDO


def _u(K: int, ranks: dict[str, int], dtype: torch.dtype, group: Any, divide: Divide) -> nn.Module:
    return CutU(K, ranks, dtype, group) if divide == "both" else WholeU(K, ranks, dtype)


def _v(r: int, N: int, bias: bool, dtype: torch.dtype, group: Any, divide: Divide) -> nn.Module:
    return CutV(r, N, bias, dtype, group) if divide == "both" else WholeV(r, N, bias, dtype)


def _row(
    dense: Any, K: int, r: int, dtype: torch.dtype, group: Any, pad: bool = False
) -> nn.Module:
    """The factor u `[K, r]` of a row layer in the place of a dense one."""
    linear = _parallel.RowParallelLinear(
        K,
        r,
        bias=False,
        input_is_parallel=True,
        dtype=dtype,
        sequence_parallel_enabled=dense.sequence_parallel_enabled,
        sequence_dimension=dense.sequence_dimension,
        pad=pad,
        reduce_output=False,
        tensor_model_parallel_group=group,
        reduce_dtype=dense.reduce_dtype,
    )
    return _with_operand(linear)


def _column(dtype: torch.dtype, group: Any) -> dict[str, Any]:
    return {
        "bias": False,
        "gather_output": False,
        "dtype": dtype,
        "tensor_model_parallel_group": group,
    }


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


def _reduced(layer: Any, partial: Tensor) -> Tensor:
    """Add the ranks' parts of `x @ u` `[B, S, r]`, in the layer's dtype for sums."""
    group, wide = layer.tensor_parallel_group, partial.to(layer.reduce_dtype)
    if layer.sequence_parallel_enabled:
        total = _mappings.reduce_scatter_to_sequence_parallel_region(
            wide, layer.sequence_dimension, process_group=group
        )
    else:
        total = _mappings.reduce_from_tensor_model_parallel_region(wide, process_group=group)
    return total.to(partial.dtype)


def _gathered(part: Tensor, group: Any) -> Tensor:
    return _mappings.gather_from_tensor_model_parallel_region(part, process_group=group)


def _whole(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _with_operand(linear: Any) -> Any:
    linear.weight = _operand(linear.weight)
    return linear


def _operand(weight: nn.Parameter) -> nn.Parameter:
    """Return a parallel layer's weight `[out, in]` as the ops take it, `[in, out]`.

    NxD cuts the tensor of the state dict, which stays `[out, in]`, by the parameter's attributes,
    and asks the parameter for it. NxD Inference's own function for that keeps what it once read for
    the life of the process, by its name; a second model would get the first one's weights.
    """
    transposed = torch.empty_like(weight.detach().t(), memory_format=torch.contiguous_format)
    operand = nn.Parameter(transposed, requires_grad=False)
    attributes: dict[str, Any] = vars(weight)
    operand.__dict__.update(attributes)
    operand.partition_dim = 1 - attributes["partition_dim"]  # pyright: ignore
    operand.get_tensor_from_state_dict = _transposed_weight  # pyright: ignore
    return operand


def _transposed_weight(prefix: str, state_dict: Mapping[str, Tensor]) -> Tensor:
    return state_dict[f"{prefix}weight"].t()
