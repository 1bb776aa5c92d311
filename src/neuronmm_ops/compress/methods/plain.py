"""Truncated SVD of the weight, the scale split evenly: W.T = P Σ Qᵀ, u = P √Σ, v = √Σ Qᵀ."""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import Factorization, Method, Statistics


def _factor(w: Tensor, _: Statistics, rank: int) -> Factorization:
    p, sigma, qh = torch.linalg.svd(w.t(), full_matrices=False)
    root = sigma[:rank].sqrt()
    return Factorization(p[:, :rank] * root, root[:, None] * qh[:rank], sigma.square())


METHOD = Method(_factor)
