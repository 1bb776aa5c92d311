"""What becoming a pair or being rounded costs one matrix: modelled, and measured on the model.

A method's metric says what an error costs to second order. Of small errors that is so; a truncation
may cost a converged model a thousand times more. So the divergence of the model's predictions is
measured with one matrix replaced, dense and at some ranks, and the metric's losses between are
multiplied by what it found.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress.allocate import Matrix
from neuronmm_ops.compress.batches import Batch, call_model, row_mask, single_rows
from neuronmm_ops.compress.factorization import SecondMoment
from neuronmm_ops.compress.mixed import Choice, storages_of
from neuronmm_ops.compress.quantize import error_loss, pair_loss
from neuronmm_ops.compress.rounding import round_matrix, round_pair
from neuronmm_ops.compress.running import eval_mode, fast_products
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.dense_linear import as_dense_linear
from neuronmm_ops.storages import STORAGES, dequantized

# Of the calibration text, run for each matrix and rank: the divergence of most is alike.
TOKENS = 1024
# Of what is modelled, the least that a measured divergence counts: it may round to nothing.
LEAST = 1e-6


class Divergence:
    """How far a model's predictions move when the weight of one Linear is another matrix.

    Args:
        model: a causal language model.
        batches: token ids, as for `collect_moments`; some `TOKENS` tokens are run.

    Raises:
        ValueError: the model has no logits.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self._model = model
        self._rows = [row for _, row in single_rows(batches, TOKENS)]
        self._dense = list(self._predicted())

    def of(self, name: str, matrix: Tensor) -> float:
        """Return it in nats a token, the Linear computing `x @ matrix`, `[K, N]`."""
        with as_dense_linear(self._model.get_submodule(name)).computing(matrix):
            sums = [
                F.kl_div(log_probs, dense, reduction="sum", log_target=True)
                for log_probs, dense in zip(self._predicted(), self._dense, strict=True)
            ]
        divergence = float(torch.stack(sums).sum()) / sum(map(len, self._dense))
        if not np.isfinite(divergence):
            raise NonFiniteError(f"{name}: the divergence must be finite, got {divergence}")
        return divergence

    @torch.no_grad()
    def _predicted(self) -> Iterator[Tensor]:
        """Yield the log-probabilities `[T, V]` of each row."""
        for row in self._rows:
            with eval_mode(self._model), fast_products(self._model):
                logits = getattr(call_model(self._model, row), "logits", None)
            if logits is None:
                raise ValueError("storage auto needs a causal language model; use another storage")
            mask = row_mask(self._model, row)
            counted = logits.flatten(0, -2) if mask is None else logits[mask]
            yield F.log_softmax(counted.float(), -1)


class Losses(NamedTuple):
    """What the choices of a matrix lose in addition to the truncation's spectrum.

    Attributes:
        ranks: int64, at which pairs were measured.
        factors: `[1 + len(ranks)]`, nats of divergence for one unit of the method's metric: of the
            dense matrix rounded, then of a pair of each rank.
        rounding: `[len(STORAGES), 1 + len(ranks)]`, what rounding adds for each of these, in
            that unit; infinite where a storage cannot hold the matrix.
    """

    ranks: Tensor
    factors: Tensor
    rounding: Tensor

    def of(self, matrix: Matrix, choice: Choice) -> float:
        """Return the loss of a choice, in nats."""
        if choice == Choice(None, None):
            return 0.0
        row = list(STORAGES).index(choice.storage) if choice.storage else None
        if choice.rank is None:
            return float(self.factors[0] * self.rounding[row, 0])
        at, logs = np.log(choice.rank), self.ranks.log().numpy()
        factor = np.exp(np.interp(at, logs, self.factors[1:].log().numpy()))
        added = 0.0 if row is None else np.interp(at, logs, self.rounding[row, 1:].numpy())
        return float(factor * (matrix.loss(choice.rank) + added))


def losses_of(
    name: str,
    weight: Tensor,
    factors: tuple[Tensor, Tensor],
    ranks: Sequence[int],
    moment: SecondMoment,
    metric: Tensor | None,
    divergence: Divergence,
) -> Losses:
    """Measure what a layer's choices lose.

    Args:
        name: of the layer.
        weight: `[N, K]`.
        factors: `u[K, R]`, `v[R, N]`, nested.
        ranks: at which pairs are measured.
        moment: of the inputs.
        metric: of the outputs, as `output_metrics` gives it.
        divergence: of the model.
    """
    target, (u, v) = weight.t(), factors
    H, tokens = moment.matrix, max(1, moment.tokens)
    exact = [pair_loss(u[:, :r], v[:r], target, H, metric) / tokens for r in ranks]
    rounding = torch.full((len(STORAGES), 1 + len(ranks)), torch.inf, dtype=torch.float64)
    coarsest = target, 0.0
    for storage in storages_of(*target.shape):
        row = list(STORAGES).index(storage)
        dense = dequantized(*round_matrix(name, storage, weight, moment), torch.float64)
        lost = error_loss(dense - target.double(), H, metric) / tokens
        coarsest = max(coarsest, (dense, lost), key=lambda each: each[1])
        rounding[row, 0] = lost
        for column, (rank, before) in enumerate(zip(ranks, exact, strict=True), start=1):
            pair = round_pair(name, storage, (u[:, :rank], v[:rank]), weight, moment, metric)
            after = pair_loss(*pair.widened(torch.float64), target, H, metric) / tokens
            rounding[row, column] = max(0.0, after - before)
    probes = [coarsest, *((u[:, :r] @ v[:r], lost) for r, lost in zip(ranks, exact, strict=True))]
    losses = [
        max(divergence.of(name, matrix) / lost, LEAST) if lost > 0 else 1.0
        for matrix, lost in probes
    ]
    return Losses(torch.tensor(ranks), torch.tensor(losses, dtype=torch.float64), rounding)
