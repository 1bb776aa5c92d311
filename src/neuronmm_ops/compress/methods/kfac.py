"""Two-sided whitening (K-FAC): C = R Rᵀ of the output gradients, G = L Lᵀ of the inputs.

W_r = R⁻ᵀ [Rᵀ W L]_r L⁻¹ minimizes ‖Rᵀ (W − W_r) L‖², to second order the change of the model's
loss where inputs and output gradients are independent (Martens & Grosse, arXiv 1503.05671). Of
a wide output only C's diagonal is measured: its Cholesky factor would take longer than the rest.
"""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import Factorization, Gradient, Method, Statistics
from neuronmm_ops.compress.methods.swift import root
from neuronmm_ops.compress.methods.whitening import damped_cholesky

# Relative to the mean of C's diagonal, added to it: a direction in which calibration saw no
# gradient still matters on other text.
GRADIENT_DAMPING = 0.1
# Outputs wider than this, and than the input, are wide.
MAX_FULL = 2048


def _gradient(K: int, N: int) -> Gradient:
    is_wide = N > K and N > MAX_FULL
    return "diagonal" if is_wide else "moment"


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    moment, c = statistics.moment, statistics.gradient
    s = moment.root("root", root)
    # Per token, as C is: the loss does not grow with the calibration set.
    scale = max(1, moment.tokens) ** -0.5
    damped = c + GRADIENT_DAMPING * _mean(c) * (torch.eye(len(c)).to(c) if c.dim() == 2 else 1)
    if c.dim() == 2:
        r = damped_cholesky(damped)
        spectrum, p = _left(scale * (r.t() @ w @ s), rank)
        # W_r = R⁻ᵀ P Pᵀ Rᵀ W: no inverse of L, so that a singular G does no harm.
        v = torch.linalg.solve_triangular(r.t(), p, upper=True).t()
        return Factorization(w.t() @ (r @ p), v.contiguous(), spectrum)
    r = damped.sqrt()[:, None]
    spectrum, p = _left(scale * (r * w @ s), rank)
    return Factorization(w.t() @ (r * p), (p / r).t().contiguous(), spectrum)


def _mean(c: Tensor) -> float:
    diagonal = c.diagonal() if c.dim() == 2 else c
    # The C of an output on which the loss does not depend has no scale: 1 stands for its mean.
    return float(diagonal.mean()) or 1.0


def _left(a: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the squared singular values `[min(K, N)]` and the left vectors `[N, rank]` of A."""
    N, K = a.shape
    if N <= K:
        eigenvalues, p = torch.linalg.eigh(a @ a.t())
        return eigenvalues.flip(0).clamp_min(0), p.flip(1)[:, :rank]
    eigenvalues, b = torch.linalg.eigh(a.t() @ a)
    # QR scales the columns of A B to length one without a division, and completes the basis.
    return eigenvalues.flip(0).clamp_min(0), torch.linalg.qr(a @ b.flip(1)[:, :rank]).Q


METHOD = Method(_factor, side=lambda K, N: "input", gradient=_gradient, is_loss=True)
