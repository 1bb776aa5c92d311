"""Published token times of whole models, which bound what decode kernels may promise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from neuroncore.hardware import resolve_target
from neuronmm_ops.models import SHAPES, ModelShape
from neuronmm_ops.plan import plan_xw

SOURCE = "Neuron SDK 2.32, latency_data_decoder.csv (Transformers NeuronX, batch 1, bf16)"


@dataclass(frozen=True)
class TokenTime:
    """The median time per output token of a model over the cores of one instance.

    The model counts the Linears' weights alone: no attention over the cache, no norms, nothing
    between cores.

    Attributes:
        name: of the model.
        shape: its sizes.
        target: of the cores.
        cores: that share every Linear (tensor parallel).
        published_ms: per token.
    """

    name: str
    shape: ModelShape
    target: str
    cores: int
    published_ms: float

    @cached_property
    def matrices(self) -> list[tuple[int, int, int]]:
        """(K, N) of one core's part of each Linear, and how often it runs for a token."""
        found: list[tuple[int, int, int]] = []
        for name, (rows, columns) in self.shape.projections.items():
            if name in ("o_proj", "down_proj"):
                rows = ceil(rows / self.cores)
            else:
                columns = ceil(columns / self.cores)
            found.append((rows, columns, self.shape.layers))
        head = ceil(self.shape.vocab_size / self.cores)
        return [*found, (self.shape.hidden_size, head, 1)]

    @property
    def modelled_ms(self) -> float:
        """Per token: the planned decode kernels of all Linears, one launch after the other."""
        return sum(
            [times * plan_xw(1, K, N, target=self.target).time_ms for K, N, times in self.matrices]
        )

    @property
    def peak_ms(self) -> float:
        """Per token: the same weights at the documented peak of the DMA engines."""
        weights = sum([2 * K * N * times for K, N, times in self.matrices])
        return weights / resolve_target(self.target).dma_peak_gbps / 1e6


def token_times() -> list[TokenTime]:
    """All published token times."""
    llama = SHAPES["Llama-3.1-70B"]
    return [
        TokenTime("Llama-3-70B, trn1.32xlarge, 32 cores", llama, "trn1", 32, 24.48),
        TokenTime("Llama-3-70B, inf2.48xlarge, 24 cores", llama, "trn1", 24, 32.2),
    ]
