"""Products on the host's CPU, fast in every dtype.

A CPU without units for bfloat16 or float16 multiplies those dtypes 5 to 400 times slower than
float32, unless the product is a few dot products of rows that lie contiguous. There operands are
cast to float32, the larger one a strip at a time, and the result is rounded once. What the CPU has
is what oneDNN and the CPU report of themselves: ONEDNN_MAX_CPU_ISA is respected.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

# --- what the CPU multiplies fast ----------------------------------------------------------------


@cache
def multiplies_fast(dtype: torch.dtype) -> bool:
    """Say whether this CPU has units for matmuls in `dtype`: at least as fast as in float32.

    Args:
        dtype: a float dtype; float32 and wider are always taken to be fast.
    """
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported() and _has_bf16_units()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


@cache
def streams_by_mv(dtype: torch.dtype) -> bool:
    """Say whether `mv` reads a matrix in `dtype` at least as fast as `mm` of one row does.

    With AMX by 1.3 to 1.7 times. With AVX512_BF16 alone bfloat16's takes 1.7 to 4 times as long:
    only `mm` goes to oneDNN there (both measured, two threads).
    """
    return not (dtype == torch.bfloat16 and multiplies_fast(dtype) and is_x86() and not _has_amx())


def compute_dtype(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.dtype:
    """Return the dtype in which `device` should compute a model whose weights are in `dtype`.

    Args:
        dtype: of the stored weights.
        device: where it computes; every device but a CPU takes each dtype as it is.

    Returns:
        `dtype` where the device multiplies it fast, otherwise float32.
    """
    is_cpu = torch.device(device).type == "cpu"
    return torch.float32 if is_cpu and not multiplies_fast(dtype) else dtype


def name_of(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _has_bf16_units() -> bool:
    # oneDNN reports AVX-512 without bf16 instructions as supported: it emulates them.
    return not is_x86() or torch.cpu._is_avx512_bf16_supported() or _has_amx()


def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def is_x86() -> bool:
    """Say whether this CPU is one of Intel's, or compatible."""
    return platform.machine().lower() in ("x86_64", "amd64")


SLOW_DTYPES = frozenset(
    dtype for dtype in (torch.bfloat16, torch.float16) if not multiplies_fast(dtype)
)
"""What this CPU multiplies slowly."""

# --- matmuls -------------------------------------------------------------------------------------

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
# Entries of a matrix whose rows are summed: for fewer the call itself takes longer.
_MIN_SUMMED = 2**18


def mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `a @ b + bias` for a [M, K], b [K, N], bias [N], all in one dtype, summed in fp32."""
    if bias is None and _is_sum_of_rows(a, b):
        rows = torch.arange(b.shape[0])
        return torch.embedding_bag(b, rows, rows[:1], False, 0, False, a[0])[0]
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


def _is_sum_of_rows(a: Tensor, b: Tensor) -> bool:
    """Say whether a @ b is best summed row by row of b, in fp32: by one thread, for one token.

    Takes a quarter of `mm`'s time and half of that along the contraction (bf16, AVX512_BF16).
    """
    is_row = a.shape[0] == 1 and a.shape[1] == b.shape[0] and b.numel() >= _MIN_SUMMED
    if not is_row or not b.is_contiguous() or a.dtype != b.dtype or not (a.is_cpu and b.is_cpu):
        return False
    is_plain = not (torch.is_grad_enabled() or _is_wrapped(a) or _is_wrapped(b))
    is_narrow = a.dtype in (torch.bfloat16, torch.float16)
    return is_plain and is_narrow and is_x86() and torch.get_num_threads() == 1


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
    return onednn_linear(a, b.t().float(), wide_bias)


def onednn_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ w.T + bias`: x `[..., K]`, w `[N, K]` as it lies or in oneDNN's order, one dtype.

    What torch's own compiler calls; `F.linear` takes BLAS in float32. It has no gradient and does
    not say so.
    """
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


def _wide_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.mm(a.float(), b.float())
    return torch.addmm(bias.float(), a.float(), b.float())


# --- any module ----------------------------------------------------------------------------------

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class WideProducts(TorchDispatchMode):
    """Compute products of slow dtypes on the CPU in float32, and round each result once.

    No weight is changed or kept in another dtype: operands are cast for one product at a time, the
    weights of Linears in strips. Every result has the dtype that it has without this mode. Active
    for a `with` block; for inference.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        options = kwargs or {}
        if func not in _PRODUCTS or not _is_slow(args[0]):
            return func(*args, **options)
        if func is _aten.mm.default:
            return mm(*args)
        if func is _aten.addmm.default and not options and args[0].dim() == 1:
            return mm(args[1], args[2], args[0])
        result = func(*tree_map(_widened, args), **tree_map(_widened, options))
        if isinstance(result, Tensor):
            return result.to(args[0].dtype)
        return (result[0].to(args[0].dtype), *result[1:])  # attention: its output comes first


def _is_slow(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cpu and value.dtype in SLOW_DTYPES


def _widened(value: Any) -> Any:
    return value.float() if _is_slow(value) else value
