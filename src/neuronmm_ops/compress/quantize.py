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

from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.nearest import bfloat16, nearest, scales_of
from neuronmm_ops.storages import STORAGES, WeightStorage, checked, dequantized, pair_shapes

# Of the mean of H's diagonal, added to it, as GPTQ does: errors must not pile up where calibration
# saw little, nor the product leave there what it was.
MOMENT_DAMPING = 1e-2
# Of the mean of a Gram matrix's diagonal, added to it to be inverted.
DAMPING = 1e-7
# Singular values below this share of the largest count as it: no gauge makes more of them.
MIN_SIGMA = 1e-3
# Rows and columns that are rounded before their errors are fed back to all others.
ROWS, COLUMNS = 128, 64


class Quantized(NamedTuple):
    """A pair in a storage: `W.T ≈ (u u_scale) (v v_scale)`.

    Attributes:
        u: `[K, r]`.
        v: `[r, N]`.
        u_scale: `[r]`, float32, positive, exact in bfloat16; also what v's rows were divided by.
        v_scale: `[N]`, likewise. Tensors and scales have the shapes of `storages.pair_shapes`.
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
    ridge = _ridge(moment)
    u, v = _gauge(u, v, moment, ridge, metric)
    column_scale = scales_of(u, stored)
    spread = stored.spread(column_scale, len(u))
    stored_u = stored.nearest(u / spread)
    exact_u, u = u, stored_u * spread

    hu = u if moment is None else moment @ u
    gram = hu.t() @ u + ridge * (u.t() @ u)
    # Towards the target as H says, and where that says nothing towards what the product was.
    change = hu.t() @ target - (gram - ridge * (u.t() @ exact_u)) @ v
    gram = _damped(gram)
    v = v + torch.cholesky_solve(change, torch.linalg.cholesky(gram))
    row_scale = torch.ones_like(column_scale) if folded else _row_scale(v, column_scale)
    by = _of_rows(row_scale / column_scale)
    v, gram = v / by[:, None], by[:, None] * gram * by
    if metric is None or metric.dim() == 1:
        stored_v, v_scale = _round_rows(v, _feed(gram), stored, _whole_scale(v, stored))
    else:
        stored_v, v_scale = _round_columns(v, _feed(gram), metric, stored)
    return Quantized(
        stored.encode(stored_u), stored.encode(stored_v), row_scale.float(), v_scale.float()
    )


@torch.no_grad()
def quantize_matrix(target: Tensor, storage: str, moment: Tensor | None = None) -> QuantizedMatrix:
    """Round a dense matrix to one byte a number.

    Row by row, where no rows share scales those first whose inputs are largest, and each row's
    error is fed back into the rows to come, as GPTQ does. Without a moment it is rounded to
    nearest.

    Args:
        target: `[K, N]`, `W.T`.
        storage: of `STORAGES`.
        moment: H `[K, K]`, of the inputs, in any unit; None is the identity.

    Raises:
        ValueError: the storage is unknown.
        NonFiniteError: a number is NaN or Inf.
    """
    stored = _finite(storage, {"weight": target, "second moment": moment})
    target = target.double()
    if moment is None:
        return QuantizedMatrix(*nearest(target, stored))
    moment = moment.double() + _ridge(moment) * torch.eye(len(moment)).to(target)
    # Rounding starts with the last row; rows that share scales stay together.
    order = moment.diagonal().argsort(stable=True)
    if stored.group is not None:
        order = order.sort().values
    feed = _feed(_damped(moment[order][:, order]))
    numbers, scale = _round_rows(target[order], feed, stored, _whole_scale(target, stored))
    return QuantizedMatrix(stored.encode(numbers[order.argsort()]), scale.float())


def nearest_pair(u: Tensor, v: Tensor, storage: str) -> Quantized:
    """Round a pair `u[K, r]`, `v[r, N]` to nearest, to compare with; v's rows equally long."""
    stored_u, column_scale = nearest(u, STORAGES[storage])
    row_scale = _row_scale(v.double(), column_scale.double())
    stored_v, v_scale = nearest(v / _of_rows(row_scale / column_scale)[:, None], STORAGES[storage])
    return Quantized(stored_u, stored_v, row_scale.float(), v_scale)


def pair_loss(
    u: Tensor, v: Tensor, target: Tensor, moment: Tensor | None, metric: Tensor | None
) -> float:
    """Return `tr(Dᵀ H D C)` of the error D of a pair, as `quantize_pair` takes H and C."""
    error = u.double() @ v.double() - target.double()
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
    gram = _damped(u.t() @ (u if moment is None else moment @ u) + ridge * (u.t() @ u))
    outer = _symmetric((v if weights is None else v * weights) @ v.t())
    # Both well conditioned: H may be singular, and v's rows dependent.
    low = torch.linalg.cholesky(gram)
    spectrum, vectors = torch.linalg.eigh(_symmetric(low.t() @ outer @ low))
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


def _whole_scale(v: Tensor, storage: WeightStorage) -> Tensor | None:
    """Return the scales of whole columns; None where groups of rows have their own."""
    return scales_of(v, storage) if storage.group is None else None


def _round_rows(
    v: Tensor, feed: Tensor, storage: WeightStorage, whole: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Round v `[r, N]`, the last row first, feeding errors back as `_feed` says.

    Returns:
        The numbers and their scales: `whole`, or those of groups of rows, each of what it has
        become when it is reached.
    """
    v = v.clone()
    rounded, step = torch.empty_like(v), storage.group or ROWS
    scales: list[Tensor] = []
    for start in reversed(range(0, len(v), step)):
        block = v[start : start + step]
        scale = scales_of(block, storage) if whole is None else whole
        scales.append(scale)
        row_scale = _of_rows(scale)
        errors = torch.empty_like(block)
        for i in reversed(range(len(block))):
            rounded[start + i] = storage.nearest(block[i] / row_scale)
            errors[i] = block[i] - rounded[start + i] * row_scale
            block[:i].addr_(feed[start + i, start : start + i], errors[i], alpha=-1)
        v[:start].addmm_(feed[start : start + len(block), :start].t(), errors, alpha=-1)
    return rounded, torch.cat(scales[::-1]) if whole is None else whole


def _round_columns(
    v: Tensor, feed: Tensor, metric: Tensor, storage: WeightStorage
) -> tuple[Tensor, Tensor]:
    """Round v `[r, N]`, feeding the errors of each group of columns back by C into those to come.

    The group with the largest weights first. Numbers and scales as `_round_rows` returns them.
    """
    order = metric.diagonal().argsort(descending=True, stable=True)
    v = v[:, order]
    upper = _inverse_root(metric[order][:, order])
    rounded, scale, whole = torch.empty_like(v), scales_of(v, storage), _whole_scale(v, storage)
    for start in range(0, v.shape[1], COLUMNS):
        part = slice(start, min(start + COLUMNS, v.shape[1]))
        own = None if whole is None else whole[part]
        rounded[:, part], scale[..., part] = _round_rows(v[:, part], feed, storage, own)
        errors = v[:, part] - rounded[:, part] * storage.spread(scale[..., part], len(v))
        inside = torch.linalg.solve_triangular(upper[part, part], errors, upper=True, left=False)
        v[:, part.stop :].addmm_(inside, upper[part, part.stop :], alpha=-1)
    back = order.argsort()
    return rounded[:, back], scale[..., back]


def _feed(gram: Tensor) -> Tensor:
    """Return by what each row's error is fed back into those before it, lower triangular.

    That minimizes the error that remains, `eᵀ S e` of each column, over real numbers in the place
    of the rows to come: from the last on, as `_gauge` has ordered them.
    """
    upper = _inverse_root(gram.flip(0, 1))
    return (upper / upper.diagonal()[:, None]).flip(0, 1)


def _inverse_root(matrix: Tensor) -> Tensor:
    """Return the upper triangular U with `A⁻¹ = UᵀU`."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    return torch.linalg.cholesky(_symmetric(inverse), upper=True)


def _row_scale(v: Tensor, column_scale: Tensor) -> Tensor:
    """Return u's scale: by what v's rows are divided, beside u's columns, to be equally long.

    Where groups share scales, by a power of two, which is the same for all of a column's.
    """
    length = v.norm(dim=1)
    length = torch.where(length > 0, length, 1.0)
    return bfloat16(
        column_scale * (length if column_scale.dim() == 1 else length.log2().round().exp2())
    )


def _of_rows(scale: Tensor) -> Tensor:
    """Return the first, or only, scale of each column."""
    return scale.view(-1, scale.shape[-1])[0]


def _ridge(moment: Tensor | None) -> float:
    """Return what is added to H's diagonal; 1 to that of a layer whose inputs are all zero."""
    if moment is None:
        return MOMENT_DAMPING
    return MOMENT_DAMPING * float(moment.diagonal().mean()) or 1.0


def _damped(gram: Tensor) -> Tensor:
    """Return a Gram matrix such that it has a Cholesky factor: columns may be zero or dependent."""
    mean = float(gram.diagonal().mean())
    damping = DAMPING * mean if mean > 0 else 1.0
    return _symmetric(gram) + damping * torch.eye(len(gram)).to(gram)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.t()) / 2


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
