"""What kernels ask of the NeuronCore that they are compiled for."""

from __future__ import annotations

from typing import Any

from neuroncore.hardware import MACHINES
from neuronmm_ops.kernels.shim import nisa, nl

TABLE = tuple([
    (
        getattr(nisa.nc_version, f"gen{machine.generation}"),
        machine.pe_tile,
        machine.moving_max,
        machine.fast_modes,
        machine.shared_ports,
        machine.slow_short_runs,
        machine.has("native_transposes"),
        machine.has("float8_e4m3fn"),
        machine.casting_mhz,
        machine.has("range_select"),
    )
    for machine in MACHINES.values()
    if hasattr(nisa.nc_version, f"gen{machine.generation}")
])  # fmt: skip
"""Values of `Facts` by NKI's version. NKI's parser reads tuples of plain values, and no objects."""


class Facts(nl.NKIObject):
    """Facts of a `hardware.Machine` and, as booleans, features; `row` is one of `TABLE`."""

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.pe_tile: int = row[1]
        self.moving_max: int = row[2]
        self.fast_modes: bool = row[3]
        self.shared_ports: bool = row[4]
        self.slow_short_runs: bool = row[5]
        self.native_transposes: bool = row[6]
        self.reads_e4m3fn: bool = row[7]
        self.casting_mhz: tuple[int, ...] = row[8]
        self.range_select: bool = row[9]


def facts() -> Facts:
    """Facts of the NeuronCore that the kernel is compiled for."""
    version = nisa.get_nc_version()
    row = TABLE[0]
    for other in TABLE:
        if other[0] == version:
            row = other
    assert row[0] == version, f"no facts of {version}; add its Machine to neuroncore.hardware"
    return Facts(row)


def transposed_dtype(source: nl.DType) -> nl.DType:
    """Dtype of a transpose in PSUM: TensorE of trn1 writes fp32 only."""
    return source if facts().native_transposes else nl.float32
