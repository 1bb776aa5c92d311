"""The second moment of a Linear's inputs or outputs, which the methods take instead of the data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Side = Literal["input", "output"]


@dataclass
class SecondMoment:
    """Uncentred second moment of one side of a Linear, or of several with the same input.

    Attributes:
        side: `input`, `X.T @ X` `[K, K]`; or `output`, `Y.T @ Y` `[N, N]` without bias.
        matrix: fp64, summed over tokens.
        tokens: how many rows were summed.
    """

    side: Side
    matrix: Tensor
    tokens: int = 0
    _roots: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @torch.no_grad()
    def add(self, product: Tensor, tokens: int) -> None:
        """Add the fp32 (or fp64) product of `tokens` rows."""
        # In blocks of 64 rows: converting all of it to fp64 first takes three times as long.
        for total, part in zip(self.matrix.split(64), product.split(64), strict=True):
            total += part
        self.tokens += tokens
        self._roots.clear()

    def root(self, name: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `compute(matrix)`, computed once for all Linears that share the moment."""
        if name not in self._roots:
            self._roots[name] = compute(self.matrix)
        return self._roots[name]
