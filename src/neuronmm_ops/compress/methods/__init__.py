"""The methods: closed forms that factor one weight, a file each.

Notation: weight `W[N, K]`, inputs X `[M, K]`, `G = X.T @ X`. A pair `u[K, r]`, `v[r, N]` stands for
`W.T ≈ u @ v`; its loss is `‖X W.T − X u v‖²`, for `plain` `‖W.T − u v‖²`. All in fp64. Factors are
nested: the first r columns of u and rows of v are the rank-r solution.

A new method is a file here that defines `METHOD`, and its line in `METHODS`.
"""

from neuronmm_ops.compress.factorization import Method
from neuronmm_ops.compress.methods import drift, kfac, kfac_drift, plain, swift, whiten, zero_sum

METHODS: dict[str, Method] = {
    "plain": plain.METHOD,
    "whiten": whiten.METHOD,
    "swift": swift.METHOD,
    "drift": drift.METHOD,
    "kfac": kfac.METHOD,
    "kfac-drift": kfac_drift.METHOD,
    "zero-sum": zero_sum.METHOD,
}
