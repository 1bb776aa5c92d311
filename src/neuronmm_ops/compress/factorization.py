"""What a method is and what it returns: nested factors, with the exact loss of every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from neuronmm_ops.compress.moments import Side


@dataclass(frozen=True)
class Factorization:
    """Nested factors of one weight.

    Attributes:
        u: `[K, R]`, fp64.
        v: `[R, N]`, fp64.
        spectrum: `[min(K, N)]`, fp64, descending; entry i is the loss avoided by rank i + 1, and
            the sum is the energy `‖X W.T‖²` (`‖W‖²` for `plain`).
    """

    u: Tensor
    v: Tensor
    spectrum: Tensor

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the rank-`rank` factors `u[K, rank]`, `v[rank, N]`.

        Raises:
            ValueError: rank is outside 1..R.
        """
        if not 1 <= rank <= self.u.shape[1]:
            raise ValueError(f"rank must be in 1..{self.u.shape[1]}, got {rank}")
        return self.u[:, :rank], self.v[:rank]

    def loss(self, rank: int) -> float:
        """Return the exact loss of rank `rank`: the sum of the discarded spectrum."""
        return float(self.spectrum[rank:].sum())

    def relative_loss(self, rank: int) -> float:
        """Return the loss of rank `rank` as a fraction of the energy, in [0, 1]."""
        energy = float(self.spectrum.sum())
        return self.loss(rank) / energy if energy > 0 else 0.0


@dataclass(frozen=True)
class Method:
    """A closed form.

    Attributes:
        factor: maps a finite weight `[N, K]` in fp64, the second moment (None where `side` is)
            and R to the factors of rank R.
        side: maps K and N to the side of the second moment that `factor` needs; None for a method
            that looks at the weight alone.
    """

    factor: Callable[[Tensor, Any, int], Factorization]
    side: Callable[[int, int], Side] | None = None
