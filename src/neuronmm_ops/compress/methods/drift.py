"""Reduced-rank regression towards the dense outputs, from the inputs that are really there.

X̂ are the inputs that the compressed layers before this one produce, X the dense model's. With
Ĝ = X̂ᵀX̂ = L Lᵀ and B = W (XᵀX̂) L⁻ᵀ, W_r = [B]_r L⁻¹ minimizes ‖X Wᵀ − X̂ W_rᵀ‖² (Izenman 1975).
"""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import (
    Factorization,
    Method,
    SecondMoment,
    Statistics,
)
from neuronmm_ops.compress.methods.whitening import balanced_factors, damped_cholesky

# Relative to the mean of Ĝ's diagonal, added to it and to the cross moment alike: it draws the
# regression towards W itself, where the data say little.
RIDGE = 1e-3


def regression(weight: Tensor, moment: SecondMoment, cross: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best `W.T` `[K, N]` of full rank, and Ĝ with the ridge, by which errors count.

    Args:
        weight: `[N, K]`.
        moment: Ĝ `[K, K]`, with `root` computed once for all weights of one input.
        cross: XᵀX̂ `[K, K]`, fp64.
    """
    ridge = _ridge(moment.matrix)
    target = (cross + ridge).t() @ weight.double().t()
    return torch.cholesky_solve(target, root(moment)), moment.matrix + ridge


def root(moment: SecondMoment) -> Tensor:
    """Return L `[K, K]` of Ĝ with the ridge."""
    return moment.root("ridged", lambda gram: damped_cholesky(gram + _ridge(gram)))


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    moment, cross = statistics.moment, statistics.cross
    factor = root(moment)
    target = w @ (cross + _ridge(moment.matrix))
    b = torch.linalg.solve_triangular(factor, target.t(), upper=False).t()
    p, sigma, qh = torch.linalg.svd(b, full_matrices=False)
    return Factorization(*balanced_factors(p, sigma, qh, rank, factor), sigma.square())


def _ridge(gram: Tensor) -> Tensor:
    return RIDGE * float(gram.diagonal().mean()) * torch.eye(len(gram)).to(gram)


METHOD = Method(_factor, side=lambda K, N: "input", follows_drift=True)
