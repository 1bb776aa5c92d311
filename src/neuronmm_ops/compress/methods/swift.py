"""Swift-SVD (arXiv 2604.01609): P_r = top eigenvectors of YᵀY, u = Wᵀ P_r, v = P_rᵀ."""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import (
    Factorization,
    Method,
    SecondMoment,
    Side,
    Statistics,
)

# G counts as singular where the squared pivots of its Cholesky factor have a smaller ratio.
MIN_PIVOT = 1e-12


def _side(K: int, N: int) -> Side:
    return "output" if N <= K else "input"


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    moment: SecondMoment = statistics.moment
    if moment.side == "output":
        spectrum, vectors = torch.linalg.eigh(moment.matrix)
        p = vectors.flip(1)[:, :rank]
    else:
        spectrum, p = _from_inputs(w, moment, rank)
    return Factorization(w.t() @ p, p.t().contiguous(), spectrum.flip(0).clamp_min(0))


def _from_inputs(w: Tensor, moment: SecondMoment, rank: int) -> tuple[Tensor, Tensor]:
    """Return ascending eigenvalues and P_r of W G Wᵀ `[N, N]` from a `[K, K]` problem, for N > K.

    With G = S Sᵀ and Sᵀ WᵀW S = B Σ² Bᵀ, P is the columns of W S B scaled to length one. QR scales
    them without a division, and completes the basis where G is singular.
    """
    ws = w @ moment.root("root", root)
    spectrum, b = torch.linalg.eigh(ws.t() @ ws)
    return spectrum, torch.linalg.qr(ws @ b.flip(1)[:, :rank]).Q


def root(gram: Tensor) -> Tensor:
    """Return S with G = S Sᵀ: Cholesky's, in a tenth of the time of Q Λ^½, where G is regular."""
    factor, info = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal().square()
    if int(info) == 0 and bool(pivots.min() > MIN_PIVOT * pivots.max()):
        return factor
    eigenvalues, q = torch.linalg.eigh(gram)
    return q * eigenvalues.clamp_min(0).sqrt()


METHOD = Method(_factor, _side)
