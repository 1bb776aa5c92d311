"""The profiled kernels with their sizes, and what AWS published of them, on one core of trn2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neuroncore.boundary import TensorSpec
from neuroncore.calibration import profiled
from neuroncore.calibration.cases import of_simulator
from neuroncore.dtypes import bfloat16
from neuroncore.hardware import resolve_target
from neuroncore.kernel import Kernel

TARGET = "trn2"


@dataclass(frozen=True)
class Profiled:
    """One kernel, in bfloat16.

    Attributes:
        name: with its size.
        function: its name in `profiled`.
        operands: shapes and dtypes of its two tensors.
        arguments: its compile-time arguments, in order.
        published_ms: its time as "", and how long an engine was active by the engine's name.
    """

    name: str
    function: str
    operands: tuple[TensorSpec, ...]
    arguments: Mapping[str, Any]
    published_ms: Mapping[str, float]
    lnc: int = 1

    @property
    def kernel(self) -> Callable[..., Any]:
        """The kernel of the installed NKI, else the simulator's."""
        return getattr(profiled, self.function)

    @property
    def simulated(self) -> Kernel:
        """The kernel for `neuroncore.simulate`, also where NKI is installed."""
        return getattr(of_simulator(profiled.__name__), self.function)


_LARGE = (TensorSpec((4096, 4096), bfloat16),) * 2
_SQUARE = (TensorSpec((2048, 2048), bfloat16),) * 2
_TILES = TensorSpec((128, 128), bfloat16), TensorSpec((128, 512), bfloat16)
_FULL = (128, 128, 512)
_MIXED = ((128, 32, 512), (128, 128, 64), (32, 128, 512), _FULL)

PUBLISHED = (
    Profiled(
        "tiled 4096^3 (V0)", "tiled", _LARGE, {},
        {"": 8.602, "DMA": 7.906, "TensorE": 4.806, "VectorE": 0.176},
    ),
    Profiled(
        "blocked 4096^3, loads of 128 and 512 columns (V1)", "blocked", _LARGE,
        {"left": 128, "right": 512},
        {"": 2.451, "DMA": 1.325, "TensorE": 2.163, "VectorE": 0.174},
    ),
    Profiled(
        "blocked 4096^3, loads of 1024 columns (V2)", "blocked", _LARGE,
        {"left": 1024, "right": 1024},
        {"": 1.801, "DMA": 0.819, "TensorE": 1.781, "VectorE": 0.172},
    ),
    Profiled(
        "tiled 2048^3, nc_transpose of each tile", "transposing", _SQUARE, {},
        {"": 0.802, "TensorE": 0.503},
    ),
    Profiled("tiled 2048^3", "tiled", _SQUARE, {}, {"": 0.608, "TensorE": 0.420}),
    # active times by the published flops and rates: 34.36 GF at 77.2 TF/s, 13.96 at 30.8
    Profiled(
        "2048 matmuls of resident tiles", "resident", _TILES, {"tiles": (_FULL,), "count": 2048},
        {"TensorE": 0.4451},
    ),
    Profiled(
        "512 matmuls each of M 32, N 64, K 32 and full tiles", "resident", _TILES,
        {"tiles": _MIXED, "count": 512}, {"TensorE": 0.4532},
    ),
)  # fmt: skip


def published(target: str) -> list[Profiled]:
    """Those that a target can run: trn1 transposes into 32 bits alone.

    Raises:
        ValueError: there is no such target.
    """
    turns = resolve_target(target).has("native_transposes")
    return [each for each in PUBLISHED if turns or each.function != "transposing"]
