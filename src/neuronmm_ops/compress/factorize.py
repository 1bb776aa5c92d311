"""Closed-form factors of one Linear, with the exact loss of every rank.

Notation: weight `W[N, K]`, inputs X `[M, K]`, `G = X.T @ X`. A pair `u[K, r]`, `v[r, N]` stands for
`W.T ≈ u @ v`; its loss is `‖X W.T − X u v‖²`, for `plain` `‖W.T − u v‖²`. All in fp64. Factors are
nested: the first r columns of u and rows of v are the rank-r solution.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from neuronmm_ops.compress.calibrate import Moment, Side
from neuronmm_ops.compress.config import METHODS, Method
from neuronmm_ops.errors import NonFiniteError

# whiten: relative to the mean of G's diagonal, added when Cholesky fails (see _whiten).
DAMPING = 1e-6
# swift: squared pivots of Cholesky further apart than this mean that G may be singular.
MIN_PIVOT = 1e-12


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


def moment_side(method: Method, K: int, N: int) -> Side | None:
    """Return the moment that a method needs of a `[N, K]` weight: the smaller one it can use."""
    if method == "plain":
        return None
    return "output" if method == "swift" and N <= K else "input"


def factorize(
    weight: Tensor, method: Method, moment: Moment | None = None, max_rank: int | None = None
) -> Factorization:
    """Factor a weight `[N, K]` by a closed form.

    Args:
        weight: `[N, K]`, as `nn.Linear` holds it; any float dtype.
        method: `plain`, `whiten` or `swift`.
        moment: of the side that `moment_side` names; None for `plain`.
        max_rank: R of the result; default `min(K, N)`.

    Raises:
        NonFiniteError: the weight or the moment holds NaN or Inf.
        ValueError: the method is unknown, or the moment is missing, of the wrong side or of the
            wrong size.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    N, K = weight.shape
    rank = min(K, N) if max_rank is None else max_rank
    if not 1 <= rank <= min(K, N):
        raise ValueError(f"max_rank must be in 1..min(K, N) = {min(K, N)}, got {rank}")
    w = weight.detach().double()
    if not torch.isfinite(w).all():
        raise NonFiniteError("weight must be finite, got NaN or Inf; the checkpoint is damaged")
    if method == "plain":
        return _plain(w, rank)
    second_moment = _checked(moment, method, K, N)
    if method == "whiten":
        return _whiten(w, second_moment, rank)
    if N <= K:
        return _swift_output(w, second_moment.matrix, rank)
    return _swift_input(w, second_moment, rank)


def _plain(w: Tensor, rank: int) -> Factorization:
    """Truncated SVD, the scale split evenly: u = P √Σ, v = √Σ Qᵀ."""
    p, sigma, qh = torch.linalg.svd(w.t(), full_matrices=False)
    root = sigma[:rank].sqrt()
    return Factorization(p[:, :rank] * root, root[:, None] * qh[:rank], sigma.square())


def _whiten(w: Tensor, moment: Moment, rank: int) -> Factorization:
    """SVD-LLM (arXiv 2403.07378): G = L Lᵀ, W L = P Σ Qᵀ, W_r = P_r Σ_r Q_rᵀ L⁻¹.

    Where G is damped the spectrum is that of the damped G, an upper bound of the loss.
    """
    factor = moment.root("damped", _damped_cholesky)
    p, sigma, qh = torch.linalg.svd(w @ factor, full_matrices=False)
    root = sigma[:rank].sqrt()
    u = torch.linalg.solve_triangular(factor.t(), qh[:rank].t() * root, upper=True)
    return Factorization(u, root[:, None] * p[:, :rank].t(), sigma.square())


def _damped_cholesky(gram: Tensor) -> Tensor:
    """Return L of G; where G is not positive definite, of G + (max(0, −λ_min) + 1e-6 mean) I.

    The mean is that of G's diagonal.
    """
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info) == 0:
        return factor
    lowest = float(torch.linalg.eigvalsh(gram)[0])
    # A layer that was given zeros only has no scale of its own.
    shift = max(0.0, -lowest) + DAMPING * (float(gram.diagonal().mean()) or 1.0)
    return torch.linalg.cholesky(gram + shift * torch.eye(len(gram)).to(gram))


def _swift_output(w: Tensor, covariance: Tensor, rank: int) -> Factorization:
    """Swift-SVD (arXiv 2604.01609): P_r = top eigenvectors of YᵀY, u = Wᵀ P_r, v = P_rᵀ."""
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    p = vectors.flip(1)[:, :rank]
    return Factorization(w.t() @ p, p.t().contiguous(), eigenvalues.flip(0).clamp_min(0))


def _swift_input(w: Tensor, moment: Moment, rank: int) -> Factorization:
    """The same eigenvectors of W G Wᵀ `[N, N]` by way of a `[K, K]` problem, for N > K.

    With G = S Sᵀ and Sᵀ WᵀW S = B Σ² Bᵀ, the wanted P are the columns of W S B scaled to length
    one. QR scales them without a division, and completes the basis where G is singular.
    """
    ws = w @ moment.root("root", _root)
    spectrum, b = torch.linalg.eigh(ws.t() @ ws)
    p = torch.linalg.qr(ws @ b.flip(1)[:, :rank]).Q
    return Factorization(w.t() @ p, p.t().contiguous(), spectrum.flip(0).clamp_min(0))


def _root(gram: Tensor) -> Tensor:
    """Return S with G = S Sᵀ: Cholesky's, in a tenth of the time of Q Λ^½, where G is regular."""
    factor, info = torch.linalg.cholesky_ex(gram)
    pivots = factor.diagonal().square()
    if int(info) == 0 and bool(pivots.min() > MIN_PIVOT * pivots.max()):
        return factor
    eigenvalues, q = torch.linalg.eigh(gram)
    return q * eigenvalues.clamp_min(0).sqrt()


def _checked(moment: Moment | None, method: Method, K: int, N: int) -> Moment:
    side = moment_side(method, K, N)
    size = K if side == "input" else N
    if moment is None:
        raise ValueError(f"method {method} needs the {side} second moment; got none")
    if moment.side != side or moment.matrix.shape != (size, size):
        raise ValueError(
            f"method {method} needs the {side} second moment [{size}, {size}] of a "
            f"[{N}, {K}] weight, got {moment.side} {list(moment.matrix.shape)}"
        )
    if not torch.isfinite(moment.matrix).all():
        raise NonFiniteError("second moment must be finite, got NaN or Inf; check the activations")
    return moment
