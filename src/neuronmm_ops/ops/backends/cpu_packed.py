"""Products of the host's CPU with matrices in the order that its kernels read, made once.

oneDNN reads blocks. Of a bfloat16 matrix in another order it makes these at each call, or reads it
more slowly; the results are the same, bit for bit. float32 torch gives to its BLAS instead, whose
sums are rounded elsewhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import SLOW_DTYPES, is_x86, onednn_linear
from neuronmm_ops.storages import storage_of

Product = Callable[[Tensor, Tensor | None], Tensor]
"""`x @ w + bias` in one dtype, for x `[..., K]` and bias `[N]` or None."""
_TOKENS = 64
"""A hint for the order. For fewer than 16 it is another in float32: 64 to 512 tokens then take what
they take now, 2 to 8 twice as long (AVX512 and AVX2, two threads, 2048 x 8192)."""


def packed(matrix: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Product | None:
    """Return the product with a matrix `[K, N]`, which need not be kept; None where none is faster.

    Args:
        matrix: a float dtype, or of a storage.
        scale: of a storage's, else None.
        dtype: of the activations.
    """
    if not matrix.is_cpu:
        return None
    storage = storage_of(matrix.dtype)
    if storage is None or scale is None:
        return _of_blocks(matrix) if matrix.dtype == dtype and _has_blocks(dtype) else None
    if dtype != torch.bfloat16:
        return None
    multiplied = storage.packed(matrix, scale)
    if multiplied is None:
        return None

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = multiplied(x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0))
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    return product


def _has_blocks(dtype: torch.dtype) -> bool:
    if dtype == torch.float32:
        return is_x86() and torch.backends.mkldnn.is_available()
    return dtype == torch.bfloat16 and dtype not in SLOW_DTYPES


def _of_blocks(matrix: Tensor) -> Product:
    blocks = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), _TOKENS)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        needs_op = torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad)
        return (_linear if needs_op else onednn_linear)(x, blocks, bias)

    return product


# torch's compiler lowers oneDNN's own op for constants alone, and that has no gradient and does not
# say so. To enter this one takes as long as a small product, so it is left out where it can be.
_linear = torch.library.custom_op("neuronmm::packed_linear", onednn_linear, mutates_args=())


@_linear.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], w.shape[0])
