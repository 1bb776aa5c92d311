"""Rounding a matrix row by row, each row's error fed back into the rows to come, as GPTQ does."""

import torch
from torch import Tensor

from neuronmm_ops.nn.nearest import bfloat16, scales_of
from neuronmm_ops.storages import WeightStorage

# Of the mean of H's diagonal, added to it, as GPTQ does: errors must not pile up where calibration
# saw little, nor the product leave there what it was.
MOMENT_DAMPING = 1e-2
# Of the mean of a Gram matrix's diagonal, added to it to be inverted.
DAMPING = 1e-7
# Rows and columns that are rounded before their errors are fed back to all others.
ROWS, COLUMNS = 128, 64
# Of the scale that the largest number of a group asks for: what is beyond is cut off.
SHARES = tuple(1 - 0.05 * i for i in range(11))


@torch.no_grad()
def rounded(target: Tensor, stored: WeightStorage, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers `[K, N]` and scales of a finite matrix, in fp64.

    Scales are of the matrix as it is, so that rows are rounded in the order of their inputs
    whichever share one.

    Args:
        target: `[K, N]`.
        stored: any storage that has numbers for it.
        moment: H `[K, K]`, of the inputs, in any unit.
    """
    target, moment = target.double(), moment.double()
    moment = moment + ridge_of(moment) * torch.eye(len(moment)).to(target)
    # Rounding starts with the last row.
    order = moment.diagonal().argsort(stable=True)
    back, upper = order.argsort(), _flipped_root(damped(moment[order][:, order]))
    scale = scales_of(target, stored)
    if stored.group is not None:
        scale = _best_scales(target, upper.diagonal()[back] ** -2, scale, stored)
    spread = stored.spread(scale, len(target)).expand_as(target)[order]
    numbers, _ = round_rows(target[order], _unit(upper), stored, spread)
    return numbers[back], scale


def round_rows(
    v: Tensor, feed: Tensor, storage: WeightStorage, known: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Round v `[r, N]`, the last row first, feeding errors back as `feed_of` says.

    Returns:
        The numbers and their scales: those known, `[N]` or `[r, N]`, or those of groups of rows,
        each of what it has become when it is reached.
    """
    v = v.clone()
    rounded, step = torch.empty_like(v), storage.group or ROWS
    scales: list[Tensor] = []
    for start in reversed(range(0, len(v), step)):
        block = v[start : start + step]
        if known is None:
            scales.append(scales_of(block, storage))
        scale = of_rows(scales[-1]) if known is None else known.expand_as(v)[start : start + step]
        scale = scale.expand_as(block)
        errors = torch.empty_like(block)
        for i in reversed(range(len(block))):
            rounded[start + i] = storage.nearest(block[i] / scale[i])
            errors[i] = block[i] - rounded[start + i] * scale[i]
            block[:i].addr_(feed[start + i, start : start + i], errors[i], alpha=-1)
        v[:start].addmm_(feed[start : start + len(block), :start].t(), errors, alpha=-1)
    return rounded, torch.cat(scales[::-1]) if known is None else known


def round_columns(
    v: Tensor, feed: Tensor, metric: Tensor, storage: WeightStorage
) -> tuple[Tensor, Tensor]:
    """Round v `[r, N]`, feeding the errors of each group of columns back by C into those to come.

    The group with the largest weights first. Numbers and scales as `round_rows` returns them.
    """
    order = metric.diagonal().argsort(descending=True, stable=True)
    v = v[:, order]
    upper = _inverse_root(metric[order][:, order])
    rounded, scale, whole = torch.empty_like(v), scales_of(v, storage), whole_scale(v, storage)
    for start in range(0, v.shape[1], COLUMNS):
        part = slice(start, min(start + COLUMNS, v.shape[1]))
        whole_part = None if whole is None else whole[part]
        rounded[:, part], scale[..., part] = round_rows(v[:, part], feed, storage, whole_part)
        errors = v[:, part] - rounded[:, part] * storage.spread(scale[..., part], len(v))
        inside = torch.linalg.solve_triangular(upper[part, part], errors, upper=True, left=False)
        v[:, part.stop :].addmm_(inside, upper[part, part.stop :], alpha=-1)
    back = order.argsort()
    return rounded[:, back], scale[..., back]


def feed_of(gram: Tensor) -> Tensor:
    """Return by what each row's error is fed back into those before it, lower triangular.

    That minimizes the error that remains, `eᵀ S e` of each column, over real numbers in the place
    of the rows to come, from the last on.
    """
    return _unit(_flipped_root(gram))


def _unit(root: Tensor) -> Tensor:
    """Return rows divided by the diagonal's."""
    return root / root.diagonal()[:, None]


def _flipped_root(gram: Tensor) -> Tensor:
    """Return the lower triangular U with `A⁻¹ = UᵀU`, which eliminates the last row first."""
    return _inverse_root(gram.flip(0, 1)).flip(0, 1)


def _inverse_root(matrix: Tensor) -> Tensor:
    """Return the upper triangular U with `A⁻¹ = UᵀU`."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    return torch.linalg.cholesky(symmetric(inverse), upper=True)


def _best_scales(v: Tensor, weights: Tensor, scale: Tensor, storage: WeightStorage) -> Tensor:
    """Return of each group of rows the scale at which rounding to nearest costs least.

    Args:
        v: `[K, N]`.
        weights: `[K]`, what an error in a row costs once the rows that follow make up for it.
        scale: that of the largest numbers; shares of it are tried.
        storage: one whose rows share scales.
    """
    assert storage.group is not None
    best = torch.empty_like(scale)
    groups = zip(v.split(storage.group), weights.split(storage.group), scale, strict=True)
    for group, (rows, weight, largest) in enumerate(groups):
        tried = bfloat16(largest * torch.tensor(SHARES).to(v)[:, None], up=True)
        errors = [weight @ (storage.nearest(rows / s) * s - rows).square() for s in tried]
        best[group] = tried.gather(0, torch.stack(errors).argmin(0, keepdim=True))[0]
    return best


def whole_scale(v: Tensor, storage: WeightStorage) -> Tensor | None:
    """Return the scales of whole columns; None where groups of rows have their own."""
    return scales_of(v, storage) if storage.group is None else None


def of_rows(scale: Tensor) -> Tensor:
    """Return the first, or only, scale of each column."""
    return scale.view(-1, scale.shape[-1])[0]


def ridge_of(moment: Tensor | None) -> float:
    """Return what is added to H's diagonal; 1 to that of a layer whose inputs are all zero."""
    if moment is None:
        return MOMENT_DAMPING
    return MOMENT_DAMPING * float(moment.diagonal().mean()) or 1.0


def damped(gram: Tensor) -> Tensor:
    """Return a Gram matrix such that it has a Cholesky factor: columns may be zero or dependent."""
    mean = float(gram.diagonal().mean())
    damping = DAMPING * mean if mean > 0 else 1.0
    return symmetric(gram) + damping * torch.eye(len(gram)).to(gram)


def symmetric(matrix: Tensor) -> Tensor:
    """Return the mean of a matrix and its transpose."""
    return (matrix + matrix.t()) / 2
