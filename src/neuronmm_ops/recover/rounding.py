"""Training through rounding: masters in fp32, of which every product uses the rounded numbers.

The gradient of rounding is taken as 1, straight through (Bengio et al., arXiv 1308.3432). Scales
stay: what a layer starts with is what it computed before, bit for bit.
"""

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.svd_linear import SVDLinear
from neuronmm_ops.ops import xuv
from neuronmm_ops.storages import STORAGES, WeightStorage


class RoundedLinear(SVDLinear):
    """An `SVDLinear` in a storage whose u and v are masters: numbers before they are rounded."""

    storage: str

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to `[..., N]`."""
        stored = STORAGES[self.storage]
        u, v = (
            _nearest(master, stored) * stored.spread(scale, len(master))
            for master, scale in self.scaled()
            if scale is not None
        )
        return xuv(x, u.to(x.dtype), v.to(x.dtype), self.bias)


def unround_(layer: SVDLinear) -> None:
    """Give a layer in a storage masters in the place of its numbers, in place."""
    assert layer.storage is not None
    stored = STORAGES[layer.storage]
    for name in layer.MATRICES:
        numbers = stored.decode(getattr(layer, name).detach(), torch.float32)
        setattr(layer, name, nn.Parameter(numbers))
    layer.__class__ = RoundedLinear


@torch.no_grad()
def round_(layer: SVDLinear) -> None:
    """Give the layer numbers of its storage again, those that its products have used."""
    assert layer.storage is not None
    stored = STORAGES[layer.storage]
    for name in layer.MATRICES:
        numbers = stored.encode(_nearest(getattr(layer, name), stored))
        setattr(layer, name, nn.Parameter(numbers, requires_grad=False))
    layer.__class__ = SVDLinear


def _nearest(master: Tensor, stored: WeightStorage) -> Tensor:
    """Return the numbers nearest to a master, with a gradient of 1 inside the storage's range."""
    inside = master.clamp(-stored.largest, stored.largest)
    return inside + (stored.nearest(inside.detach()) - inside).detach()
