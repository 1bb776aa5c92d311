"""The factors that ranks are chosen among: what they are found from, and what each rank loses."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.factorization import Gradient, SecondMoment, Side
from neuronmm_ops.compress.factorize import check_finite, factorize, is_finite, moment_side
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear


class Nested(NamedTuple):
    """Factors of the largest rank that a layer may get, in the weight's dtype, and their losses.

    Attributes:
        u: `[K, R]`; None where another worker holds the factors.
        v: `[R, N]`; None where u is.
        spectrum: `[min(K, N)]`, fp64, per calibration token unless the method is `plain`.
        scores: `[min(K, N)]`, fp64, of `zero-sum` only.
    """

    u: Tensor | None
    v: Tensor | None
    spectrum: Tensor
    scores: Tensor | None = None

    @property
    def is_here(self) -> bool:
        """Whether this worker holds the factors."""
        return self.u is not None

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are there, by name."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}

    @classmethod
    def of(
        cls,
        name: str,
        weight: Tensor,
        config: SVDConfig,
        moment: SecondMoment | None,
        gradient: Tensor | None,
        rank: int,
    ) -> "Nested":
        """Factor one layer's weight `[N, K]`; raise NonFiniteError with the layer's name."""
        method = first_method(config)
        wanted = gradient if METHODS[method].gradient else None
        factorization = factorize(weight, method, moment, rank, gradient=wanted)
        u, v = (factor.to(weight.dtype) for factor in factorization.truncate(rank))
        check_finite(name, u, v, "compress the model in a wider dtype")
        tokens = 1 if moment is None or METHODS[method].is_loss else max(1, moment.tokens)
        scores = factorization.scores
        scores = None if scores is None else scores.cpu()
        nested = cls(u, v, factorization.spectrum.cpu() / tokens, scores)
        nested.check_losses(name)
        return nested

    def check_losses(self, name: str) -> None:
        """Raise NonFiniteError where a loss is NaN or Inf: no rank could be chosen by it."""
        for losses in (self.spectrum, self.scores):
            if losses is not None and not is_finite(losses):
                raise NonFiniteError(
                    f"{name}: losses of its ranks must be finite, got NaN or Inf; compute in a "
                    "wider dtype"
                )

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the factors of a smaller rank, `u[K, rank]`, `v[rank, N]`."""
        assert self.u is not None
        assert self.v is not None
        return self.u[:, :rank], self.v[:rank]

    def relative_loss(self, rank: int | None) -> float:
        """Return the loss of a rank as a fraction of the energy, in [0, 1]."""
        energy = float(self.spectrum.sum())
        return float(self.spectrum[rank:].sum()) / energy if rank and energy > 0 else 0.0


def known_to_all(local: Mapping[str, Nested], names: Iterable[str]) -> dict[str, Nested]:
    """Return what all workers have found, in the order of `names`: of others' the losses alone."""
    losses = workers.gather_names({n: (each.spectrum, each.scores) for n, each in local.items()})
    return {name: local.get(name) or Nested(None, None, *losses[name]) for name in names}


def first_method(config: SVDConfig) -> str:
    """Return the method of the factors that ranks are allocated by."""
    # What a compressed prefix will do is not known before its ranks are.
    method = METHODS[config.method]
    return method.ranks_by if method.follows_drift else config.method


def moment_sides(config: SVDConfig, linears: Mapping[str, DenseLinear]) -> dict[str, Side]:
    """Return the side of the second moment that each layer needs; empty where none does."""
    method = first_method(config)
    sides: dict[str, Side] = {}
    for name, linear in linears.items():
        side = moment_side(method, linear.in_features, linear.out_features)
        if side is not None:
            sides[name] = side
    return sides


def gradient_kinds(config: SVDConfig, linears: Mapping[str, DenseLinear]) -> dict[str, Gradient]:
    """Return the gradient statistic that each layer needs; empty where none does."""
    wanted = METHODS[first_method(config)].gradient
    if wanted:
        return {n: wanted(m.in_features, m.out_features) for n, m in linears.items()}
    return dict.fromkeys(linears, "scale") if config.weighs_by == "gradient" else {}
