"""Rounding the matrices of one layer to one byte, by what the config's method knows of it."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.factorization import SecondMoment, Side
from neuronmm_ops.compress.factorize import check_finite
from neuronmm_ops.compress.methods import METHODS, kfac
from neuronmm_ops.compress.nested import first_method, gradient_kinds
from neuronmm_ops.compress.quantize import (
    Quantized,
    QuantizedMatrix,
    quantize_matrix,
    quantize_pair,
)
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear

# By what `kfac` weighs errors in outputs; other methods' gradients are not of outputs, or a mean.
OUTPUT_KINDS = ("diagonal", "moment")


def round_pair(
    name: str,
    storage: str,
    factors: tuple[Tensor, Tensor],
    weight: Tensor,
    moment: SecondMoment | None,
    metric: Tensor | None,
    *,
    folded: bool = False,
) -> Quantized:
    """Round the factors of one layer's weight `[N, K]`; raise NonFiniteError with its name.

    Args:
        name: of the layer.
        storage: of `STORAGES`.
        factors: `u[K, r]`, `v[r, N]`.
        weight: which they stand for.
        moment: of the inputs; None where the method knows none.
        metric: of the outputs, as `output_metrics` gives it.
        folded: as `quantize_pair` takes it.
    """
    matrix = None if moment is None else moment.matrix
    try:
        pair = quantize_pair(*factors, storage, weight.t(), matrix, metric, folded=folded)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from None
    check_finite(name, pair.u_scale, pair.v_scale, "compress the model in a wider dtype")
    return pair


def round_matrix(
    name: str, storage: str, weight: Tensor, moment: SecondMoment | None
) -> QuantizedMatrix:
    """Round the weight `[N, K]` of a layer that stays dense, as `round_pair` does a pair.

    By the inputs alone: measured, the outputs' metric wins 2 % where it takes N / 64 times as long.
    """
    try:
        return quantize_matrix(weight.t(), storage, None if moment is None else moment.matrix)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from None


def output_metrics(
    config: SVDConfig, linears: Mapping[str, DenseLinear], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return by what errors in outputs count, `[N, N]` or `[N]`; without those that count alike."""
    kinds = gradient_kinds(config, linears)
    return {n: kfac.damped(gradients[n]) for n, kind in kinds.items() if kind in OUTPUT_KINDS}


def rounding_sides(config: SVDConfig, names: Iterable[str]) -> dict[str, Side]:
    """Return the side of the second moment that rounding needs; empty where the method has none."""
    return dict.fromkeys(names, "input") if METHODS[first_method(config)].side else {}
