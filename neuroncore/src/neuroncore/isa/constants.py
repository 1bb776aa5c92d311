"""`nki.isa.constants`: the enumerations of `nki.isa`, where kernels before NKI 0.3 import them."""

from __future__ import annotations

from neuroncore.isa.enums import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)

__all__ = [
    "dge_mode", "dma_engine", "engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd",
]  # fmt: skip
