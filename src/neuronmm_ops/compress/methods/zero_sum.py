"""ZS-SVD (Zero-Sum SVD, ICML 2026): the factors of `whiten`, and a signed score for each rank.

With H = (∂ℓ/∂W) L⁻ᵀ, dropping σ_i p_i q_iᵀ L⁻¹ changes the loss to first order by
Δ_i = −σ_i p_iᵀ H q_i. Ranks are dropped such that the sum of Δ stays near zero (`allocate`).
"""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import Factorization, Method, Statistics
from neuronmm_ops.compress.methods.whitening import balanced_factors, damped_cholesky


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    factor = statistics.moment.root("damped", damped_cholesky)
    p, sigma, qh = torch.linalg.svd(w @ factor, full_matrices=False)
    # H q_i = (∂ℓ/∂W) L⁻ᵀ q_i.
    unwhitened = torch.linalg.solve_triangular(factor.t(), qh.t(), upper=True)
    scores = -sigma * (p * (statistics.gradient @ unwhitened)).sum(0)
    u, v = balanced_factors(p, sigma, qh, rank, factor)
    return Factorization(u, v, sigma.square(), scores)


METHOD = Method(_factor, side=lambda K, N: "input", gradient=lambda K, N: "weight", by_scores=True)
