"""Products with stored matrices, on CPUs and GPUs: a vector reads each byte once.

Where torch has no kernel for the storage, the matrix is widened a strip at a time, which stays in
the cache until it is multiplied. The scale multiplies the sums, in fp32.
"""

import torch
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import SLOW_DTYPES
from neuronmm_ops.storages import storage_of

# Of a strip, wide: it is in the cache from the widening to the product.
_STRIP_BYTES = 2**21
_MIN_STRIP = 128


def scaled_mm(a: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `(a @ w) * scale + bias`, summed in fp32 (fp64 for fp64).

    Args:
        a: `[M, K]`, a float dtype.
        w: `[K, N]`, of a storage, its numbers finite.
        scale: of it, fp32.
        bias: `[N]`, dtype of a, or None.

    Returns:
        `[M, N]`, dtype of a.

    Raises:
        RuntimeError: sizes do not fit.
    """
    storage = storage_of(w.dtype)
    assert storage is not None
    K, N = storage.size(*w.shape)
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        wide, factor = storage.widened(w, scale, a.dtype)
        sums, y = torch.mm(a, wide, out_dtype=torch.float32), a.new_empty(len(a), N)
        # one pass over the sums, rounded where they are written
        if bias is None:
            return torch.mul(sums, factor, out=y)
        return torch.addcmul(bias, sums, factor, out=y)
    # float16 would overflow before the scale is applied.
    is_wide = a.dtype == torch.float16 or (a.is_cpu and a.dtype in SLOW_DTYPES)
    multiplied_in = _wide(a) if is_wide else a.dtype
    if not a.is_cpu or a.shape[1] != K:
        wide, factor = storage.widened(w, scale, multiplied_in)
        return _finished(a.to(multiplied_in) @ wide, factor, bias, a.dtype)
    sums = storage.sums(a, w)
    if sums is not None:
        return _finished(sums, scale, bias, a.dtype)
    y = a.new_empty(len(a), N)
    a_cast = a.to(multiplied_in)
    size = max(_STRIP_BYTES // max(K * multiplied_in.itemsize, 1), _MIN_STRIP)
    scales = scale.split(size, -1)
    biases = [None] * len(scales) if bias is None else bias.split(size)
    strips = zip(y.split(size, 1), w.split(size, 1), scales, biases, strict=True)
    for out, strip, own_scale, own_bias in strips:
        wide, factor = storage.widened(strip, own_scale, multiplied_in)
        out.copy_(_finished(torch.mm(a_cast, wide), factor, own_bias, a.dtype))
    return y


def _wide(a: Tensor) -> torch.dtype:
    return torch.promote_types(a.dtype, torch.float32)


def _finished(sums: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `sums * scale + bias`, rounded once from fp32."""
    y = sums.to(_wide(sums)) * scale
    return (y if bias is None else y + bias).to(dtype)
