"""How vLLM's linear layers hold low-rank pairs, or a storage's numbers, and multiply by them."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import MISMATCH, STORED, Member, Pair, member_of, unpacked
from neuronmm_ops.engines.places import Shard, joined, member_sections
from neuronmm_ops.engines.products import columns, row
from neuronmm_ops.engines.vllm import packing
from neuronmm_ops.engines.vllm.mlp import fuse_
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.parallel.sharding import DIVIDES, Kind
from neuronmm_ops.storages import FACTORS, SCALES, tensor_dtype

DIVIDE = "neuronmm_divide"
"""The key of vLLM's `additional_config` that says which factors ranks divide."""
SHARDED = ("sharded_state", "runai_streamer_sharded")
"""Formats of a file for each rank."""
_SHARDS = {"q": 0, "k": 1, "v": 2}


class VllmRanks(NamedTuple):
    """vLLM's ranks of tensor parallel."""

    size: int
    own_tokens: bool = False

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors."""
        return tensor_model_parallel_all_gather(x, dim)

    def add(self, x: Tensor) -> Tensor:
        """Add the ranks' tensors."""
        return tensor_model_parallel_all_reduce(x)


class LowRankLinearMethod(LinearMethodBase):
    """Linear layers at least one member of which is a low-rank pair, or in a storage.

    Args:
        names: of the layer's members, as the checkpoint has them.
        layers: what the record says of each; None for one that is as it was.
    """

    def __init__(self, names: Sequence[str], layers: Sequence[LayerReport | None]) -> None:
        super().__init__()
        self.names, self.layers = tuple(names), tuple(layers)
        self.members: list[Member] = []
        self.biases: set[int | None] = set()
        # The module that holds the layer.
        self.parent: weakref.ref[nn.Module] | None = None

    # --- the parameters --------------------------------------------------------------------------

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer its members, and the empty parameters by which vLLM's loaders find them.

        Raises:
            CheckpointError: the record has other sizes than the architecture.
            ValueError: ranks cannot divide the layer, or an option has no such value.
        """
        del input_size_per_partition, output_size, extra_weight_attrs
        config = get_current_vllm_config()
        self.load_format = config.load_config.load_format
        self.is_fusible = config.lora_config is None
        self.tp_size = 1 if isinstance(layer, ReplicatedLinear) else layer.tp_size
        # vLLM would sum the result, which is wider than [M, r] of a pair.
        is_pair = any(record is not None and record.r is not None for record in self.layers)
        self.reduces = self.tp_size > 1 and is_pair and getattr(layer, "reduce_results", False)
        if self.reduces:
            layer.reduce_results = False
        self.place, self.ranks = self._place(layer, config), VllmRanks(self.tp_size)
        replicas = [1] * len(output_partition_sizes)
        if isinstance(layer, QKVParallelLinear):
            replicas[1:] = [layer.num_kv_head_replicas] * 2
        pack = packing.packed if packing.packs() else None
        sections = member_sections(self.names, output_partition_sizes, replicas, self.place)
        for name, record, parts in zip(self.names, self.layers, sections, strict=True):
            K, N = input_size, sum(section.size for section in parts)
            if record is None:
                record = LayerReport(name, K, N, None, True, None, None, 0, 0)
            if [K, N] != [record.K, record.N]:
                raise CheckpointError(
                    f"{name}: config.json asks for [K, N] = {[record.K, record.N]}, the "
                    f"architecture has {[K, N]}; {MISMATCH}"
                )
            self.members.append(member_of(record, self.place, parts, params_dtype, pack))
        # No children of the layer: vLLM's reloading handles a module with its own tensors alone.
        layer.members = tuple(self.members)
        self.divided = torch.tensor(self._division())
        layer.register_state_dict_post_hook(partial(self._add_state))
        storages = {record.storage for record in self.layers if record is not None}
        if len(storages) > 1:
            named = ", ".join(sorted(name or "the model's dtype" for name in storages))
            raise CheckpointError(
                f"{', '.join(self.names)}: vLLM needs one storage for layers of one input, got "
                f"{named}; compress with one --storage instead of auto, or load with Transformers"
            )
        (storage,) = storages
        matrix, scale = STORED
        dtypes = dict.fromkeys((*FACTORS, matrix), tensor_dtype(storage, params_dtype))
        dtypes |= {**dict.fromkeys((*SCALES, scale), torch.float32), "weight": params_dtype}
        for key, dtype in dtypes.items():
            entry = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            entry.weight_loader = self._loader(key)  # pyright: ignore  (as vLLM's have)
            # Elements that a reload has to copy before the layer is processed.
            entry.weight_loader_numel = sum(  # pyright: ignore
                getattr(member, key).numel() for member in self.members if key in member.shapes
            )
            layer.register_parameter(key, entry)
        # A bias that the layer makes afterwards takes its loader from here.
        layer.weight_loader = self._bias_loader(layer.weight_loader)

    def _place(self, layer: Any, config: VllmConfig) -> Shard:
        additional = config.additional_config if isinstance(config.additional_config, dict) else {}
        divide = additional.get(DIVIDE, "both")
        if divide not in DIVIDES:
            raise ValueError(f"{DIVIDE} must be {' or '.join(DIVIDES)}, got {divide!r}")
        if self.tp_size > 1 and config.lora_config is not None:
            raise ValueError(
                "LoRA adapters of low-rank layers need one rank, got tensor_parallel_size="
                f"{self.tp_size}; merge the adapter, or use tensor_parallel_size=1"
            )
        kind: Kind | None = None
        if isinstance(layer, RowParallelLinear):
            kind = "row"
            divide = divide if self.reduces else "one"
        elif isinstance(layer, ColumnParallelLinear):
            kind = "column"
        elif not isinstance(layer, ReplicatedLinear):
            raise ValueError(
                f"{self.names[0]}: low-rank factors need a column-parallel, row-parallel or "
                f"replicated layer, got {type(layer).__name__}; leave it dense"
            )
        return Shard(kind if self.tp_size > 1 else None, divide, layer.tp_rank, self.tp_size)

    # vLLM reads and writes the state of one rank by its names, and copies into the tensors.

    def _add_state(self, layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}divided"] = self.divided
        for index, member in enumerate(self.members):
            for key, tensor in member.state().items():
                state[f"{prefix}members.{index}.{key}"] = tensor

    def _division(self) -> list[int]:
        """Which part of the layer this rank holds."""
        return [self.place.rank, self.place.tp, DIVIDES.index(self.place.divide)]

    def _check_division(self) -> None:
        """Refuse the state of other ranks, of which vLLM fills what it can."""
        division = self.divided.tolist()
        if division != self._division():
            named = [
                f"rank {rank} of {tp}, {DIVIDE} {DIVIDES[divide]!r}"
                for rank, tp, divide in (division, self._division())
            ]
            raise CheckpointError(
                f"{self.names[0]}: the files are of {named[0]}, this is {named[1]}; serve as it "
                "was saved, or save again"
            )

    # vLLM asks loaders for their names and signatures.

    def _loader(self, key: str) -> Callable[..., None]:
        """Return what loads a tensor of the checkpoint into the member that it belongs to."""

        def load(param: nn.Parameter, loaded: Tensor, shard: int | str | None = None) -> None:
            self.members[self._index(shard)].load(key, loaded, is_rehearsal=param.is_meta)

        return load

    def _bias_loader(self, load: Callable[..., None]) -> Callable[..., None]:
        def load_bias(param: nn.Parameter, loaded: Tensor, *shard: Any) -> None:
            load(param, loaded, *shard)
            self.biases.add(self._index(*shard))

        return load_bias

    def _index(self, shard: int | str | None = None) -> int:
        index = _SHARDS[shard] if isinstance(shard, str) else (shard or 0)
        if shard is None and len(self.members) > 1:
            raise CheckpointError(
                f"{' and '.join(self.names)} must be tensors of their own, the file has one for "
                f"all; {MISMATCH}"
            )
        return index

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that all was loaded, and fuse the MLP around the layer where it can be."""
        for index, member in enumerate(self.members):
            if self.load_format == "dummy":
                for parameter in member.parameters():
                    initialize_single_dummy_weight(parameter)
            elif self.load_format in SHARDED:
                self._check_division()
                member.check()
            else:
                member.check_missing()
                if layer.bias is not None and index not in self.biases:
                    raise CheckpointError(
                        f"{member.name}.bias: the architecture has one, the files have none; "
                        f"{MISMATCH}"
                    )
                continue
            member.pack_weights()
        self.load_format = "auto"  # what is loaded from now on
        self.biases.clear()
        parent = self.parent and self.parent()
        if parent is not None and self.is_fusible:
            fuse_(parent)

    # --- the product -----------------------------------------------------------------------------

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map x `[..., K]` to `[..., N]`, or to this rank's columns or partial sums of it."""
        members = self.members
        if self.place.kind == "row":
            (member,) = members
            if not isinstance(member, Pair):
                return member.product(x, bias)  # vLLM adds the parts
            own_bias = layer.bias if self.reduces and not layer.skip_bias_add else bias
            return self.finished(member.low(x), own_bias)
        widths = [member.width for member in members]
        biases = [None] * len(members) if bias is None else bias.split(widths)
        return joined(columns(x, members, biases, self.ranks))

    def finished(self, low: Tensor, bias: Tensor | None) -> Tensor:
        """Return a row layer's result `[..., N]` for this rank's part of the sum `x @ u`.

        It is this rank's part of the sum, too, where vLLM adds the parts, or nobody does.
        """
        (pair,) = self.members
        return row(pair, self.ranks.add(low) if self.reduces else low, self.ranks, bias)


class DenseLinearMethod(UnquantizedLinearMethod):
    """vLLM's own, whose packed weights it can save."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Make the weight, which vLLM removes when it packs it."""
        super().create_weights(layer, *args, **kwargs)
        whole = layer.weight.to("meta")

        def add(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
            if not layer.weight.numel():
                state[f"{prefix}weight"] = unpacked(
                    lambda x: layer.cpu_linear(x, layer.weight, None), whole
                )

        layer.register_state_dict_post_hook(add)


def remember_parent(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Tell a low-rank layer's method which module it is put into: a hook for torch."""
    del name
    method = getattr(child, "quant_method", None)
    if isinstance(method, LowRankLinearMethod):
        method.parent = weakref.ref(parent)
