"""`drift` in the metric of `kfac`: output errors from the inputs that are there count by C = R Rᵀ.

With Ĝ = X̂ᵀX̂ = L Lᵀ and B = W (XᵀX̂) L⁻ᵀ, W_r = R⁻ᵀ [Rᵀ B]_r L⁻¹ minimizes
‖(X Wᵀ − X̂ W_rᵀ) R‖². Ranks are bought by `kfac`'s losses.
"""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import Factorization, Method, Statistics
from neuronmm_ops.compress.methods import drift, kfac
from neuronmm_ops.compress.methods.whitening import balanced_factors, damped_cholesky


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    best, gram = drift.regression(w, statistics.moment.matrix, statistics.cross)
    factor, c = damped_cholesky(gram), kfac.damped(statistics.gradient)
    b = best.t() @ factor
    if c.dim() == 2:
        root = damped_cholesky(c)
        p, sigma, qh = torch.linalg.svd(root.t() @ b, full_matrices=False)
        p = torch.linalg.solve_triangular(root.t(), p, upper=True)
    else:
        scale = c.sqrt()[:, None]
        p, sigma, qh = torch.linalg.svd(scale * b, full_matrices=False)
        p = p / scale
    u, v = kfac.balanced(*balanced_factors(p, sigma, qh, rank, factor))
    return Factorization(u, v, sigma.square() / max(1, statistics.moment.tokens))


METHOD = Method(
    _factor,
    side=lambda K, N: "input",
    gradient=kfac.METHOD.gradient,
    is_loss=True,
    follows_drift=True,
    ranks_by="kfac",
)
