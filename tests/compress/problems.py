"""Weights and inputs to factor, what methods need of them, and the loss that each minimizes."""

import torch
from torch import Tensor

from neuronmm_ops import Factorization, SecondMoment, factorize
from neuronmm_ops.compress.factorize import moment_side
from neuronmm_ops.compress.methods import METHODS, drift, kfac

SHAPES = {"tall": (9, 6), "wide": (6, 9), "square": (7, 7), "row": (1, 5), "column": (5, 1)}


def problem(N: int, K: int, tokens: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a weight and correlated inputs, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(N, K, dtype=torch.float64, generator=generator)
    mix = torch.randn(K, K, dtype=torch.float64, generator=generator)
    x = torch.randn(tokens, K, dtype=torch.float64, generator=generator) @ mix
    return w, x


def singular(kind: str, N: int, K: int) -> tuple[Tensor, Tensor]:
    """Return a weight and inputs whose second moment is singular, of a kind in `SINGULAR`."""
    w, x = problem(N, K)
    if kind == "dead channels":
        x[:, 1] = x[:, 3] = 0
    elif kind == "few tokens":
        x = x[:3]
    elif kind == "one token":
        x = x[:1]
    elif kind == "repeated channel":
        x[:, 1] = x[:, 0]
    else:
        x = torch.zeros_like(x)
    return w, x


SINGULAR = ("dead channels", "few tokens", "one token", "repeated channel", "no signal")


def moment_of(method: str, w: Tensor, x: Tensor) -> SecondMoment | None:
    """Return the second moment that the method needs, None for `plain`."""
    side = moment_side(method, w.shape[1], w.shape[0])
    if side is None:
        return None
    rows = x if side == "input" else x @ w.t()
    return SecondMoment(side, rows.t() @ rows, len(rows))


def gradient_of(method: str, w: Tensor) -> Tensor | None:
    """Return output gradients' mean outer product [N, N] for kfac, [N, K] for zero-sum."""
    generator = torch.Generator().manual_seed(3)
    N, K = w.shape
    if "kfac" in method:
        g = torch.randn(50, N, dtype=torch.float64, generator=generator)
        return g.t() @ g / 50
    return torch.randn(N, K, dtype=torch.float64, generator=generator)


def factored(
    method: str, w: Tensor, x: Tensor, moment: SecondMoment | None = None, rank: int | None = None
) -> Factorization:
    """Factor by any method with what it needs; for `drift` there is none."""
    moment = moment_of(method, w.double(), x) if moment is None else moment
    gradient = gradient_of(method, w) if METHODS[method].gradient else None
    cross = x.t() @ x if METHODS[method].follows_drift else None
    return factorize(w, method, moment, rank, gradient=gradient, cross=cross)


def loss_of(method: str, w: Tensor, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return what the method minimizes, measured."""
    difference = w.t() - u @ v
    lost = (difference if method == "plain" else x @ difference).square().sum()
    if method == "drift":
        return lost + ridge_of(x) * difference.square().sum()
    if "kfac" in method:
        c, gram = damped_gradient(w), x.t() @ x
        if method == "kfac-drift":
            gram = gram + ridge_of(x) * torch.eye(len(gram)).double()
        return torch.trace(difference.t() @ gram @ difference @ c) / len(x)
    return lost


def damped_gradient(w: Tensor) -> Tensor:
    """Return `kfac`'s metric of the outputs, [N, N]."""
    c = gradient_of("kfac", w)
    assert c is not None
    return c + kfac.GRADIENT_DAMPING * c.diagonal().mean() * torch.eye(len(c)).double()


def ridge_of(x: Tensor) -> Tensor:
    """Return by what `drift` weighs the change of the weight itself."""
    return drift.RIDGE * (x.t() @ x).diagonal().mean()
