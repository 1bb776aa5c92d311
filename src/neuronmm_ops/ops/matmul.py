"""Matmuls of the reference kernels and of the gradients, fast in every dtype.

A CPU without units for bfloat16 or float16 multiplies those dtypes 5 to 400 times slower than
float32, unless the product is a few dot products of rows that lie contiguous. There operands are
cast to float32, the larger one a strip at a time, and the result is rounded once.
"""

import torch
from torch import Tensor, nn

from neuronmm_ops.ops.cpu import multiplies_fast

SLOW_DTYPES = frozenset(
    dtype for dtype in (torch.bfloat16, torch.float16) if not multiplies_fast(dtype)
)
"""What this CPU multiplies slowly."""

# Up to this many rows dot products in the narrow dtype are faster than a cast of the weights, and
# up to one less where they are shorter than this (measured in bf16, two threads, AVX2).
_MAX_DOT_ROWS = 4
_MIN_DOT_LENGTH = 512
# Up to this many rows oneDNN's float32 linear takes 0.5 to 0.9 of the time of torch.mm's BLAS.
_MAX_LINEAR_ROWS = 16
# Entries of a strip: it is in the cache from the cast to the product.
_STRIP = 2**19
# A strip with fewer rows or columns would starve the matmul.
_MIN_STRIP = 128


def mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `a @ b + bias` for a [M, K], b [K, N], bias [N], all in one dtype, summed in fp32."""
    # Unequal dtypes too are left to torch, which refuses them.
    if a.dtype not in SLOW_DTYPES or not a.is_cpu or b.dtype != a.dtype or _are_dots(a, b):
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    if torch.is_grad_enabled() or _is_wrapped(a) or _is_wrapped(b):
        # To be differentiated once more, or traced: what writes into slices cannot be.
        return _wide_product(a, b, bias).to(a.dtype)
    return _strips(a, b, bias)


def weight_gradient(x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Return `x.T @ grad` for x [M, K], grad [M, N], in the memory order of weight [K, N].

    A gradient in another order is copied once more when it is accumulated.
    """
    return mm(grad.t(), x).t() if weight.stride(0) == 1 else mm(x.t(), grad)


def _are_dots(a: Tensor, b: Tensor) -> bool:
    """Say whether a @ b is a few dot products, each of two contiguous vectors."""
    if a.stride(1) != 1 or b.stride(0) != 1:
        return False
    return a.shape[0] <= _MAX_DOT_ROWS - (a.shape[1] < _MIN_DOT_LENGTH)


def _is_wrapped(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor and type(tensor) is not nn.Parameter


def _strips(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return `a @ b + bias` by strips of the larger matrix: rows of a or columns of b."""
    (M, K), N = a.shape, b.shape[1]
    if bias is None and b.shape[0] == K:
        if K == 1:
            return a * b
        if M == 1:
            return torch.mv(b.t(), a[0]).unsqueeze(0)
    size = max(_STRIP // max(K, 1), _MIN_STRIP)
    if size >= max(M, N):
        return _wide_product(a, b, bias).to(a.dtype)
    y = a.new_empty(M, N)
    if M > N:
        wide = b.float()
        for out, strip in zip(y.split(size), a.split(size), strict=True):
            out.copy_(_wide_product(strip, wide, bias))
        return y
    wide = a.float()
    product = _linear if _takes_linear(a, b) else _wide_product
    biases = [None] * len(y.split(size, 1)) if bias is None else bias.split(size)
    for out, strip, part in zip(y.split(size, 1), b.split(size, 1), biases, strict=True):
        out.copy_(product(wide, strip, part))
    return y


def _takes_linear(a: Tensor, b: Tensor) -> bool:
    is_narrow = a.shape[0] <= _MAX_LINEAR_ROWS and b.stride(0) == 1
    return is_narrow and a.shape[1] >= _MIN_DOT_LENGTH and torch.backends.mkldnn.is_available()


def _linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    wide_bias = None if bias is None else bias.float()
    # What torch's own compiler calls; F.linear takes BLAS in float32.
    return torch.ops.mkldnn._linear_pointwise(a, b.t().float(), wide_bias, "none", [], "")


def _wide_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(a.float(), b.float())
    return torch.addmm(bias.float(), a.float(), b.float())
