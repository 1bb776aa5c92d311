"""Products with matrices of one byte an element: a vector reads each byte once.

int8 goes to torch's weight-only kernel where x is bfloat16 and has a few rows. Otherwise the matrix
is widened a strip at a time, which stays in the cache until it is multiplied. The scale multiplies
the sums, in fp32.
"""

import torch
from torch import Tensor

from neuronmm_ops.ops.backends.cpu import SLOW_DTYPES

# torch's int8 kernel reads the matrix again for every four rows, which beats widening up to eight.
_MAX_PACKED_ROWS = 8
# It steps through a row by 16 or 32 entries, and reads past the end of one that has a rest.
_PACKED_STEP = 32
# Entries of a strip: it is in the cache from the widening to the product.
_STRIP = 2**19
_MIN_STRIP = 128
# The bits of e4m3, moved to the place of float16's exponent, are the value times 2^-8.
_E4M3_SHIFT = 7
_E4M3_MASK = ~0x4000  # the sign's copy beside it
_E4M3_BIAS = 2.0**8


def scaled_mm(a: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `(a @ w) * scale + bias`, summed in fp32 (fp64 for fp64).

    Args:
        a: `[M, K]`, a float dtype.
        w: `[K, N]`, int8 or finite float8_e4m3fn.
        scale: `[N]`, fp32.
        bias: `[N]`, dtype of a, or None.

    Returns:
        `[M, N]`, dtype of a.

    Raises:
        RuntimeError: sizes do not fit.
    """
    M, N = a.shape[0], w.shape[1]
    if not a.is_cpu or w.shape[0] != a.shape[1]:
        return _finished(a.to(_wide(a)) @ w.to(_wide(a)), scale, bias, a.dtype)
    if 0 < M <= _MAX_PACKED_ROWS and _is_packed(a, w):
        ones = torch.ones(N, dtype=a.dtype)
        return _finished(
            torch.ops.aten._weight_int8pack_mm(a.contiguous(), w.t(), ones), scale, bias, a.dtype
        )
    y = a.new_empty(M, N)
    # float16 would overflow before the scale is applied.
    multiplied_in = _wide(a) if a.dtype in SLOW_DTYPES or a.dtype == torch.float16 else a.dtype
    given = a.to(multiplied_in)
    size = max(_STRIP // max(w.shape[0], 1), _MIN_STRIP)
    biases = [None] * len(scale.split(size)) if bias is None else bias.split(size)
    strips = zip(y.split(size, 1), w.split(size, 1), scale.split(size), biases, strict=True)
    for out, strip, own_scale, own_bias in strips:
        wide, factor = _widened(strip, multiplied_in)
        out.copy_(_finished(torch.mm(given, wide), own_scale * factor, own_bias, a.dtype))
    return y


def _wide(a: Tensor) -> torch.dtype:
    return torch.promote_types(a.dtype, torch.float32)


def _is_packed(a: Tensor, w: Tensor) -> bool:
    """Say whether torch's kernel takes them; of other dtypes of a it is slower than the strips."""
    is_pair = w.dtype == torch.int8 and a.dtype == torch.bfloat16
    return is_pair and w.t().is_contiguous() and a.shape[1] % _PACKED_STEP == 0


def _widened(strip: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return the matrix in a wider dtype, and what its values are to be multiplied by.

    torch's own conversion from e4m3 takes ten times as long.
    """
    if strip.dtype == torch.int8:
        return strip.to(dtype), 1.0
    bits = strip.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(_E4M3_SHIFT).bitwise_and_(_E4M3_MASK)
    return bits.view(torch.float16).to(dtype), _E4M3_BIAS


def _finished(sums: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `sums * scale + bias`, rounded once from fp32."""
    y = sums.to(_wide(sums)) * scale
    return (y if bias is None else y + bias).to(dtype)
