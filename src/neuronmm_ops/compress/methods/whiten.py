"""SVD-LLM (arXiv 2403.07378): G = L Lᵀ, W L = P Σ Qᵀ, W_r = P_r Σ_r Q_rᵀ L⁻¹."""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import Factorization, Method, Statistics
from neuronmm_ops.compress.methods.whitening import balanced_factors, damped_cholesky


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    """Where G is damped the spectrum is that of the damped G, an upper bound of the loss."""
    factor = statistics.moment.root("damped", damped_cholesky)
    p, sigma, qh = torch.linalg.svd(w @ factor, full_matrices=False)
    return Factorization(*balanced_factors(p, sigma, qh, rank, factor), sigma.square())


METHOD = Method(_factor, side=lambda K, N: "input")
