"""Muon, for matrices: momentum whose update has all its singular values near one.

As `torch.optim.Muon`, which multiplies in bf16 on every machine: a CPU without units for that
takes 400 times as long.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# The quintic of https://kellerjordan.github.io/posts/muon: steepest at zero.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 3  # 100 steps of the demo end at perplexity 177; with the usual 5 at 180


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized, at the root mean square of AdamW's updates.

    Args:
        params: matrices.
        lr: learning rate, as AdamW's.
        weight_decay: decoupled.
        momentum: share of the past in the running mean.
        dtype: in which matrices are multiplied.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                if not self.state[matrix]:
                    self.state[matrix]["mean"] = torch.zeros_like(matrix)
                mean = self.state[matrix]["mean"]
                mean.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalized(matrix.grad.lerp(mean, group["momentum"]).to(self._dtype))
                scale = 0.2 * math.sqrt(max(matrix.shape))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * scale)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the matrix with its singular values moved near one, by Newton-Schulz iterations."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T).T
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
