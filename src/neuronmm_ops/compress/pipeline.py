"""The pipeline: calibrate, factorize, allocate, round and swap, over a source of layers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.allocate import Matrix, Rank
from neuronmm_ops.compress.batches import Batch, check_batches, count_tokens, fingerprint
from neuronmm_ops.compress.budget import allocate, choose, matrix_of, ratio_bounds
from neuronmm_ops.compress.calibrate import Progress, warn_if_few
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.coverage import left_dense, warn_of_coverage
from neuronmm_ops.compress.drift import drifting_names, factors_of, follow_drift, followable
from neuronmm_ops.compress.importance import weights_of
from neuronmm_ops.compress.measured import Divergence, Losses, losses_of
from neuronmm_ops.compress.mixed import largest_rank, probed_ranks
from neuronmm_ops.compress.nested import Nested, gradient_kinds, known_to_all, moment_sides
from neuronmm_ops.compress.record import attach, dense_parameters
from neuronmm_ops.compress.report import (
    CompressionReport,
    LayerReport,
    NarrowedMLPs,
    provenance_of,
)
from neuronmm_ops.compress.rounding import (
    output_metrics,
    round_matrix,
    round_pair,
    rounding_sides,
)
from neuronmm_ops.compress.source import LayersInMemory, LayerSource, Task
from neuronmm_ops.compress.targets import Selection, select_targets
from neuronmm_ops.compress.width import narrowed
from neuronmm_ops.compress.workers import Factors
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.nn.swap import swap_modules_
from neuronmm_ops.ops.backends.cpu import name_of


def compress_(
    model: nn.Module,
    config: SVDConfig | None = None,
    calibration: Iterable[Batch] | None = None,
    progress: Progress | None = None,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> CompressionReport:
    """Replace the model's targeted Linears by low-rank pairs, in place.

    With a `storage` those that stay dense are replaced too, by `StoredLinear`s.

    Nothing is replaced before the last factor is found, so an error leaves the model as it was.
    Until then the factors of the largest ranks that the allocation may choose are held, at most as
    large as the targeted matrices themselves. In a block of `workers.together` the calibration and
    the factorizations are shared by many processes, all of which end with the same model.

    Args:
        model: a Transformers model, or any module called as `model(batch)` or `model(**batch)`.
        config: what to do; default `SVDConfig()`.
        calibration: batches of token ids `[B, T]`, or mappings of the model's arguments, as
            `collect_moments` takes them; not needed by `plain`, unless losses are weighed by
            gradients or perplexity. Token ids leave dense what text does not pass, such as a
            vision tower.
        progress: called with (stage, done, total).
        dtypes: of the Linears' weights, where the model is held in others than those that it will
            be stored in: budgets of bytes and time, storage `bf16`, and the report's bytes go by
            what is stored.

    Returns:
        Rank, loss and bytes of every targeted layer, and the provenance.

    Raises:
        ValueError: no Linear matches, no calibration was given, it has no batches, the model
            cannot take one (too long, a token id outside the embedding, no decoder inputs), or no
            allocation meets the budget.
        NonFiniteError: a weight, an activation, a gradient or a factor in the weight's dtype is
            NaN or Inf; names the layer.
    """
    source = LayersInMemory(model, progress, dtypes)
    batches = None if calibration is None else list(calibration)
    only_text = bool(batches) and all(isinstance(batch, Tensor) for batch in batches or ())
    return compress_layers(source, config or SVDConfig(), batches, only_text)


@torch.no_grad()
def compress_layers(
    source: LayerSource, config: SVDConfig, calibration: Sequence[Batch] | None, only_text: bool
) -> CompressionReport:
    """Compress the model of a source, as `compress_` does one in memory.

    With `only_text` nothing but what text passes, for the calibration is text or there is none.
    Where the source's values are not in the model, neither are the factors afterwards: low-rank
    layers on the meta device take the Linears' places.
    """
    if not config.prune_share:
        return _compress(source, config, calibration, only_text)
    batches = _batches(source.model, config, calibration)
    with narrowed(source, config, batches, only_text, _checked) as (rest, what):
        return _compress(source, rest, batches, only_text, config.ratio, what)


def _compress(
    source: LayerSource,
    config: SVDConfig,
    calibration: Sequence[Batch] | None,
    only_text: bool,
    asked: float | None = None,
    narrowed: NarrowedMLPs | None = None,
) -> CompressionReport:
    """Replace targets by pairs and stored matrices; `asked` is the ratio of the wider MLPs."""
    model, progress = source.model, source.progress
    selection, dtypes, limits = _checked(source, config, only_text)
    warn_of_coverage(model, config, selection, limits, stacklevel=5)  # no_grad's wrapper is one
    stored, targets = selection.storages(config), selection.linears | selection.head
    largest = _without_dense(limits)
    linears = {name: selection.linears[name] for name in largest}
    runs = linears or config.one_byte or narrowed
    batches = _batches(model, config, calibration) if runs else []
    config = followable(model, config, targets, batches)
    kinds = gradient_kinds(config, linears)
    head = list(selection.head)
    gone = narrowed.bytes if narrowed else 0
    task = Task(config, targets, dtypes, largest, kinds, batches, stored, head, gone)
    drifting = drifting_names(model, task)
    source.prepare(task)

    gradients = source.gradients() if kinds else {}
    nested = _factorize(source, config, linears, largest, gradients)
    weights = weights_of(model, config, linears, nested, gradients, batches, progress)
    matrices = matrices_of(config, linears, nested, weights, dtypes)
    if config.is_mixed and linears:
        measured = _measure_losses(source, task, gradients)
        choices = choose(config, matrices, dtypes, measured)
        stored = stored | {n: c.storage for n, c in choices.items() if c.storage}
        ranks = limits | {name: choice.rank for name, choice in choices.items()}
    else:
        ranks = limits | allocate(config, matrices, dtypes)
    bought = _without_dense(ranks)
    losses = {name: nested[name].relative_loss(rank) for name, rank in bought.items()}
    apart = [name for name in task.replaced if name not in drifting]
    bought_apart = {name: bought[name] for name in apart if name in bought}
    stored_apart = {name: stored[name] for name in apart if name in stored}
    local = _truncated(nested, bought_apart, {name: dtypes[name] for name in stored})
    local |= _quantize(source, task, stored_apart, ranks, gradients)
    factors = workers.exchange(local, workers.spread(task.replaced), task.replaced)
    if drifting:
        left = {n: ranks[n] for n in drifting if ranks[n] is not None or n in stored}
        drifted, lost = follow_drift(source, config.method, left, stored, gradients)
        factors, losses = factors | drifted, losses | lost
    parameters = dense_parameters(model) + (narrowed.parameters if narrowed else 0)
    report = CompressionReport(
        config=config if asked is None else replace(config, ratio=asked),
        layers=tuple(_layer_reports(selection, limits, ranks, losses, dtypes, stored)),
        calibration=describe_batches(batches) if batches else None,
        provenance=provenance_of(model),
        model_parameters=parameters,
        left_dense=left_dense(model, config, selection, parameters),
        narrowed=narrowed,
    )
    swap_modules_(model, factors)
    attach(model, report)
    return report


def _checked(
    source: LayerSource, config: SVDConfig, only_text: bool
) -> tuple[Selection, dict[str, torch.dtype], dict[str, Rank]]:
    """Return the targets, their dtypes and largest ranks; raise where no budget or storage fits."""
    selection = select_targets(source.model, config, only_text)
    selected = {**selection.linears, **selection.head}.items()
    dtypes = {name: linear.weight.dtype for name, linear in selected} | dict(source.dtypes)
    check_storage(config, selection.linears, dtypes)
    limits = rank_limits(config, selection.linears, dtypes) | dict.fromkeys(selection.head)
    linears = {name: selection.linears[name] for name in _without_dense(limits)}
    check_budget(config, linears, dtypes)
    return selection, dtypes, limits


def _factorize(
    source: LayerSource,
    config: SVDConfig,
    linears: Mapping[str, DenseLinear],
    ranks: Mapping[str, int],
    gradients: Mapping[str, Tensor],
) -> dict[str, Nested]:
    """Return the factors of the largest ranks, and what every smaller one loses."""
    is_first = not config.prune_share  # or the wider MLPs' warning has been given
    for name, weight, moment in source.measured("factorize", moment_sides(config, linears), ranks):
        if is_first and moment is not None:
            warn_if_few(moment.tokens, linears, stacklevel=7)  # no_grad's wrapper is one
        is_first = False
        nested = Nested.of(name, weight, config, moment, gradients.get(name), ranks[name])
        source.keep("factorize", name, nested.tensors())
    kept = source.kept("factorize")
    return known_to_all({name: Nested(**tensors) for name, tensors in kept.items()}, linears)


def _measure_losses(
    source: LayerSource, task: Task, gradients: Mapping[str, Tensor]
) -> dict[str, Losses]:
    """Return what each Linear loses, measured with it alone replaced.

    Inputs' moments are taken a second time: those of some methods are of the outputs.
    """
    config, linears = task.config, task.linears
    divergence = Divergence(source.model, task.batches)
    sides = rounding_sides(config, linears)
    for name, weight, moment in source.measured("measure", sides, linears):
        assert moment is not None
        metric = output_metrics(config, {name: linears[name]}, gradients).get(name)
        ranks = probed_ranks(task.limits[name], config.block)
        pair = source.factors(name)
        losses = losses_of(name, weight, pair, ranks, moment, metric, divergence)
        source.keep("measure", name, losses._asdict())
    return workers.gather_names({n: Losses(**each) for n, each in source.kept("measure").items()})


def _quantize(
    source: LayerSource,
    task: Task,
    stored: Mapping[str, str],
    ranks: Mapping[str, Rank],
    gradients: Mapping[str, Tensor],
) -> dict[str, Factors]:
    """Return this worker's matrices that are to be in one byte, of pairs and dense ones.

    Inputs' moments are taken a second time: ranks are known only after the first, when the moments
    are gone, and for some methods those were of the outputs.
    """
    config, dtypes = task.config, task.dtypes
    is_first = not task.limits and not config.prune_share
    inside = [name for name in stored if name not in task.head]
    for part, sides in ((inside, rounding_sides(config, inside)), (task.head, {})):
        for name, weight, moment in source.measured("quantize", sides, part) if part else ():
            if is_first and moment is not None:
                warn_if_few(moment.tokens, task.replaced, stacklevel=7)
            is_first = False
            rank = ranks[name]
            if rank is None:
                rounded = round_matrix(name, stored[name], weight, moment)
            else:
                u, v = source.factors(name)
                pair = _as_stored(u[:, :rank], v[:rank], dtypes[name])
                metric = output_metrics(config, {name: task.targets[name]}, gradients).get(name)
                rounded = round_pair(name, stored[name], pair, weight, moment, metric)
            source.keep("quantize", name, rounded._asdict())
    return {name: factors_of(tensors) for name, tensors in source.kept("quantize").items()}


def _truncated(
    nested: Mapping[str, Nested], ranks: Mapping[str, int], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Factors]:
    """Return this worker's factors of the ranks that were bought, in the dtypes that are given."""
    local = {n: nested[n].truncate(rank) for n, rank in ranks.items() if nested[n].is_here}
    return {n: _as_stored(u, v, dtypes.get(n, u.dtype)) for n, (u, v) in local.items()}


def _as_stored(u: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return factors that are to be rounded in what they would be stored in without that."""
    return u.to(dtype), v.to(dtype)


def _without_dense(ranks: Mapping[str, Rank]) -> dict[str, int]:
    return {name: rank for name, rank in ranks.items() if rank is not None}


def rank_limits(
    config: SVDConfig, linears: Mapping[str, DenseLinear], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Rank]:
    """Return the largest rank that each layer may get; None where it can only stay dense."""
    limits: dict[str, Rank] = {}
    for name, linear in linears.items():
        if config.allocation == "uniform":
            bounds = ratio_bounds(config, name)
            limits[name] = config.rank(linear.in_features, linear.out_features, bounds)
        elif config.is_mixed:
            matrix = matrix_of(config, name, linear, dtypes[name], torch.zeros(0))
            limits[name] = largest_rank(matrix, config.block)
        else:
            matrix = matrix_of(config, name, linear, dtypes[name], torch.zeros(0))
            ranks = matrix.ranks(config.block)
            limits[name] = max((rank for rank in ranks if rank is not None), default=None)
        if config.ratio == 0 and ratio_bounds(config, name) == (0.0, 1.0):
            limits[name] = None
    return limits


def matrices_of(
    config: SVDConfig,
    linears: Mapping[str, DenseLinear],
    nested: Mapping[str, Nested],
    weights: Mapping[str, float],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Matrix]:
    """Return what the allocation knows of every Linear that may get a rank."""
    return {
        name: matrix_of(
            *(config, name, linears[name], dtypes[name]),
            *(each.spectrum, weights[name], each.scores),
        )
        for name, each in nested.items()
    }


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
    config: SVDConfig, linears: Mapping[str, DenseLinear], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Raise ValueError where nothing meets the budget, before any of the work is done."""
    unknown = {
        name: Nested(None, None, losses, losses)
        for name, linear in linears.items()
        for losses in [torch.zeros(min(linear.in_features, linear.out_features))]
    }
    matrices = matrices_of(config, linears, unknown, dict.fromkeys(unknown, 1.0), dtypes)
    if config.is_mixed:
        choose(config, matrices, dtypes, None)
    else:
        allocate(config, matrices, dtypes)


def _batches(
    model: nn.Module, config: SVDConfig, calibration: Sequence[Batch] | None
) -> Sequence[Batch]:
    if not config.needs_calibration:
        return []
    if calibration is None:
        raise ValueError(
            f"{config.calibrated_by} needs calibration batches; give some, or use method plain"
        )
    check_batches(model, calibration)
    return calibration


def _layer_reports(
    selection: Selection,
    limits: Mapping[str, Rank],
    ranks: Mapping[str, Rank],
    losses: Mapping[str, float],
    dtypes: Mapping[str, torch.dtype],
    stored: Mapping[str, str],
) -> Iterator[LayerReport]:
    """Yield the report of every targeted layer, those that stay dense with the reason."""
    for name, linear in (selection.linears | selection.head).items():
        reason = None
        if name in selection.head:
            reason = "the output head stays dense"
        elif limits[name] is None:
            reason = "no aligned rank is smaller than the dense matrix"
        elif ranks[name] is None:
            reason = "the allocation keeps it dense"
        loss, storage = losses.get(name, 0.0), stored.get(name)
        yield LayerReport.of(name, linear, ranks[name], loss, reason, storage, dtypes[name])
    for name, (linear, reason) in selection.kept.items():
        yield LayerReport.of(name, linear, None, 0.0, reason, None, dtypes.get(name))


def describe_batches(batches: Sequence[Batch]) -> dict[str, int | str]:
    """Return what a report says of the calibration batches."""
    return {
        "tokens": sum(count_tokens(batch) for batch in batches),
        "batches": len(batches),
        "sha256": fingerprint(batches),
    }
