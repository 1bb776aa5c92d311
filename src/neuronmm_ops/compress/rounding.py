"""Factors of the ranks chosen, in one byte: what each is rounded by, and the pass that measures it.

Inputs' moments are taken a second time: ranks are known only after the first, when the moments are
gone, and for some methods those were of the outputs.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.batches import Batch
from neuronmm_ops.compress.calibrate import Progress, moments_or_none
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.factorization import Gradient, SecondMoment, Side
from neuronmm_ops.compress.factorize import check_finite
from neuronmm_ops.compress.methods import METHODS, kfac
from neuronmm_ops.compress.nested import first_method, gradient_kinds
from neuronmm_ops.compress.quantize import Quantized, quantize_pair
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear

# By what `kfac` weighs errors in outputs; other methods' gradients are not of outputs, or a mean.
OUTPUT_KINDS = ("diagonal", "moment")


def round_factors(
    model: nn.Module,
    config: SVDConfig,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    linears: Mapping[str, DenseLinear],
    owners: Mapping[str, int],
    gradients: Mapping[str, Tensor],
    batches: Sequence[Batch],
    progress: Progress | None = None,
) -> dict[str, Quantized]:
    """Return this worker's factors in the config's one-byte storage.

    Args:
        model: still dense.
        config: with a storage of one byte.
        factors: of the Linears that this worker owns and that get a rank.
        linears: all that get a rank, of all workers.
        owners: of each, who rounds it.
        gradients: as the config's method needs them.
        batches: of calibration.
        progress: told of the calibration, and `("quantize", matrices done, matrices in all)`.
    """
    metrics = output_metrics(config, linears, gradients)
    rounded: dict[str, Quantized] = {}
    sides = rounding_sides(config, linears)
    for name, moment in moments_or_none(model, sides, linears, batches, progress):
        if owners[name] != workers.index():
            continue
        rounded[name] = round_pair(
            name, config, factors[name], linears[name].weight, moment, metrics.get(name)
        )
        if progress:
            progress("quantize", len(rounded), len(factors))
    return rounded


def round_pair(
    name: str,
    config: SVDConfig,
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
        config: with a storage of one byte.
        factors: `u[K, r]`, `v[r, N]`.
        weight: which they stand for.
        moment: of the inputs; None where the method knows none.
        metric: of the outputs, as `output_metrics` gives it.
        folded: as `quantize_pair` takes it.
    """
    assert config.one_byte is not None
    matrix = None if moment is None else moment.matrix
    try:
        found = quantize_pair(*factors, config.one_byte, weight.t(), matrix, metric, folded=folded)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from None
    check_finite(name, found.u_scale, found.v_scale, "compress the model in a wider dtype")
    return found


def output_metrics(
    config: SVDConfig, linears: Mapping[str, DenseLinear], gradients: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return by what errors in outputs count, `[N, N]` or `[N]`; without those that count alike."""
    return {n: kfac.damped(gradients[n]) for n in metric_kinds(config, linears)}


def metric_kinds(config: SVDConfig, linears: Mapping[str, DenseLinear]) -> dict[str, Gradient]:
    """Return the gradient statistic by which errors in outputs count, of Linears that have one."""
    kinds = gradient_kinds(config, linears)
    return {name: kind for name, kind in kinds.items() if kind in OUTPUT_KINDS}


def rounding_sides(config: SVDConfig, names: Mapping[str, object]) -> dict[str, Side]:
    """Return the side of the second moment that rounding needs; empty where the method has none."""
    return dict.fromkeys(names, "input") if METHODS[first_method(config)].side else {}
