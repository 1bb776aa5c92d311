"""`factorize`: the arguments checked, then the method's closed form; and what factors must be."""

import torch
from torch import Tensor

from neuronmm_ops.compress.factorization import (
    Factorization,
    Gradient,
    SecondMoment,
    Side,
    Statistics,
)
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.ops.backends.cpu import name_of


def moment_side(method: str, K: int, N: int) -> Side | None:
    """Return the side of the second moment that a method needs of a `[N, K]` weight, or None."""
    side = METHODS[method].side
    return None if side is None else side(K, N)


def factorize(
    weight: Tensor,
    method: str,
    moment: SecondMoment | None = None,
    max_rank: int | None = None,
    *,
    gradient: Tensor | None = None,
    cross: Tensor | None = None,
) -> Factorization:
    """Factor a weight `[N, K]` by a closed form.

    Args:
        weight: `[N, K]`, as `nn.Linear` holds it; any float dtype.
        method: a name in `METHODS`.
        moment: of the outputs for `swift` where N <= K, not used by `plain`, else of the inputs;
            for `drift` of the inputs that the compressed layers produce.
        max_rank: R of the result; default `min(K, N)`.
        gradient: for `kfac` the mean outer product `[N, N]` of the loss's gradient with respect to
            the output, or where N > K its diagonal `[N]`; for `zero-sum` the gradient `[N, K]` with
            respect to the weight.
        cross: for `drift`, `X.T @ X̂` `[K, K]` of the dense model's inputs X and the inputs X̂ of
            `moment`.

    Raises:
        NonFiniteError: the weight or a statistic holds NaN or Inf.
        ValueError: the method is unknown, or a statistic is missing, of the wrong side or of the
            wrong size.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    N, K = weight.shape
    rank = min(K, N) if max_rank is None else max_rank
    if not 1 <= rank <= min(K, N):
        raise ValueError(f"max_rank must be in 1..min(K, N) = {min(K, N)}, got {rank}")
    w = weight.detach().double()
    if not torch.isfinite(w).all():
        raise NonFiniteError("weight must be finite, got NaN or Inf; the checkpoint is damaged")
    _check_moment(moment, method, K, N)
    expects = METHODS[method]
    if expects.gradient:
        shape = gradient_shape(expects.gradient(K, N), K, N)
        _check_matrix("gradient", gradient, method, shape)
    if expects.follows_drift:
        _check_matrix("cross", cross, method, (K, K))
    return expects.factor(w, Statistics(moment, _double(gradient), _double(cross)), rank)


def gradient_shape(kind: Gradient, K: int, N: int) -> tuple[int, ...]:
    """Return the shape of a gradient statistic of a `[N, K]` weight."""
    return {"scale": (), "diagonal": (N,), "moment": (N, N), "weight": (N, K)}[kind]


def is_finite(tensor: Tensor) -> bool:
    """Say whether no element is NaN or Inf; of floats in one byte, see `check_factors`."""
    is_float = tensor.is_floating_point() and tensor.element_size() > 1
    if tensor.is_meta or not tensor.numel() or not is_float:
        return True
    # A sum of what is not finite is not finite; neither may be one of large values.
    return bool(tensor.sum().isfinite() or torch.stack(tensor.aminmax()).isfinite().all())


def check_finite(name: str, u: Tensor, v: Tensor, remedy: str) -> None:
    """Raise NonFiniteError where a factor of the layer `name` holds NaN or Inf."""
    for key, factor in (("u", u), ("v", v)):
        if not is_finite(factor):
            raise NonFiniteError(
                f"{name}.{key} must be finite in {name_of(factor.dtype)}, got NaN or Inf; {remedy}"
            )


def _check_moment(moment: SecondMoment | None, method: str, K: int, N: int) -> None:
    side = moment_side(method, K, N)
    if side is None:
        return
    size = K if side == "input" else N
    if moment is None:
        raise ValueError(f"method {method} needs the {side} second moment; got none")
    if moment.side != side or moment.matrix.shape != (size, size):
        raise ValueError(
            f"method {method} needs the {side} second moment [{size}, {size}] of a "
            f"[{N}, {K}] weight, got {moment.side} {list(moment.matrix.shape)}"
        )
    if not torch.isfinite(moment.matrix).all():
        raise NonFiniteError("second moment must be finite, got NaN or Inf; check the activations")


def _check_matrix(kind: str, matrix: Tensor | None, method: str, shape: tuple[int, ...]) -> None:
    if matrix is None or matrix.shape != shape:
        got = "none" if matrix is None else list(matrix.shape)
        raise ValueError(f"method {method} needs a {kind} {list(shape)}; got {got}")
    if not torch.isfinite(matrix).all():
        raise NonFiniteError(f"{kind} must be finite, got NaN or Inf; check the activations")


def _double(matrix: Tensor | None) -> Tensor | None:
    return None if matrix is None else matrix.double()
