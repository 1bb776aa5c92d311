"""What the ops contract, by their sizes: the name of each and the shapes of its weights."""

from neuronmm_ops.kernels.problem import Matrices

Weights = tuple[str, Matrices]


def mlp_matrices(K: int, ranks: tuple[int, int, int], inner: int, N: int) -> Matrices:
    """Shapes of u and v of gate, up and down, in the order of svd_mlp's schema."""
    gate, up, down = ranks
    return ((K, gate), (gate, inner), (K, up), (up, inner), (inner, down), (down, N))


def qkv_matrices(K: int, ranks: tuple[int, int, int], outputs: tuple[int, int, int]) -> Matrices:
    """Shapes of u and v of query, key and value, in the order of svd_qkv's schema."""
    (query, key, value), (N_q, N_k, N_v) = ranks, outputs
    return ((K, query), (query, N_q), (K, key), (key, N_k), (K, value), (value, N_v))


def xw(K: int, N: int) -> Weights:
    """Of a dense matmul."""
    return "xw", ((K, N),)


def xuv(K: int, r: int, N: int) -> Weights:
    """Of a low-rank matmul."""
    return "xuv", ((K, r), (r, N))


def svd_mlp(K: int, ranks: tuple[int, int, int], inner: int, N: int) -> Weights:
    """Of a low-rank gated MLP."""
    return "svd_mlp", mlp_matrices(K, ranks, inner, N)


def svd_qkv(K: int, ranks: tuple[int, int, int], outputs: tuple[int, int, int]) -> Weights:
    """Of low-rank query, key and value."""
    return "svd_qkv", qkv_matrices(K, ranks, outputs)
