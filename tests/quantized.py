"""Factors in one byte by nearest rounding, for tests of what holds them."""

import torch
from torch import Tensor, nn

from neuronmm_ops import SVDLinear, swap_
from neuronmm_ops.storages import STORAGES

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]


def nearest(factor: Tensor, storage: str) -> tuple[Tensor, Tensor]:
    """Return a factor in one byte and the scale of each column, a bfloat16 value."""
    stored = STORAGES[storage]
    scale = (stored.magnitudes(factor.float()) / stored.largest).clamp(min=1e-12)
    scale = (scale * (1 + 2**-7)).bfloat16().float()  # upwards, so that nothing exceeds the range
    numbers = stored.nearest(factor.float() / stored.spread(scale, len(factor)))
    return stored.encode(numbers), scale


def quantized(u: Tensor, v: Tensor, storage: str) -> Quantized:
    """Return u, v and their scales in one byte."""
    (u, u_scale), (v, v_scale) = nearest(u, storage), nearest(v, storage)
    return u, v, u_scale, v_scale


def random_factors(K: int, r: int, N: int, storage: str) -> Quantized:
    """Return random factors of a product whose entries have variance 1 / K."""
    return quantized(torch.randn(K, r) / K**0.5, torch.randn(r, N) / r**0.5, storage)


def quantize_(model: nn.Module, storage: str) -> nn.Module:
    """Give the model's low-rank layers factors in one byte, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, SVDLinear):
            factors = quantized(module.u.detach(), module.v.detach(), storage)
            layer = type(module).from_factors(
                *factors[:2], module.bias, *factors[2:], dtype=module.weight.dtype
            )
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, layer)
    return model


def swap_quantized_(model: nn.Module, storage: str, *ends: str, rank: int = 8) -> nn.Module:
    """Swap the Linears whose names end so for one-byte factors of their truncated SVD."""
    factors: dict[str, Quantized] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(ends):
            layer = SVDLinear.from_linear(module, rank)
            factors[name] = quantized(layer.u.detach(), layer.v.detach(), storage)
    swap_(model, factors)
    return model
