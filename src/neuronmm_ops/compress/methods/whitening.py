"""Factors in whitened coordinates, which `whiten`, `zero-sum`, `kfac` and `drift` share."""

import torch
from torch import Tensor

# Relative to the mean of the diagonal, added to it where Cholesky fails.
DAMPING = 1e-6


def damped_cholesky(gram: Tensor) -> Tensor:
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


def balanced_factors(
    p: Tensor, sigma: Tensor, qh: Tensor, rank: int, factor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return u `[K, rank]`, v `[rank, N]` of `P_r Σ_r Q_rᵀ L⁻¹`, the scale split evenly.

    Args:
        p: `[N, R]`.
        sigma: `[R]`.
        qh: `[R, K]`.
        rank: at most R.
        factor: L `[K, K]`, lower triangular.
    """
    root = sigma[:rank].sqrt()
    u = torch.linalg.solve_triangular(factor.t(), qh[:rank].t() * root, upper=True)
    return u, root[:, None] * p[:, :rank].t()
