"""Operands of `neuronmm::decoder_layer` for tests, by name."""

from typing import Any

import torch
from attending import EPS, angles, drawn, norm_weights
from quantized import nearest

B, M, H, HEADS, KV, D, T, INNER = 2, 3, 64, 4, 2, 32, 20, 96
POSITIONS = [5, 17]
"""Of each sequence; the last one's new tokens fill its cache."""
SIZES = [(H, HEADS * D), (H, KV * D), (H, KV * D), (HEADS * D, H), (H, INNER), (H, INNER)]
SIZES += [(INNER, H)]
Operands = dict[str, Any]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A copy of operands, floats in another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value.clone()
    if isinstance(value, dict):
        return {name: cast(each, dtype) for name, each in value.items()}
    if isinstance(value, list):
        return [cast(each, dtype) for each in value]
    return value


def operands(
    dtype: torch.dtype = torch.float64, ranks: tuple[int, ...] = (16, 24, 40),
    head_norm: bool = True, bias: bool = True, residual: bool = True, storage: str = "",
    layers: int = 1, window: int = 0,
) -> Operands:  # fmt: skip
    """Operands of `reference` by name; pairs of these ranks (qkv, output, MLP; 0: dense)."""
    of_rank = ranks if len(ranks) == 7 else [*ranks[:1] * 3, ranks[1], *ranks[2:] * 3]
    given: Operands = {"norms": [], "caches": [], "matrices": [], "biases": [], "scales": []}
    for layer in range(layers):
        seed = 100 * layer
        heads = norm_weights(D, dtype) if head_norm else [None, None]
        given["norms"] += [*norm_weights(H, dtype), *heads]
        given["caches"].append(drawn(B, KV, D, T, dtype=dtype, seed=seed + 3))
        given["caches"].append(drawn(B, KV, T, D, dtype=dtype, seed=seed + 4))
        for n, ((K, N), r) in enumerate(zip(SIZES, of_rank, strict=True)):
            sizes = [(K, r), (r, N)] if r else [None, (K, N)]
            for side, size in enumerate(sizes):
                if size is None:
                    given["matrices"].append(None)
                    given["scales"].append(None)
                    continue
                own = seed + 10 + 20 * side + n
                matrix, scale = drawn(*size, dtype=dtype, seed=own, scale=size[0] ** -0.5), None
                if storage:
                    matrix, scale = nearest(matrix, storage)
                given["matrices"].append(matrix)
                given["scales"].append(scale)
        if bias:
            given["biases"] += [
                drawn(N, dtype=dtype, seed=seed + 60 + n, scale=0.2)
                for n, (_, N) in enumerate(SIZES[:3])
            ]
    if not storage:
        given["scales"] = []
    x, before = [drawn(B, M, H, dtype=dtype, seed=seed) for seed in (1, 2)]
    cos, sin = [table.view(B, M, D) for table in angles(B * M, D, dtype)]
    given |= {"x": x, "residual": before if residual else None, "cos": cos, "sin": sin}
    given |= {"positions": torch.tensor(POSITIONS, dtype=torch.int32), "eps": EPS}
    return given | {"window": window}


KINDS = [
    {},
    {"ranks": (0, 0, 0), "head_norm": False},
    {"ranks": (16, 0, 40), "bias": False},
    {"ranks": (16, 0, 8, 0, 0, 40, 20)},
    {"residual": False},
    {"window": 4},
]
"""Kinds of layers: what `operands` takes."""
