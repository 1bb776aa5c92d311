"""Products of the host's CPU with matrices in the order that its kernels read, made once.

oneDNN reads bfloat16 in blocks. Of a matrix in another order it makes these at each call, or reads
it more slowly; the results are the same, bit for bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import SLOW_DTYPES
from neuronmm_ops.storages import storage_of

Product = Callable[[Tensor, Tensor | None], Tensor]
"""`x @ w + bias` in bfloat16, for x `[..., K]` and bias `[N]` or None."""


def packed(matrix: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Product | None:
    """Return the product with a matrix `[K, N]`, which need not be kept; None where none is faster.

    Args:
        matrix: a float dtype, or of a storage.
        scale: of a storage's, else None.
        dtype: of the activations.
    """
    if not matrix.is_cpu or dtype != torch.bfloat16:
        return None
    storage = storage_of(matrix.dtype)
    if storage is None or scale is None:
        return _of_blocks(matrix) if matrix.dtype == dtype and dtype not in SLOW_DTYPES else None
    multiplied = storage.packed(matrix, scale)
    if multiplied is None:
        return None

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = multiplied(x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0))
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    return product


def _of_blocks(matrix: Tensor) -> Product:
    # 1: tokens, a hint; the order is the same for all.
    blocks = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), 1)
    return lambda x, bias: _linear(x, blocks, bias)


# A custom op: torch's compiler lowers oneDNN's own for constants alone. It has no gradient.
@torch.library.custom_op("neuronmm::packed_linear", mutates_args=())
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


@_linear.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], w.shape[0])
