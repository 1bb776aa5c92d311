"""The low-rank layers of a decoder block: the MLP, and the second half of attention's output.

Every rank reads 1 / tp of both factors. Ranks add `x @ u` of the down projection and of attention's
output where it is narrow, `[M, r]`, before the second factor. In prefill the engine divides tokens
among the ranks between blocks ("sequence parallelism", its design document on tensor parallelism);
there the ranks gather the second factor instead, whose size does not grow with the tokens.
"""

import torch
from torch import Tensor, nn

from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.vllm_neuron.engine import GroupCoordinator
from neuronmm_ops.engines.vllm_neuron.launch import Kernels
from neuronmm_ops.engines.vllm_neuron.weights import Projection
from neuronmm_ops.parallel.sharding import part_width


def expand(
    kernels: Kernels, group: GroupCoordinator, h: Tensor, v: Tensor, N: int, is_prefill: bool
) -> Tensor:
    """Multiply a row layer's summed `x @ u` by the second factor.

    Args:
        kernels: run the product.
        group: the ranks.
        h: `[M, r]`; in prefill this rank's tokens, else all, the same on every rank.
        v: this rank's columns of `[r, N]`.
        N: columns of all ranks, without those of zeros.
        is_prefill: whether ranks divide the tokens.

    Returns:
        `[M, N]` of the tokens of h.
    """
    if group.world_size == 1:
        return kernels.run("xw", h, v)
    if is_prefill:
        return kernels.run("xw", h, group.all_gather(v, dim=1)[:, :N].contiguous())
    return group.all_gather(kernels.run("xw", h, v), dim=1)[:, :N]


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
        tp = group.world_size
        self.gate_proj = Projection(gate, "column", tp, dtype)
        self.up_proj = Projection(up, "column", tp, dtype)
        self.down_proj = Projection(down, "row", tp, dtype)
        self.group, self.kernels = group, kernels

    def forward(self, hidden_states: Tensor, is_prefill: bool) -> Tensor:
        """Map `[M, K]` to `[M, K]`: in prefill the rank's own tokens, else all tokens."""
        group, down, run = self.group, self.down_proj, self.kernels.run
        gate, up, tp = self.gate_proj, self.up_proj, group.world_size
        if tp == 1 and gate.is_low_rank and up.is_low_rank and down.is_low_rank:
            return run("svd_mlp", hidden_states, gate.u, gate.v, up.u, up.v, down.u, down.v)
        x = group.all_gather(hidden_states, dim=0) if is_prefill and tp > 1 else hidden_states
        given, given_up = self._inputs(x)
        w_gate = gate.v if gate.is_low_rank else gate.weight
        w_up = up.v if up.is_low_rank else up.weight
        w_down = down.u if down.is_low_rank else down.weight
        y = run("mlp", given, w_gate, w_up, w_down, given_up)
        if tp > 1:
            y = group.reduce_scatter(y, dim=0) if is_prefill else group.all_reduce(y)
        if not down.is_low_rank:
            return y
        return expand(self.kernels, group, y, down.v, down.N, is_prefill)

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What gate and up multiply: x, or its product with u of all ranks, in one gather."""
        tp, pair = self.group.world_size, (self.gate_proj, self.up_proj)
        low = [p for p in pair if p.is_low_rank]
        if not low:
            return x, None
        made = [self.kernels.run("xw", x, p.u) for p in low]
        if tp > 1:
            # Side by side, rank by rank: [M, tp, sum of widths].
            whole = self.group.all_gather(torch.cat(made, dim=1), dim=1).unflatten(1, (tp, -1))
            widths = [part_width(p.r or 0, tp) for p in low]
            made = [h.flatten(1) for h in whole.split(widths, dim=2)]
        if len(low) == 1:
            return (made[0], x) if pair[0].is_low_rank else (x, made[0])
        return made[0], made[1]
