"""What a method takes, what it is, and what it returns: nested factors with exact losses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Side = Literal["input", "output"]
# Of the loss's gradient g [M, N] with respect to a Linear's output: the mean of all its squares,
# the second moment gᵀg / M [N, N], or that one's diagonal [N]; or the gradient with respect to
# the weight, gᵀX / M [N, K].
Gradient = Literal["scale", "diagonal", "moment", "weight"]


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


@dataclass(frozen=True)
class Factorization:
    """Nested factors of one weight.

    Attributes:
        u: `[K, R]`, fp64.
        v: `[R, N]`, fp64.
        spectrum: `[min(K, N)]`, fp64, descending; entry i is the loss avoided by rank i + 1, and
            the sum is the energy `‖X W.T‖²` (`‖W‖²` for `plain`; for `drift` what full rank
            explains of it, the loss being the rest more).
        scores: `[min(K, N)]`, fp64, the first-order change of the model's loss where entry i alone
            is dropped; of `zero-sum` only.
    """

    u: Tensor
    v: Tensor
    spectrum: Tensor
    scores: Tensor | None = None

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


class Statistics(NamedTuple):
    """What calibration has measured for one weight `[N, K]`; a method takes what it names.

    Attributes:
        moment: of the activations on the method's side.
        gradient: of the kind that the method names, fp64: `[N]`, `[N, N]` or `[N, K]`.
        cross: `X.T @ X̂` `[K, K]`, fp64, of the dense model's inputs X and the inputs X̂ that the
            compressed layers before this one produce; `moment` is then that of X̂.
    """

    moment: Any = None
    gradient: Any = None
    cross: Any = None


class Method(NamedTuple):
    """A closed form.

    Attributes:
        factor: maps a finite weight `[N, K]` in fp64, its statistics and R to the factors of
            rank R.
        side: maps K and N to the side of the second moment that `factor` needs; None for a method
            that looks at the weight alone.
        gradient: maps K and N to the kind of gradient that `factor` needs; None for none.
        is_loss: whether the spectrum is in units of the model's loss, comparable between layers.
        follows_drift: whether `factor` needs `cross`: layers are then factored one after another.
        ranks_by: of a method that follows drift, the method by whose losses ranks are bought.
        by_scores: whether `greedy` buys ranks by the factorization's scores, so that losses of
            layers need not be comparable.
    """

    factor: Callable[[Tensor, Statistics, int], Factorization]
    side: Callable[[int, int], Side] | None = None
    gradient: Callable[[int, int], Gradient] | None = None
    is_loss: bool = False
    follows_drift: bool = False
    by_scores: bool = False
    ranks_by: str = "swift"
