"""What a compression did: ranks, losses, bytes and provenance, as data."""

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch

from neuronmm_ops.compress.config import SVDConfig


@dataclass(frozen=True)
class LayerReport:
    """One targeted Linear.

    Attributes:
        name: qualified name in the model.
        K: input features.
        N: output features.
        r: rank, or None where the layer stays dense.
        dense: whether the layer stays dense.
        reason: why it stays dense, else None.
        loss: exact relative loss of the truncation on the calibration data (of the weight's energy
            for `plain`), in [0, 1]; 0 for a dense layer.
        bytes: of its matrices as they are now, without bias.
        dense_bytes: of the dense matrix.
    """

    name: str
    K: int
    N: int
    r: int | None
    dense: bool
    reason: str | None
    loss: float
    bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class CompressionReport:
    """Result of `compress_`: what each layer became, and where the factors come from.

    Attributes:
        config: the config used.
        layers: one entry for each targeted Linear, in model order.
        calibration: `{"tokens", "batches", "sha256"}`, or None when the method needs none.
        provenance: versions of the libraries and the seed-free, deterministic method.
    """

    config: SVDConfig
    layers: tuple[LayerReport, ...]
    calibration: dict[str, Any] | None
    provenance: dict[str, str]

    @property
    def ratio(self) -> float:
        """The nominal compression ratio asked for."""
        return self.config.ratio

    @property
    def effective_ratio(self) -> float:
        """Fraction of the targeted matrices' parameters that is gone."""
        dense = sum(layer.K * layer.N for layer in self.layers)
        return 1 - sum(_parameters(layer) for layer in self.layers) / dense

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dict."""
        return {
            "ratio": self.ratio,
            "effective_ratio": self.effective_ratio,
            "svd_config": self.config.to_dict(),
            "layers": [asdict(layer) for layer in self.layers],
            "calibration": self.calibration,
            "provenance": self.provenance,
        }


def current_provenance() -> dict[str, str]:
    """Return the versions that the factors depend on."""
    return {
        "neuronmm_ops": version("neuronmm-ops"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _parameters(layer: LayerReport) -> int:
    return layer.K * layer.N if layer.r is None else layer.r * (layer.K + layer.N)
