"""Two-sided whitening (K-FAC): C = R Rᵀ of the output gradients, G = L Lᵀ of the inputs.

W_r = R⁻ᵀ [Rᵀ W L]_r L⁻¹ minimizes ‖Rᵀ (W − W_r) L‖², to second order the change of the model's
loss where inputs and output gradients are independent (Martens & Grosse, arXiv 1503.05671). Of
a wide output only C's diagonal is measured. Eigenvectors are found on the smaller side, as `swift`
does.
"""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import (
    Factorization,
    Gradient,
    Method,
    Side,
    Statistics,
)
from neuronmm_ops.compress.methods.whitening import damped_cholesky

Found = tuple[Tensor, Tensor, Tensor]  # u, v, ascending eigenvalues

# Relative to the mean of C's diagonal, added to it: a direction in which calibration saw no
# gradient still matters on other text.
GRADIENT_DAMPING = 0.1
# Outputs wider than this, and than the input, are wide.
MAX_FULL = 2048
# Eigenvalues below this share of the largest are rounding.
MIN_EIGENVALUE = 1e-13


def side(K: int, N: int) -> Side:
    """The smaller side, where eigenvectors are found."""
    return "output" if N <= K else "input"


def _gradient(K: int, N: int) -> Gradient:
    is_wide = N > K and N > MAX_FULL
    return "diagonal" if is_wide else "moment"


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    moment, c = statistics.moment, damped(statistics.gradient)
    if moment.side == "output":
        factors = from_outputs(w, c, moment.matrix, rank)
    else:
        factors = from_inputs(w, c, moment.root("damped", damped_cholesky), rank)
    return factorization(factors, moment.tokens)


def factorization(factors: Found, tokens: int) -> Factorization:
    """Return what was found, of one scale, with losses per token, as C is."""
    u, v, spectrum = factors
    # The loss does not grow with the calibration set.
    return Factorization(*_balanced(u, v), spectrum.flip(0).clamp_min(0) / max(1, tokens))


def from_outputs(w: Tensor, c: Tensor, outputs: Tensor, rank: int) -> Found:
    """P are eigenvectors of Rᵀ YᵀY R, `outputs` YᵀY `[N, N]`; W_r = R⁻ᵀ P Pᵀ Rᵀ W."""
    r = damped_cholesky(c)
    spectrum, vectors = torch.linalg.eigh(r.t() @ outputs @ r)
    p = vectors.flip(1)[:, :rank]
    v = torch.linalg.solve_triangular(r.t(), p, upper=True).t()
    return w.t() @ (r @ p), v.contiguous(), spectrum


def from_inputs(w: Tensor, c: Tensor, factor: Tensor, rank: int) -> Found:
    """With M = Wᵀ C W, Lᵀ M L = B Σ² Bᵀ and T = L B Σ⁻¹ `[K, r]`, W_r = W T Tᵀ M.

    `factor` is L `[K, K]`. P of the other form is Rᵀ W T, so that neither R nor its inverse is
    needed.
    """
    m = w.t() @ (c @ w if c.dim() == 2 else c[:, None] * w)
    spectrum, b = torch.linalg.eigh(factor.t() @ m @ factor)
    least = max(MIN_EIGENVALUE * float(spectrum[-1]), torch.finfo(spectrum.dtype).tiny)
    sigma = spectrum.flip(0)[:rank].clamp_min(least).sqrt()
    t = factor @ b.flip(1)[:, :rank] / sigma
    return m @ t, (w @ t).t().contiguous(), spectrum


def _balanced(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Give u's columns and v's rows equal lengths: gradients are small, their inverses large."""
    tiny = torch.finfo(u.dtype).tiny
    scale = (v.norm(dim=1).clamp_min(tiny) / u.norm(dim=0).clamp_min(tiny)).sqrt()
    # A direction without weight is left as it is.
    scale = torch.where((u != 0).any(0) & (v != 0).any(1), scale, 1.0)
    return u * scale, v / scale[:, None]


def damped(c: Tensor) -> Tensor:
    """Return C `[N, N]`, or its diagonal `[N]`, with `GRADIENT_DAMPING` added."""
    diagonal = c.diagonal() if c.dim() == 2 else c
    # The C of an output on which the loss does not depend has no scale: 1 stands for its mean.
    damping = GRADIENT_DAMPING * (float(diagonal.mean()) or 1.0)
    return c + damping * (torch.eye(len(c)).to(c) if c.dim() == 2 else 1)


METHOD = Method(_factor, side=side, gradient=_gradient, is_loss=True)
