"""compress_: calibrate, factorize, allocate and swap, in place."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.allocate import Rank
from neuronmm_ops.compress.batches import Batch, count_tokens, fingerprint
from neuronmm_ops.compress.budget import allocate, matrix_of, ratio_bounds
from neuronmm_ops.compress.calibrate import Progress, moments_or_none
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.coverage import left_dense, warn_of_coverage
from neuronmm_ops.compress.drift import follow_drift
from neuronmm_ops.compress.factorization import SecondMoment
from neuronmm_ops.compress.gradients import collect_gradients
from neuronmm_ops.compress.importance import weights_of
from neuronmm_ops.compress.methods import METHODS
from neuronmm_ops.compress.nested import Nested, gradient_kinds, known_to_all, moment_sides
from neuronmm_ops.compress.record import attach, dense_parameters
from neuronmm_ops.compress.report import CompressionReport, LayerReport, provenance_of
from neuronmm_ops.compress.rounding import round_factors
from neuronmm_ops.compress.targets import Selection, select_targets
from neuronmm_ops.errors import CalibrationWarning, NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.nn.swap import swap_modules_
from neuronmm_ops.ops.backends.cpu import name_of

# With fewer tokens for each input feature, second moments are mostly noise (users of similar
# packages report perplexities in the thousands from 8 samples).
TOKENS_PER_FEATURE = 10


@torch.no_grad()
def compress_(
    model: nn.Module,
    config: SVDConfig | None = None,
    calibration: Iterable[Batch] | None = None,
    progress: Progress | None = None,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> CompressionReport:
    """Replace the model's targeted Linears by low-rank pairs, in place.

    Nothing is replaced before the last factor is found, so an error leaves the model as it was.
    Until then the factors of the largest ranks that the allocation may choose are held, at most as
    large as the targeted matrices themselves. In a block of `workers.together` the calibration and
    the factorizations are shared by many processes, all of which end with the same model.

    Args:
        model: a Transformers model, or any module called as `model(batch)` or `model(**batch)`.
        config: what to do; default `SVDConfig()`.
        calibration: batches of token ids `[B, T]`, or mappings of the model's arguments, as
            `collect_moments` takes them; not needed by `plain`, unless losses are weighed by
            gradients or perplexity.
        progress: called with (stage, done, total).
        dtypes: of the Linears' weights, where the model is held in others than those that it will
            be stored in: budgets of bytes and time, and storage `bf16`, go by what is stored.

    Returns:
        Rank, loss and bytes of every targeted layer, and the provenance.

    Raises:
        ValueError: no Linear matches, no calibration was given, it has no batches, the model
            cannot take one (too long, a token id outside the embedding, no decoder inputs), or no
            allocation meets the budget.
        NonFiniteError: a weight, an activation, a gradient or a factor in the weight's dtype is
            NaN or Inf; names the layer.
    """
    config = config or SVDConfig()
    selection = select_targets(model, config)
    check_weights(selection.linears)
    dtypes = {n: m.weight.dtype for n, m in selection.linears.items()} | dict(dtypes or {})
    check_storage(config, selection.linears, dtypes)
    limits = rank_limits(config, selection.linears, dtypes)
    warn_of_coverage(model, config, selection, limits, stacklevel=3)  # past no_grad's wrapper
    linears = {n: m for n, m in selection.linears.items() if limits[n] is not None}
    check_budget(config, linears, limits, dtypes)
    batches = _batches(config, calibration) if linears else []

    kinds = gradient_kinds(config, linears)
    gradients = collect_gradients(model, kinds, batches, progress) if kinds else {}
    owners = workers.spread(linears)
    own: dict[str, Nested] = {}
    for name, moment in _moments(model, config, linears, batches, progress):
        rank = limits[name]
        assert rank is not None
        if owners[name] != workers.index():
            continue
        own[name] = Nested.of(name, linears[name].weight, config, moment, gradients.get(name), rank)
        if progress:
            progress("factorize", len(own), list(owners.values()).count(workers.index()))
    found = known_to_all(own, linears)
    weights = weights_of(model, config, linears, found, gradients, batches, progress)
    ranks = dict(limits) | choose_ranks(config, selection.linears, found, weights, dtypes)

    bought = {name: r for name, r in ranks.items() if r is not None}
    kept = {
        name: _stored(own[name].truncate(rank), dtypes[name], config)
        for name, rank in bought.items()
        if name in own
    }
    losses = {name: found[name].relative_loss(rank) for name, rank in bought.items()}
    if METHODS[config.method].follows_drift:
        pairs = workers.exchange(kept, owners, linears)
        factors, losses = follow_drift(
            model, config.method, pairs, batches, progress, config.one_byte
        )
    elif config.one_byte:
        chosen = {name: linears[name] for name in bought}
        rounded = round_factors(model, config, kept, chosen, owners, gradients, batches, progress)
        factors = workers.exchange(rounded, owners, linears)
    else:
        factors = workers.exchange(kept, owners, linears)
    report = report_of_layers(model, config, selection, limits, ranks, losses, batches)
    swap_modules_(model, factors)
    attach(model, report)
    return report


def rank_limits(
    config: SVDConfig, linears: Mapping[str, DenseLinear], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Rank]:
    """Return the largest rank that each layer may get; None where it can only stay dense."""
    limits: dict[str, Rank] = {}
    for name, linear in linears.items():
        if config.allocation == "uniform":
            bounds = ratio_bounds(config, name)
            limits[name] = config.rank(linear.in_features, linear.out_features, bounds)
        else:
            matrix = matrix_of(config, name, linear, dtypes[name], torch.zeros(0))
            ranks = matrix.ranks(config.block)
            limits[name] = max((rank for rank in ranks if rank is not None), default=None)
    return limits


def choose_ranks(
    config: SVDConfig,
    linears: Mapping[str, DenseLinear],
    found: Mapping[str, Nested],
    weights: Mapping[str, float],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Rank]:
    """Return the ranks that the config's budget buys of the factors found."""
    matrices = {
        name: matrix_of(
            *(config, name, linears[name], dtypes[name]),
            *(nested.spectrum, weights[name], nested.scores),
        )
        for name, nested in found.items()
    }
    return allocate(config, matrices, dtypes)


def check_storage(
    config: SVDConfig, linears: Mapping[str, DenseLinear], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Raise ValueError where the config asks for bfloat16 factors of Linears of another dtype."""
    odd = next((name for name in linears if dtypes[name] != torch.bfloat16), None)
    if config.storage == "bf16" and odd is not None:
        raise ValueError(
            f"storage bf16 needs Linears in bfloat16, {odd} is in {name_of(dtypes[odd])}; cast the "
            "model, or leave storage out to keep its dtype"
        )


def check_budget(
    config: SVDConfig,
    linears: Mapping[str, DenseLinear],
    limits: Mapping[str, Rank],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Raise ValueError where no ranks meet the budget, before any of the work is done."""
    nothing = {
        name: torch.zeros(min(linear.in_features, linear.out_features))
        for name, linear in linears.items()
        if limits[name] is not None
    }
    unknown = {name: Nested(None, losses, losses) for name, losses in nothing.items()}
    choose_ranks(config, linears, unknown, dict.fromkeys(unknown, 1.0), dtypes)


def check_weights(linears: Mapping[str, DenseLinear]) -> None:
    """Raise where a weight is on the meta device or not finite."""
    for name, linear in linears.items():
        if linear.weight.is_meta:
            raise ValueError(f"{name} is on the meta device; load the model's values first")
        if not torch.isfinite(linear.weight).all():
            raise NonFiniteError(
                f"{name}: weight must be finite, got NaN or Inf; the checkpoint is damaged"
            )


def _stored(
    factors: tuple[Tensor, Tensor], dtype: torch.dtype, config: SVDConfig
) -> tuple[Tensor, Tensor]:
    """Return factors that are to be rounded in what they would be stored in else, as streamed."""
    u, v = factors
    return (u.to(dtype), v.to(dtype)) if config.one_byte else factors


def _batches(config: SVDConfig, calibration: Iterable[Batch] | None) -> list[Batch]:
    if not config.needs_calibration:
        return []
    if calibration is None:
        raise ValueError(
            f"{config.calibrated_by} needs calibration batches; give some, or use method plain"
        )
    return list(calibration)


def _moments(
    model: nn.Module,
    config: SVDConfig,
    linears: Mapping[str, DenseLinear],
    batches: Sequence[Batch],
    progress: Progress | None,
) -> Iterator[tuple[str, SecondMoment | None]]:
    sides = moment_sides(config, linears)
    found = moments_or_none(model, sides, linears, batches, progress)
    for index, (name, moment) in enumerate(found):
        if index == 0 and moment is not None:
            warn_if_few(moment.tokens, linears, stacklevel=5)  # past this module and no_grad's
        yield name, moment


def warn_if_few(tokens: int, linears: Mapping[str, DenseLinear], stacklevel: int) -> None:
    """Warn where there are too few calibration tokens for the widest layer."""
    name, widest = max(linears.items(), key=lambda item: item[1].in_features)
    needed = TOKENS_PER_FEATURE * widest.in_features
    if tokens < needed:
        warnings.warn(
            f"calibration has {tokens} tokens, fewer than {TOKENS_PER_FEATURE}*K = {needed} of "
            f"{name}; the factors may fit noise, use more text",
            CalibrationWarning,
            stacklevel=stacklevel,
        )


def report_of_layers(
    model: nn.Module,
    config: SVDConfig,
    selection: Selection,
    limits: Mapping[str, Rank],
    ranks: Mapping[str, Rank],
    losses: Mapping[str, float],
    batches: Sequence[Batch],
) -> CompressionReport:
    """Return what `compress_` reports.

    Args:
        model: still dense.
        config: the config used.
        selection: the targeted layers, and those among them that are kept.
        limits: the largest rank that each layer might get, as `rank_limits` says.
        ranks: of each layer.
        losses: the relative loss of each layer that gets a rank.
        batches: of calibration; none where the config needs none.
    """
    parameters = dense_parameters(model)
    return CompressionReport(
        config=config,
        layers=tuple(_layer_reports(selection, limits, ranks, losses, config.one_byte)),
        calibration=describe_batches(batches) if batches else None,
        provenance=provenance_of(model),
        model_parameters=parameters,
        left_dense=left_dense(model, config, selection, parameters),
    )


def _layer_reports(
    selection: Selection,
    limits: Mapping[str, Rank],
    ranks: Mapping[str, Rank],
    losses: Mapping[str, float],
    storage: str | None,
) -> Iterator[LayerReport]:
    """Yield the report of every targeted layer, those that stay dense with the reason."""
    for name, linear in selection.linears.items():
        reason = None
        if limits[name] is None:
            reason = "no aligned rank is smaller than the dense matrix"
        elif ranks[name] is None:
            reason = "the allocation keeps it dense"
        yield LayerReport.of(name, linear, ranks[name], losses.get(name, 0.0), reason, storage)
    for name, (linear, reason) in selection.kept.items():
        yield LayerReport.of(name, linear, None, 0.0, reason)


def describe_batches(batches: Sequence[Batch]) -> dict[str, int | str]:
    """Return what a report says of the calibration batches."""
    return {
        "tokens": sum(count_tokens(batch) for batch in batches),
        "batches": len(batches),
        "sha256": fingerprint(batches),
    }
