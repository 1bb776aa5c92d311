"""SVD-LLM (arXiv 2403.07378): G = L Lᵀ, W L = P Σ Qᵀ, W_r = P_r Σ_r Q_rᵀ L⁻¹."""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import Factorization, Method, SecondMoment

# Relative to the mean of G's diagonal, added to the diagonal where Cholesky fails.
DAMPING = 1e-6


def _factor(w: Tensor, moment: SecondMoment, rank: int) -> Factorization:
    """Where G is damped the spectrum is that of the damped G, an upper bound of the loss."""
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
    # The G of a layer whose inputs are all zero has no scale: 1 stands for its mean.
    shift = max(0.0, -lowest) + DAMPING * (float(gram.diagonal().mean()) or 1.0)
    return torch.linalg.cholesky(gram + shift * torch.eye(len(gram)).to(gram))


METHOD = Method(_factor, side=lambda K, N: "input")
