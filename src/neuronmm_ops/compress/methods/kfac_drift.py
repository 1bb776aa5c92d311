"""`drift` in the metric of `kfac`: output errors from the inputs that are there count by C = R Rᵀ.

With Ĝ = X̂ᵀX̂ and the regression Ŵ = W (XᵀX̂) Ĝ⁻¹, ‖(X Wᵀ − X̂ W_rᵀ) R‖² is least where W_r is what
`kfac` makes of Ŵ and Ĝ. Ranks are bought by `kfac`'s losses.
"""

from torch import Tensor

from neuronmm_ops.compress.factorization import Factorization, Method, Statistics
from neuronmm_ops.compress.methods import drift, kfac


def _factor(w: Tensor, statistics: Statistics, rank: int) -> Factorization:
    moment, c = statistics.moment, kfac.damped(statistics.gradient)
    best, gram = drift.regression(w, moment, statistics.cross)
    N, K = w.shape
    if kfac.side(K, N) == "output":
        factors = kfac.from_outputs(best.t(), c, best.t() @ gram @ best, rank)
    else:
        factors = kfac.from_inputs(best.t(), c, drift.root(moment), rank)
    return kfac.factorization(factors, moment.tokens)


METHOD = Method(
    _factor,
    side=lambda K, N: "input",
    gradient=kfac.METHOD.gradient,
    is_loss=True,
    follows_drift=True,
    ranks_by="kfac",
)
