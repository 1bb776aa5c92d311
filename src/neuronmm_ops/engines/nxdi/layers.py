"""Low-rank attention projections and MLPs as subclasses of an engine's on NxD. Imports NxD.

A module of NxD Inference or optimum-neuron becomes one of these by `compress_layer`: its class is
changed and the members that the record lists are replaced, everything else stays what the engine
made of its config. torch changes the class of a module in the same way, to parametrize or shard it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import DenseMember, Member, Pair
from neuronmm_ops.engines.nxdi.record import BITS
from neuronmm_ops.engines.places import COLUMNS, ROWS, ColumnSection, Shard
from neuronmm_ops.engines.products import columns, first, gated_mlp, row
from neuronmm_ops.parallel.sharding import Divide, Kind

_parallel = import_module("neuronx_distributed.parallel_layers.layers")
_mappings = import_module("neuronx_distributed.parallel_layers.mappings")

# The names of config.hidden_act, and the ops' own.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
# What of an engine's class is replaced: the first of these methods that it has.
_METHODS = {
    "MLP": {"_native_mlp": ("x", "adapter_ids"), "forward": ("x",)},
    "QKV": {
        "_native_qkv_forward": ("hidden_states", "adapter_ids"),
        "forward": ("hidden_states",),
    },
    "O": {"forward": ("attention_output",)},
}


class NxdRanks:
    """A group of NxD's, as a dense row layer of the block uses it.

    Args:
        row_layer: NxD's RowParallelLinear.
    """

    def __init__(self, row_layer: Any) -> None:
        self.group = row_layer.tensor_parallel_group
        self.reduce_dtype = row_layer.reduce_dtype
        is_divided = getattr(row_layer, "sequence_parallel_enabled", False)
        self.sequence_dim = row_layer.sequence_dimension if is_divided else None

    @property
    def size(self) -> int:
        """How many they are."""
        return self.group.size()

    @property
    def own_tokens(self) -> bool:
        """Whether each has its own tokens outside of the block."""
        return self.sequence_dim is not None

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors in the last dimension."""
        assert dim == -1
        return _mappings.gather_from_tensor_model_parallel_region(x, process_group=self.group)

    def add(self, x: Tensor) -> Tensor:
        """Add the ranks' tensors, in the engine's dtype for sums."""
        wide = x.to(self.reduce_dtype)
        if self.sequence_dim is None:
            total = _mappings.reduce_from_tensor_model_parallel_region(
                wide, process_group=self.group
            )
        else:
            total = _mappings.reduce_scatter_to_sequence_parallel_region(
                wide, self.sequence_dim, process_group=self.group
            )
        return total.to(x.dtype)


class NxdPair(Pair, _parallel.BaseParallelLinear):
    """A pair whose parts NxD gives to ranks."""

    along_contraction = False


class NxdDense(DenseMember, _parallel.BaseParallelLinear):
    """A dense member in a storage, whose parts NxD gives to ranks."""

    along_contraction = False


class BlockMLP(nn.Module):
    """What an engine's gated MLP does with low-rank projections."""

    ranks: NxdRanks
    act_fn: Callable[[Tensor], Tensor]
    activation: str | None

    def product(self, x: Tensor, adapter_ids: Any = None) -> Tensor:
        """Map x `[B, S, K]` to the MLP's result."""
        ranks, act = self.ranks, self.activation or self.act_fn
        if ranks.sequence_dim is not None:
            x = _mappings.gather_from_sequence_parallel_region(
                x, ranks.sequence_dim, process_group=ranks.group
            )
        layers = [self.get_submodule(name) for name in (*COLUMNS["mlp"], ROWS["mlp"])]
        gate, up, down = layers
        members = [each for each in layers if isinstance(each, Member)]
        if len(members) == 3:
            return gated_mlp(x, members[0], members[1], members[2], ranks, act)
        gated, raised = _columns((gate, up), x, ranks, adapter_ids)
        inner = self.act_fn(gated) * raised
        if not isinstance(down, Member):
            return _dense(down, inner, adapter_ids)
        return _finished(down, first(down, inner), ranks)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> bool:
        """Make the block's tensors of the checkpoint's, each rank's part after another's."""
        path = prefix.rpartition(".")[0]
        for name in (*COLUMNS["mlp"], ROWS["mlp"]):
            module: Any = self.get_submodule(name)
            if isinstance(module, Member):
                tensors = _taken(module, model_state_dict, f"{path}.{name}")
                _put(module, tensors, model_state_dict, f"{path}.{name}")
            else:
                for leaf in _leaves(module):
                    module.preshard_hook(model_state_dict, f"{path}.{name}.{leaf}")
        return True


class BlockQKV(nn.Module):
    """What an engine's projections to queries, keys and values do; it replicates and pads heads."""

    ranks: NxdRanks
    clip_qkv: float | None

    def product(
        self, hidden_states: Tensor, adapter_ids: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map x `[B, S, K]` to the rank's queries, keys and values."""
        layers = [self.get_submodule(name) for name in COLUMNS["self_attn"]]
        pairs = [each for each in layers if isinstance(each, Pair) and not each.place.gathers]
        if len(pairs) == len(layers) and len({pair.precision for pair in pairs}) == 1:
            factors = [t for pair in pairs for t in (pair.u, pair.v)]
            scales = [t for pair in pairs for t in (pair.u_scale, pair.v_scale)]
            operands = (*factors, *[pair.bias for pair in pairs], *scales, pairs[0].compute)
            made = pairs[0].run("svd_qkv", hidden_states, *operands)
            query, key, value = made.split([pair.width for pair in pairs], -1)
        else:
            query, key, value = _columns(layers, hidden_states, self.ranks, adapter_ids)
        clip = self.clip_qkv
        if clip is not None:
            return query.clamp(-clip, clip), key.clamp(-clip, clip), value.clamp(-clip, clip)
        return query, key, value

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> bool:
        """Make the tensors of the checkpoint's, whose heads the engine's own hook replicates."""
        path = prefix.rpartition(".")[0]
        outer = path.rpartition(".")[0]
        layers = {name: self.get_submodule(name) for name in COLUMNS["self_attn"]}
        states = {n: _taken(each, model_state_dict, f"{outer}.{n}") for n, each in layers.items()}
        parent: Any = super()
        sizes: dict[str, int] = {}
        for keys in (("v", "w", "weight"), ("v_scale", "w_scale"), ("bias",)):
            key_of = {name: next((k for k in keys if k in states[name]), None) for name in layers}
            if not any(key_of.values()):
                continue
            rows: dict[str, Tensor] = {}
            for name, key in key_of.items():
                tensor = torch.zeros(sizes[name]) if key is None else states[name][key]
                rows[f"{outer}.{name}.weight"] = _as_rows(key, tensor)
                sizes.setdefault(name, len(_as_rows(key, tensor)))
            parent.preshard_hook(rows, prefix)
            for name, key in key_of.items():
                if key is not None:
                    heads = rows[f"{path}.{name}.weight"]
                    is_vector = states[name][key].dim() == 1
                    states[name][key] = heads[:, 0] if is_vector else _as_rows(key, heads)
        for name, layer in layers.items():
            _put(layer, states[name], model_state_dict, f"{path}.{name}")
        return True


class BlockO(nn.Module):
    """What an engine's projection of attention's output does; it pads heads."""

    ranks: NxdRanks

    def product(self, attention_output: Tensor, adapter_ids: Any = None) -> Tensor:
        """Return the projection `[B, S, K]` of a rank's heads `[B, S, heads * head_dim / tp]`."""
        member: Any = self.get_submodule(ROWS["self_attn"])
        return _finished(member, first(member, attention_output), self.ranks)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> bool:
        """Make the tensors of the checkpoint's, whose heads the engine's own hook pads."""
        path, name = prefix.rpartition(".")[0], ROWS["self_attn"]
        outer = path.rpartition(".")[0]
        member: Any = self.get_submodule(name)
        tensors = _taken(member, model_state_dict, f"{outer}.{name}")
        key = "u" if "u" in tensors else "w"
        heads = {f"{outer}.{name}.weight": tensors[key].t().contiguous()}
        parent: Any = super()
        parent.preshard_hook(heads, prefix)
        tensors[key] = heads[f"{path}.{name}.weight"].t()
        _put(member, tensors, model_state_dict, f"{path}.{name}")
        return True


def compress_layer(
    layer: Any, records: Mapping[str, LayerReport], divide: Divide, hidden_act: str
) -> None:
    """Put a decoder layer's recorded members in place of the engine's, and change its classes.

    Args:
        layer: with `mlp`, and `self_attn` with `qkv_proj` and `o_proj`.
        records: by the names in the layer, such as `mlp.gate_proj`.
        divide: which factors ranks divide.
        hidden_act: the config's.
    """
    attention, row_layer = layer.self_attn, layer.self_attn.o_proj.o_proj
    by_name = {name.partition(".")[2]: record for name, record in records.items()}
    ranks = NxdRanks(row_layer)
    if any(name in by_name for name in COLUMNS["self_attn"]):
        _compress_qkv(attention.qkv_proj, by_name, divide, ranks)
    if "o_proj" in by_name:
        module = attention.o_proj
        K = module.num_attention_heads * module.head_dim
        options = (divide, ranks, module.dtype, module.bias)
        module.o_proj = _member(replace(by_name["o_proj"], K=K), "row", *options)
        _become(module, "O", BlockO, ranks)
    if any(name.startswith("mlp.") for name in records):
        module, ranks = layer.mlp, NxdRanks(layer.mlp.down_proj)
        for name in (*COLUMNS["mlp"], ROWS["mlp"]):
            if name in by_name:
                dense, kind = getattr(module, name), "row" if name == ROWS["mlp"] else "column"
                options = (divide, ranks, dense.weight.dtype, dense.bias is not None)
                setattr(module, name, _member(by_name[name], kind, *options))
        _become(module, "MLP", BlockMLP, ranks)
        module.activation = _ACTIVATIONS.get(hidden_act)


def _compress_qkv(
    module: Any, records: Mapping[str, LayerReport], divide: Divide, ranks: NxdRanks
) -> None:
    # A fused weight goes: low-rank members share one gather anyway.
    bias = (module.Wqkv if module.fused_qkv else module.q_proj).bias is not None
    for name in COLUMNS["self_attn"]:
        heads = module.num_attention_heads if name == "q_proj" else module.num_key_value_heads
        size = heads * module.head_dim
        if name in records:
            options = (divide, ranks, module.dtype, bias)
            setattr(module, name, _member(replace(records[name], N=size), "column", *options))
        elif module.fused_qkv:
            options = {"bias": bias, "gather_output": False, "dtype": module.dtype}
            options["tensor_model_parallel_group"] = ranks.group
            dense = _parallel.ColumnParallelLinear(module.hidden_size, size, **options)
            setattr(module, name, dense)
    if module.fused_qkv:
        del module.Wqkv
        module.fused_qkv = False
    _become(module, "QKV", BlockQKV, ranks)


def _member(
    record: LayerReport,
    kind: Kind,
    divide: Divide,
    ranks: NxdRanks,
    dtype: torch.dtype,
    bias: bool,
) -> Member:
    """A member whose parameters say to NxD that each rank has a part of a stack of all ranks'."""
    tp = ranks.size
    sections = [ColumnSection(record.N, tp if kind == "column" else 1)]
    made = NxdDense if record.r is None else NxdPair
    member = made(record, Shard(kind, divide, 0, tp), sections, dtype, bias=bias)
    for key in member.shapes:
        if member.dims[key] is not None:
            for name, value in _STACKED.items():
                setattr(getattr(member, key), name, value)
            getattr(member, key).num_partitions = tp
    return member


_STACKED: dict[str, object] = {
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "partition_stride": 1,
    "rank_ordering": None,
}


def _become(module: Any, kind: str, block: type[nn.Module], ranks: NxdRanks) -> None:
    """Change a module's class to one that computes with members."""
    module.ranks, module.bias = ranks, False  # members have their own
    module.__class__ = _subclass(kind, block, type(module))


@cache
def _subclass(kind: str, block: Any, base: type[nn.Module]) -> type[nn.Module]:
    for name, expected in _METHODS[kind].items():
        method = getattr(base, name, None)
        if method is not None:
            parameters = tuple(signature(method).parameters)[1:]
            if parameters[: len(expected)] != expected:
                raise ImportError(
                    f"{base.__name__}.{name} must take {', '.join(expected)}, the installed "
                    f"{base.__module__.partition('.')[0]} has {', '.join(parameters)}; install a "
                    "version that docs/nxdi.md names"
                )
            members = {name: block.product, "__module__": __name__}
            return type(f"NeuronSVD{kind}", (block, base), members)
    raise AssertionError(f"every module has a method forward, {base} has none")


# --- products ------------------------------------------------------------------------------------


def _columns(
    layers: Sequence[nn.Module], x: Tensor, ranks: NxdRanks, adapter_ids: Any
) -> list[Tensor]:
    """Call a block's column layers, the engine's dense ones too."""
    members = [each for each in layers if isinstance(each, Member)]
    products = iter(columns(x, members, [each.bias for each in members], ranks))
    return [
        next(products) if isinstance(each, Member) else _dense(each, x, adapter_ids)
        for each in layers
    ]


def _dense(layer: nn.Module, x: Tensor, adapter_ids: Any) -> Tensor:
    """Call a dense layer, which an adapter of NxD Inference may wrap."""
    lora = sys.modules.get("neuronx_distributed_inference.modules.lora_serving.lora_module")
    is_adapted = lora is not None and lora.is_lora_module(layer)
    return layer(x, adapter_ids) if is_adapted else layer(x)


def _finished(member: Member, partial_sum: Tensor, ranks: NxdRanks) -> Tensor:
    return row(member, ranks.add(partial_sum), ranks, member.bias)


# --- tensors -------------------------------------------------------------------------------------


def _leaves(layer: Any) -> Sequence[str]:
    if isinstance(layer, Member):
        return list(layer.shapes)
    return ("weight", "bias") if layer.bias is not None else ("weight",)


def _taken(layer: nn.Module, state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Take a layer's tensors out of the state dict, its placeholder too."""
    tensors = {leaf: state.pop(f"{source}.{leaf}") for leaf in _leaves(layer)}
    state.pop(f"{source}.weight", None)
    return tensors


def _as_rows(key: str | None, tensor: Tensor) -> Tensor:
    """A tensor with its columns as rows, as NxD has weights, or such a one turned back."""
    if tensor.dim() == 1:
        return tensor[:, None]
    return tensor if key == "weight" else tensor.t()


def _put(
    layer: nn.Module, tensors: Mapping[str, Tensor], state: dict[str, Tensor], target: str
) -> None:
    """Add a layer's tensors to the state dict: each rank's part after another's."""
    for key, whole in tensors.items():
        made = whole
        if isinstance(layer, Member):
            is_cut = layer.dims[key] is not None
            count = range(layer.place.tp if is_cut else 1)
            made = torch.cat([layer.cut(key, whole, rank) for rank in count])
            dtype = getattr(layer, key).dtype
            made = made.view(dtype) if made.dtype in BITS.values() else made
        state[f"{target}.{key}"] = made.contiguous()
