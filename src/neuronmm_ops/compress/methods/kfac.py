"""Two-sided whitening (K-FAC): C = R Rᵀ of the output gradients, G = L Lᵀ of the inputs.

W_r = R⁻ᵀ [Rᵀ W L]_r L⁻¹ minimizes ‖Rᵀ (W − W_r) L‖², to second order the change of the model's
loss where inputs and output gradients are independent (Martens & Grosse, arXiv 1503.05671).
"""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import Factorization, Method, Statistics
from neuronmm_ops.compress.methods.swift import root
from neuronmm_ops.compress.methods.whitening import damped_cholesky

# Relative to the mean of C's diagonal, added to it: a direction in which calibration saw no
# gradient still matters on other text.
GRADIENT_DAMPING = 0.1


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    c = statistics.gradient
    mean = float(c.diagonal().mean()) or 1.0
    r = damped_cholesky(c + GRADIENT_DAMPING * mean * torch.eye(len(c)).to(c))
    # Per token, as C is: the loss does not grow with the calibration set.
    scale = max(1, statistics.moment.tokens) ** -0.5
    s = statistics.moment.root("root", root)
    a = scale * (r.t() @ w @ s)
    spectrum, p = _left(a, rank)
    # W_r = R⁻ᵀ P Pᵀ Rᵀ W: no inverse of L, so that a singular G does no harm.
    v = torch.linalg.solve_triangular(r.t(), p, upper=True).t()
    return Factorization(w.t() @ r @ p, v, spectrum)


def _left(a: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the squared singular values `[min(K, N)]` and the left vectors `[N, rank]` of A."""
    N, K = a.shape
    if N <= K:
        eigenvalues, p = torch.linalg.eigh(a @ a.t())
        return eigenvalues.flip(0).clamp_min(0), p.flip(1)[:, :rank]
    eigenvalues, b = torch.linalg.eigh(a.t() @ a)
    # QR scales the columns of A B to length one without a division, and completes the basis.
    return eigenvalues.flip(0).clamp_min(0), torch.linalg.qr(a @ b.flip(1)[:, :rank]).Q


METHOD = Method(_factor, side=lambda K, N: "input", gradient="moment", is_loss=True)
