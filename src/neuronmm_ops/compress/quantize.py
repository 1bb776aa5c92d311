"""Rounding a low-rank pair to one byte a number or less, where it costs the outputs least.

A pair u v stands for W.T. Inputs have the second moment H `[K, K]`, output errors count by C
`[N, N]` (the identity where a method has none): an error D `[K, N]` of the product costs
`tr(Dᵀ H D C)`. Of two factors one may be rounded for nothing but a change of what they span: the
other, solved for again, absorbs the rest. So

1. *gauge*: `u A, A⁻¹ v` are the same product for any invertible A `[r, r]`. In the one where
   `uᵀHu = Σ²` and v's rows are orthonormal, rounding v costs by the arithmetic mean of Σ², with no
   error to feed back: Σ² is diagonal. Turned by the geometric mean decomposition Σ = Q R Pᵀ (Jiang,
   Hager, Li 2005; R's diagonal is constant), A = P, `uᵀHu = RᵀR`, it costs by the geometric mean,
   which is the least that feedback can reach in any gauge.
2. *u* is rounded to nearest, each column, or group of its rows, with its scale.
3. *v* is solved for again: `v = (ûᵀHû)⁻¹ ûᵀH W.T`, the same for every C.
4. *v* is rounded row by row, and each row's error is fed back into the rows to come, as GPTQ
   (arXiv 2210.17323) does with a weight's columns; with a full C, group of columns by group of
   columns, into the columns to come too. The scale of a group of rows is that of what they have
   become when its first is reached.

`loss(û, v̂) = loss(û, v) + tr((v̂ − v)ᵀ S (v̂ − v) C)`, S = ûᵀHû, exactly, v being that of step 3.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm_ops.compress.feedback import (
    damped,
    feed_of,
    of_rows,
    ridge_of,
    round_columns,
    round_rows,
    rounded,
    symmetric,
    whole_scale,
)
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.nearest import bfloat16, nearest, scales_of
from neuronmm_ops.storages import STORAGES, WeightStorage, checked, dequantized, pair_shapes

# Singular values below this share of the largest count as it: no gauge makes more of them.
MIN_SIGMA = 1e-3


class Quantized(NamedTuple):
    """A pair in a storage: `W.T ≈ (u u_scale) (v v_scale)`.

    Attributes:
        u: `[K, r]`.
        v: `[r, N]`.
        u_scale: `[r]`, float32, positive, exact in bfloat16; also what v's rows were divided by.
        v_scale: `[N]`, as u_scale. Tensors and scales have the shapes of `storages.pair_shapes`.
    """

    u: Tensor
    v: Tensor
    u_scale: Tensor
    v_scale: Tensor

    def widened(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return `u[K, r]` and `v[r, N]` with their scales multiplied in."""
        return dequantized(self.u, self.u_scale, dtype), dequantized(self.v, self.v_scale, dtype)


class QuantizedMatrix(NamedTuple):
    """A matrix in a storage: `W.T ≈ w w_scale`.

    Attributes:
        w: `[K, N]`.
        w_scale: `[N]`, float32, positive, exact in bfloat16.
    """

    w: Tensor
    w_scale: Tensor


@torch.no_grad()
def quantize_pair(
    u: Tensor,
    v: Tensor,
    storage: str,
    target: Tensor,
    moment: Tensor | None = None,
    metric: Tensor | None = None,
    *,
    folded: bool = False,
) -> Quantized:
    """Round a pair to the numbers of a storage.

    Args:
        u: `[K, r]`.
        v: `[r, N]`.
        storage: of `STORAGES`.
        target: `[K, N]`, what u v approximates: `W.T`; with cross moments what they say is best.
        moment: H `[K, K]`, of the inputs, in any unit; None is the identity.
        metric: C `[N, N]`, positive definite, or its diagonal `[N]`; None is the identity.
        folded: leave u's scales at 1, v's rows taking them in: to show what they are kept for.

    Raises:
        ValueError: the storage is unknown, or shapes do not fit.
        NonFiniteError: a number is NaN or Inf.
    """
    stored = _check(u, v, storage, target, moment, metric)
    u, v, target = u.double(), v.double(), target.double()
    moment = None if moment is None else moment.double()
    metric = None if metric is None else metric.double()
    ridge = ridge_of(moment)
    u, v = _gauge(u, v, moment, ridge, metric)
    column_scale = scales_of(u, stored)
    spread = stored.spread(column_scale, len(u))
    stored_u = stored.nearest(u / spread)
    exact_u, u = u, stored_u * spread

    hu = u if moment is None else moment @ u
    gram = hu.t() @ u + ridge * (u.t() @ u)
    # Towards the target as H says, and where that says nothing towards what the product was.
    change = hu.t() @ target - (gram - ridge * (u.t() @ exact_u)) @ v
    gram = damped(gram)
    v = v + torch.cholesky_solve(change, torch.linalg.cholesky(gram))
    row_scale = torch.ones_like(column_scale) if folded else _row_scale(v, column_scale)
    by = of_rows(row_scale / column_scale)
    v, gram = v / by[:, None], by[:, None] * gram * by
    if metric is None or metric.dim() == 1:
        stored_v, v_scale = round_rows(v, feed_of(gram), stored, whole_scale(v, stored))
    else:
        stored_v, v_scale = round_columns(v, feed_of(gram), metric, stored)
    return Quantized(
        stored.encode(stored_u), stored.encode(stored_v), row_scale.float(), v_scale.float()
    )


@torch.no_grad()
def quantize_matrix(target: Tensor, storage: str, moment: Tensor | None = None) -> QuantizedMatrix:
    """Round a dense matrix to one byte a number or less.

    Row by row, those first whose inputs are largest, and each row's error is fed back into the rows
    to come, as GPTQ does. Without a moment it is rounded to nearest.

    Args:
        target: `[K, N]`, `W.T`.
        storage: of `STORAGES`.
        moment: H `[K, K]`, of the inputs, in any unit; None is the identity.

    Raises:
        ValueError: the storage is unknown.
        NonFiniteError: a number is NaN or Inf.
    """
    stored = _finite(storage, {"weight": target, "second moment": moment})
    if moment is None:
        return QuantizedMatrix(*nearest(target.double(), stored))
    numbers, scale = rounded(target, stored, moment)
    return QuantizedMatrix(stored.encode(numbers), scale.float())


def nearest_pair(u: Tensor, v: Tensor, storage: str) -> Quantized:
    """Round a pair `u[K, r]`, `v[r, N]` to nearest, to compare with; v's rows equally long."""
    stored_u, column_scale = nearest(u, STORAGES[storage])
    row_scale = _row_scale(v.double(), column_scale.double())
    stored_v, v_scale = nearest(v / of_rows(row_scale / column_scale)[:, None], STORAGES[storage])
    return Quantized(stored_u, stored_v, row_scale.float(), v_scale)


def pair_loss(
    u: Tensor, v: Tensor, target: Tensor, moment: Tensor | None, metric: Tensor | None
) -> float:
    """Return `tr(Dᵀ H D C)` of the error D of a pair, as `quantize_pair` takes H and C."""
    return error_loss(u.double() @ v.double() - target.double(), moment, metric)


def error_loss(error: Tensor, moment: Tensor | None, metric: Tensor | None) -> float:
    """Return `tr(Dᵀ H D C)` of an error D `[K, N]`, fp64, as `quantize_pair` takes H and C."""
    left = error if moment is None else moment.double() @ error
    if metric is None:
        return float((error * left).sum())
    right = error @ metric.double() if metric.dim() == 2 else error * metric.double()
    return float((right * left).sum())


def _gauge(
    u: Tensor, v: Tensor, moment: Tensor | None, ridge: float, metric: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the same product with v's rows orthonormal and `uᵀHu = RᵀR`, R's diagonal constant.

    Rows are orthonormal by C's diagonal: an error fed back along columns meets no more of it.
    """
    weights = None if metric is None else metric if metric.dim() == 1 else metric.diagonal()
    gram = damped(u.t() @ (u if moment is None else moment @ u) + ridge * (u.t() @ u))
    outer = symmetric((v if weights is None else v * weights) @ v.t())
    # Both well conditioned: H may be singular, and v's rows dependent.
    low = torch.linalg.cholesky(gram)
    spectrum, vectors = torch.linalg.eigh(symmetric(low.t() @ outer @ low))
    sigma = spectrum.flip(0).clamp_min(0).sqrt()
    if not float(sigma[0]) > 0:
        return u, v
    sigma = sigma.clamp_min(MIN_SIGMA * float(sigma[0]))
    turn = vectors.flip(1)
    right = geometric_mean_turn(sigma)
    into = torch.linalg.solve_triangular(low.t(), turn * sigma, upper=True) @ right
    back = right.t() @ ((turn / sigma).t() @ (low.t() @ v))
    return u @ into, back


def geometric_mean_turn(sigma: Tensor) -> Tensor:
    """Return the orthogonal P with `diag(σ) = Q R Pᵀ`, R upper triangular, its diagonal constant.

    Jiang, Hager, Li, The geometric mean decomposition, Linear Algebra Appl. 396 (2005).

    Args:
        sigma: `[r]`, positive, fp64.
    """
    mean = float(sigma.log().mean().exp())
    values = sigma.tolist()
    turn = torch.eye(len(values), dtype=sigma.dtype, device=sigma.device)
    # Of what is left the largest and the smallest: the mean lies between them.
    columns = sorted(range(len(values)), key=lambda i: -values[i])
    left = [(values[i], turn[:, i].clone()) for i in columns]
    columns_of_turn: list[Tensor] = []
    while len(left) > 1:
        (large, a), (small, b) = left.pop(0), left.pop()
        gap = large**2 - small**2
        c2 = min(1.0, max(0.0, (mean**2 - small**2) / gap)) if gap > 1e-14 * large**2 else 1.0
        c, s = c2**0.5, (1 - c2) ** 0.5
        columns_of_turn.append(c * a + s * b)
        other = (large * small / mean, c * b - s * a)
        position = next((i for i, (value, _) in enumerate(left) if value < other[0]), len(left))
        left.insert(position, other)
    return torch.stack([*columns_of_turn, left[0][1]], dim=1)


def _row_scale(v: Tensor, column_scale: Tensor) -> Tensor:
    """Return u's scale, which takes up the length of v's rows: then all are equally long.

    Where groups share scales, by a power of two, which is the same for all of a column's.
    """
    length = v.norm(dim=1)
    length = torch.where(length > 0, length, 1.0)
    return bfloat16(
        column_scale * (length if column_scale.dim() == 1 else length.log2().round().exp2())
    )


def _check(
    u: Tensor,
    v: Tensor,
    storage: str,
    target: Tensor,
    moment: Tensor | None,
    metric: Tensor | None,
) -> WeightStorage:
    """Return the storage of that name, once all arguments are valid."""
    checked(storage)
    K, N = target.shape
    if u.dim() != 2 or v.dim() != 2 or (len(u), v.shape[1]) != (K, N) or u.shape[1] != len(v):
        raise ValueError(
            f"u must be [{K}, r] and v [r, {N}], got {list(u.shape)} and {list(v.shape)}"
        )
    if moment is not None and moment.shape != (K, K):
        raise ValueError(f"the moment must be [{K}, {K}], got {list(moment.shape)}")
    if metric is not None and metric.shape not in ((N, N), (N,)):
        raise ValueError(f"the metric must be [{N}, {N}] or [{N}], got {list(metric.shape)}")
    pair_shapes(K, N, len(v), storage)  # or it says why a storage has none
    named = {"u": u, "v": v, "weight": target, "second moment": moment, "metric": metric}
    return _finite(storage, named)


def _finite(storage: str, named: Mapping[str, Tensor | None]) -> WeightStorage:
    """Return the storage of that name, once nothing that is rounded to it is NaN or Inf."""
    checked(storage)
    for name, tensor in named.items():
        if tensor is not None and not torch.isfinite(tensor).all():
            raise NonFiniteError(
                f"{name} must be finite to be rounded to {storage}, got NaN or Inf"
            )
    return STORAGES[storage]
