"""What the host's CPU multiplies fast, and the dtype in which it should compute.

A CPU without units for bfloat16 or float16 still takes such matmuls, 5 to 400 times slower than in
float32. Only the multiplication is asked about here, by what oneDNN and the CPU report of
themselves: ONEDNN_MAX_CPU_ISA is respected.
"""

import platform
from functools import cache

import torch


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
    return not (dtype == torch.bfloat16 and multiplies_fast(dtype) and _is_x86() and not _has_amx())


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


def _has_bf16_units() -> bool:
    # oneDNN reports AVX-512 without bf16 instructions as supported: it emulates them.
    return not _is_x86() or torch.cpu._is_avx512_bf16_supported() or _has_amx()


def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
