"""compress_: calibrate, factorize and swap, in place."""

import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from neuronmm_ops.compress.batches import Batch, count_tokens, fingerprint
from neuronmm_ops.compress.calibrate import Progress, collect_moments
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.coverage import left_dense, warn_of_coverage
from neuronmm_ops.compress.factorization import SecondMoment, Side
from neuronmm_ops.compress.factorize import check_finite, factorize, moment_side
from neuronmm_ops.compress.record import attach, dense_parameters
from neuronmm_ops.compress.report import CompressionReport, LayerReport, provenance_of
from neuronmm_ops.compress.targets import Selection, select_targets
from neuronmm_ops.errors import CalibrationWarning, NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.nn.swap import swap_modules_

# With fewer tokens for each input feature, second moments are mostly noise (users of similar
# packages report perplexities in the thousands from 8 samples).
TOKENS_PER_FEATURE = 10


@torch.no_grad()
def compress_(
    model: nn.Module,
    config: SVDConfig | None = None,
    calibration: Iterable[Batch] | None = None,
    progress: Progress | None = None,
) -> CompressionReport:
    """Replace the model's targeted Linears by low-rank pairs, in place.

    Every moment is taken from the dense model; nothing is replaced before the last factor is
    found, so an error leaves the model as it was.

    Args:
        model: a Transformers model, or any module called as `model(batch)` or `model(**batch)`.
        config: what to do; default `SVDConfig()`.
        calibration: batches of token ids `[B, T]`, or mappings of the model's arguments, as
            `collect_moments` takes them; not needed, and not used, by `plain`.
        progress: called with (stage, done, total).

    Returns:
        Rank, loss and bytes of every targeted layer, and the provenance.

    Raises:
        ValueError: no Linear matches, no calibration was given, it has no batches, or the model
            cannot take one (too long, a token id outside the embedding, no decoder inputs).
        NonFiniteError: a weight, an activation or a factor in the weight's dtype is NaN or Inf;
            names the layer.
    """
    config = config or SVDConfig()
    selection = select_targets(model, config)
    ranks = {n: config.rank(m.in_features, m.out_features) for n, m in selection.linears.items()}
    _check_weights(selection.linears)
    warn_of_coverage(model, config, selection, ranks, stacklevel=3)  # past no_grad's wrapper
    swapped = {n: m for n, m in selection.linears.items() if ranks[n] is not None}
    batches = _batches(config, calibration)

    factors: dict[str, tuple[Tensor, Tensor]] = {}
    losses: dict[str, float] = {}
    for name, moment in _moments(model, config, swapped, batches, progress):
        linear, rank = swapped[name], ranks[name]
        assert rank is not None
        factorization = factorize(linear.weight, config.method, moment, rank)
        u, v = factorization.truncate(rank)
        u, v = u.to(linear.weight.dtype), v.to(linear.weight.dtype)
        check_finite(name, u, v, "compress the model in a wider dtype")
        factors[name] = u, v
        losses[name] = factorization.relative_loss(rank)
        if progress:
            progress("factorize", len(factors), len(swapped))
    parameters = dense_parameters(model)
    report = CompressionReport(
        config=config,
        layers=tuple(_layer_reports(selection, ranks, losses)),
        calibration=_describe(batches) if batches and swapped else None,
        provenance=provenance_of(model),
        model_parameters=parameters,
        left_dense=left_dense(model, config, selection, parameters),
    )
    swap_modules_(model, factors)
    attach(model, report)
    return report


def _check_weights(linears: dict[str, DenseLinear]) -> None:
    for name, linear in linears.items():
        if linear.weight.is_meta:
            raise ValueError(f"{name} is on the meta device; load the model's values first")
        if not torch.isfinite(linear.weight).all():
            raise NonFiniteError(
                f"{name}: weight must be finite, got NaN or Inf; the checkpoint is damaged"
            )


def _batches(config: SVDConfig, calibration: Iterable[Batch] | None) -> list[Batch]:
    if not config.needs_calibration:
        return []
    if calibration is None:
        raise ValueError(
            f"method {config.method} needs calibration batches; give some, or use method plain"
        )
    return list(calibration)


def _moments(
    model: nn.Module,
    config: SVDConfig,
    linears: dict[str, DenseLinear],
    batches: list[Batch],
    progress: Progress | None,
) -> Iterator[tuple[str, SecondMoment | None]]:
    sides: dict[str, Side] = {}
    for name, linear in linears.items():
        side = moment_side(config.method, linear.in_features, linear.out_features)
        if side is not None:
            sides[name] = side
    if not sides:
        yield from ((name, None) for name in linears)
        return
    for index, (name, moment) in enumerate(collect_moments(model, sides, batches, progress)):
        if index == 0:
            _warn_if_few(moment.tokens, linears)
        yield name, moment


def _warn_if_few(tokens: int, linears: dict[str, DenseLinear]) -> None:
    name, widest = max(linears.items(), key=lambda item: item[1].in_features)
    needed = TOKENS_PER_FEATURE * widest.in_features
    if tokens < needed:
        warnings.warn(
            f"calibration has {tokens} tokens, fewer than {TOKENS_PER_FEATURE}*K = {needed} of "
            f"{name}; the factors may fit noise, use more text",
            CalibrationWarning,
            stacklevel=5,  # past this module and no_grad's wrapper
        )


def _layer_reports(
    selection: Selection, ranks: Mapping[str, int | None], losses: Mapping[str, float]
) -> Iterator[LayerReport]:
    for name, linear in selection.linears.items():
        reason = "no aligned rank is smaller than the dense matrix" if ranks[name] is None else None
        yield LayerReport.of(name, linear, ranks[name], losses.get(name, 0.0), reason)
    for name, (linear, reason) in selection.kept.items():
        yield LayerReport.of(name, linear, None, 0.0, reason)


def _describe(batches: list[Batch]) -> dict[str, int | str]:
    return {
        "tokens": sum(count_tokens(batch) for batch in batches),
        "batches": len(batches),
        "sha256": fingerprint(batches),
    }
