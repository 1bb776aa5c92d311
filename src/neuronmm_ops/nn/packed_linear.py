"""PackedLinear: a linear layer for inference on this CPU, and the swap to it."""

from collections.abc import Sequence
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.dense_linear import dense_linear
from neuronmm_ops.nn.layout import relayout_
from neuronmm_ops.nn.swap import carry_over, is_read_by
from neuronmm_ops.ops.backends.cpu_packed import Product, packed
from neuronmm_ops.ops.backends.simulated import active_impl

M = TypeVar("M", bound=nn.Module)


class PackedLinear(nn.Module):
    """A linear layer whose matrices are kept in the order alone that this CPU's kernels read.

    It has neither parameters to train nor to save, and is neither cast nor moved.

    Args:
        layer: the Linear or compressed layer that it stands for; its bias is taken, not copied.
        products: with each of its matrices, in turn.

    Attributes:
        in_features: K.
        out_features: N.
        rank: of a pair; None of one matrix.
        storage: of the matrices, or None.
        bias: `[N]` or None.
        weight: `[0]`, a placeholder of the model's dtype.
    """

    weight: Tensor

    def __init__(self, layer: Any, products: Sequence[Product]) -> None:
        super().__init__()
        sizes: Any = layer if isinstance(layer, CompressedLinear) else dense_linear(layer)
        self.in_features, self.out_features = sizes.in_features, sizes.out_features
        self.rank, self.storage = getattr(layer, "rank", None), getattr(layer, "storage", None)
        self.register_buffer("weight", layer.weight.detach().new_empty(0))
        self.bias = layer.bias
        self._products = tuple(products)

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to `[..., N]`; ValueError where x is of another dtype or size."""
        if x.dtype is not self.weight.dtype or x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"a packed layer takes x [..., {self.in_features}] in {self.weight.dtype}, got "
                f"{list(x.shape)} in {x.dtype}; cast it, or pack no model that runs in autocast"
            )
        if active_impl() == "simulated":
            raise RuntimeError(
                "a packed layer runs on this CPU alone, not simulated; load the model anew, "
                "without pack_"
            )
        *first, last = self._products
        for product in first:
            x = product(x, None)
        return last(x, self.bias)

    def _save_to_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any
    ) -> NoReturn:
        raise ValueError("a packed model cannot be saved; save it before pack_")

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any
    ) -> NoReturn:
        raise ValueError("a packed model cannot load weights; load them before pack_")

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        result = fn(self.weight)
        if (result.dtype, result.device) != (self.weight.dtype, self.weight.device):
            raise ValueError(
                f"a packed model stays {self.weight.dtype} on its CPU, got {result.dtype} on "
                f"{result.device}; cast and move it before pack_"
            )
        return self

    def extra_repr(self) -> str:
        """Describe sizes and storage for `print(model)`."""
        rank = "" if self.rank is None else f", rank={self.rank}"
        storage = "" if self.storage is None else f", storage={self.storage}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}{rank}, bias={self.bias is not None}{storage}"


@torch.no_grad()
def pack_(model: M) -> M:
    """Keep the matrices of a model as this CPU's kernels read them; return the model.

    Those of Linears and compressed layers in float32, in bfloat16 where the CPU has units for it,
    and in int4 with bfloat16 activations. Floats take the memory that they took, a head tied to an
    embedding twice that. bfloat16's results stay as they are, bit for bit, where activations lie
    row by row; float32's are sums in another order, int4's are rounded as bfloat16's are. Other
    compressed layers are laid out by `relayout_`. For inference: the model can no longer be
    trained, saved, cast or moved.

    Raises:
        ValueError: `model` is itself a layer, which nothing holds.
    """
    if _matrices(model) is not None:
        raise ValueError("pack_ takes a module that holds layers, got a layer; wrap it")
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if layer not in made:
                made[layer] = layer if is_read_by(parent, name) else _packed(layer)
            setattr(parent, name, made[layer])
    return relayout_(model)


def _packed(layer: nn.Module) -> nn.Module:
    """Return what takes a layer's place: itself where it has no quicker order."""
    products: list[Product] = []
    for matrix, scale in _matrices(layer) or ():
        product = packed(matrix, scale, layer.weight.dtype)  # pyright: ignore  (a Tensor)
        if product is None:
            return layer
        products.append(product)
    if not products:
        return layer
    new = PackedLinear(layer, products)
    carry_over(layer, new)
    return new


def _matrices(layer: nn.Module) -> Sequence[tuple[Tensor, Tensor | None]] | None:
    """Return the matrices `[K, N]` that a layer multiplies by, with scales; None of any other."""
    if isinstance(layer, CompressedLinear):
        return layer.scaled() if layer.compute == "x" else ()
    linear = dense_linear(layer)
    return None if linear is None or "forward" in vars(layer) else ((linear.weight.t(), None),)
