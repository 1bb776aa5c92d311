"""The low-rank layers of a decoder block: the MLP, and the second half of attention's output.

Every rank reads 1 / tp of both factors. Ranks add `x @ u` of the down projection and of attention's
output where it is narrow, `[M, r]`, before the second factor. In prefill the engine divides tokens
among the ranks between blocks ("sequence parallelism", its design document on tensor parallelism);
there the ranks gather the second factor instead, whose size does not grow with the tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.members import DenseMember, Member, Pair
from neuronmm_ops.engines.places import ColumnSection, Shard
from neuronmm_ops.engines.products import gated_mlp, row
from neuronmm_ops.engines.vllm_neuron.engine import GroupCoordinator
from neuronmm_ops.engines.vllm_neuron.launch import Kernels
from neuronmm_ops.engines.vllm_neuron.weights import set_loaders
from neuronmm_ops.parallel.sharding import Kind


class NeuronRanks(NamedTuple):
    """The engine's ranks: in prefill each has its own tokens between blocks."""

    group: GroupCoordinator
    own_tokens: bool

    @property
    def size(self) -> int:
        """How many they are."""
        return self.group.world_size

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors."""
        return self.group.all_gather(x, dim=dim)

    def add(self, x: Tensor) -> Tensor:
        """Add the ranks' tensors; each is given its tokens of the sum, or all."""
        if self.size == 1:
            return x
        return self.group.reduce_scatter(x, dim=0) if self.own_tokens else self.group.all_reduce(x)


class NeuronPair(Pair):
    """A pair whose factors lie as the kernels read them."""

    along_contraction = False


class NeuronDense(DenseMember):
    """A dense layer of a block with pairs, its weight as the kernels read it."""

    along_contraction = False


class LowRankOutput(NeuronPair):
    """Attention's output: v alone, for its u is attention's own `o_proj_weight`."""

    group: GroupCoordinator

    def forward(self, h: Tensor, is_prefill: bool) -> Tensor:
        """Map the summed `[M, r]` to `[M, N]` of the tokens of h."""
        return row(self, h, NeuronRanks(self.group, is_prefill), None)


class LowRankMLP(nn.Module):
    """The gated MLP `down(silu(gate(x)) * up(x))` of which at least one layer has factors.

    Args:
        gate, up, down: what the checkpoint's record says of them.
        group: the ranks, which divide all of them.
        kernels: run the products.
        dtype: of the parameters.
    """

    def __init__(
        self,
        gate: LayerReport,
        up: LayerReport,
        down: LayerReport,
        group: GroupCoordinator,
        kernels: Kernels,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.gate_proj = member_for(gate, "column", group, kernels, dtype)
        self.up_proj = member_for(up, "column", group, kernels, dtype)
        self.down_proj = member_for(down, "row", group, kernels, dtype)
        self.group = group

    def forward(self, hidden_states: Tensor, is_prefill: bool) -> Tensor:
        """Map `[M, K]` to `[M, K]`: in prefill the rank's own tokens, else all tokens."""
        ranks = NeuronRanks(self.group, is_prefill)
        divided = ranks.own_tokens and ranks.size > 1
        x = ranks.gather(hidden_states, 0) if divided else hidden_states
        return gated_mlp(x, self.gate_proj, self.up_proj, self.down_proj, ranks, "silu")


def member_for(
    layer: LayerReport,
    kind: Kind,
    group: GroupCoordinator,
    kernels: Kernels,
    dtype: torch.dtype,
    made: Any = None,
) -> Any:
    """Return a rank's part of a layer, which the engine loads from the tensors of its names."""
    tp = group.world_size
    place = Shard(kind, "both" if tp > 1 else "one", 0, tp)
    sections = [ColumnSection(layer.N, tp if kind == "column" else 1)]
    made = made or (NeuronDense if layer.r is None else NeuronPair)
    member: Member = made(layer, place, sections, dtype)
    member.run = kernels.run
    set_loaders(member)
    return member
