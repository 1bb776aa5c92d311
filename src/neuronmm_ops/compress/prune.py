"""Narrower MLPs: the inner features that their outputs miss least are left out.

What is left is an ordinary dense model. An inner feature is a row of gate and up and a column of
down; those that stay take over what they can of the others' part (Optimal Brain Surgeon, Hassibi
and Stork 1993, for whole columns as in ZipLM, arXiv 2302.04089).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.batches import Batch, count_tokens
from neuronmm_ops.compress.calibrate import Progress, collect_moments, warn_if_few
from neuronmm_ops.compress.factorization import SecondMoment
from neuronmm_ops.compress.targets import text_decoder, text_modules
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear

_LAYOUTS = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama
    (("gate_up_proj",), "down_proj"),  # Phi-3
    (("up_proj",), "down_proj"),  # Nemotron
    (("fc1",), "fc2"),  # Phi
    (("c_fc",), "c_proj"),  # Starcoder 2
    (("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX
)
"""Linears that make the inner features, and the one that reads them."""
RIDGE = 1e-4
"""Of the mean of the inner features' second moment, added to its diagonal."""
SWEEPS = 512
"""So many steps would remove all features; those of one step are chosen together."""


class Pruned(NamedTuple):
    """What was left out.

    Attributes:
        inner: inner features of each MLP before.
        kept: and now.
        losses: what each MLP's output lost, by name: mean squared error on the calibration text,
            relative to the output's mean square.
    """

    inner: int
    kept: int
    losses: dict[str, float]


class MLP(NamedTuple):
    """An MLP's Linears: `into` have inner features as rows, `down` as columns."""

    into: tuple[nn.Linear, ...]
    down: nn.Linear


def prune_(
    model: nn.Module,
    ratio: float,
    calibration: Sequence[Batch],
    block: int = 128,
    progress: Progress | None = None,
) -> Pruned:
    """Leave out inner features of every MLP of a Transformers model, in place.

    All MLPs get the same width, so that the model's config says it. Nothing is replaced before the
    last MLP's features are chosen, so an error leaves the model as it was.

    Args:
        model: dense, with an MLP of `nn.Linear`s in each layer, gated or not, and their
            `intermediate_size` in its config.
        ratio: of each MLP's parameters to remove, at least.
        calibration: as `collect_moments` takes it.
        block: what is kept is a multiple of it.
        progress: called with (stage, done, total); stages are calibrate and prune.

    Returns:
        The widths, and each MLP's loss. A `CalibrationWarning` says that the text is short.

    Raises:
        ValueError: the ratio leaves nothing or removes nothing, or the model has MLPs of another
            kind, of different widths, or that text does not pass, or none; or its config says
            the width of something else with theirs.
        NonFiniteError: an activation or a weight is NaN or Inf; names the Linear.
    """
    mlps = mlps_of(model)
    inner = inner_features(model, mlps)
    kept = _kept(ratio, inner, block)
    check_config(model, mlps, kept)
    warn_if_few(sum(map(count_tokens, calibration)), downs_of(mlps), stacklevel=3)
    return prune_to_(model, mlps, kept, calibration, progress)


@torch.no_grad()
def prune_to_(
    model: nn.Module,
    mlps: Mapping[str, MLP],
    kept: int,
    calibration: Sequence[Batch],
    progress: Progress | None,
) -> Pruned:
    """Leave so many inner features of the model's MLPs, as `prune_` does.

    In a block of `workers.together` all processes share the work.
    """
    inner = inner_features(model, mlps)
    narrowed: dict[str, tuple[Tensor, Tensor]] = {}
    losses: dict[str, float] = {}
    downs = downs_of(mlps)
    owners = workers.spread(downs)
    moments = collect_moments(model, dict.fromkeys(mlps, "input"), calibration, progress)
    for name, moment in moments:
        if owners[name] != workers.index():
            continue
        columns, narrow, losses[name] = narrowed_down(name, mlps[name].down.weight, moment, kept)
        narrowed[name] = columns, narrow
        if progress:
            progress("prune", len(narrowed), len(mlps))
    for name, (columns, narrow, *_) in workers.exchange(narrowed, owners, downs).items():
        narrow_(mlps[name], columns, narrow)
    text_config(model).intermediate_size = kept
    losses = workers.gather_names(losses)
    return Pruned(inner, kept, {name: losses[name] for name in mlps})


def mlps_of(model: nn.Module) -> dict[str, MLP]:
    """The MLPs of the text decoder, by the name of the Linear that reads their inner features."""
    decoder, read = set(text_decoder(model).modules()), text_modules(model)
    mlps: dict[str, MLP] = {}
    for name, module in model.named_modules():
        if module not in decoder:
            continue
        linears = {n: child for n, child in module.named_children() if hasattr(child, "weight")}
        for names, last in _LAYOUTS:
            if set(linears) != {*names, last}:
                continue
            if not all(type(linear) is nn.Linear for linear in linears.values()):
                continue
            if module not in read:
                raise ValueError(f"{name} is an MLP that text does not pass; compress the model")
            *into, down = cast("list[nn.Linear]", [linears[child] for child in (*names, last)])
            mlps[f"{name}.{last}"] = MLP(tuple(into), down)
    return mlps


def downs_of(mlps: Mapping[str, MLP]) -> dict[str, DenseLinear]:
    """The Linears that read inner features, by name."""
    return {name: DenseLinear(mlp.down) for name, mlp in mlps.items()}


def inner_features(model: nn.Module, mlps: Mapping[str, MLP]) -> int:
    """The width of all MLPs, which the config says."""
    inner = getattr(text_config(model), "intermediate_size", None)
    widths = sorted({mlp.down.in_features for mlp in mlps.values()})
    if not isinstance(inner, int) or widths != [inner]:
        raise ValueError(
            f"every MLP must be of dense nn.Linears as wide as the config's intermediate_size, "
            f"{inner}; {type(model).__name__} has {len(mlps)} of widths {widths}; compress it"
        )
    return inner


def _kept(ratio: float, inner: int, block: int) -> int:
    """How many inner features stay."""
    if not 0 < ratio < 1 or block < 1:
        raise ValueError(
            f"ratio must be in (0, 1) and block at least 1; got ratio {ratio} and block {block}"
        )
    kept = whole_blocks((1 - ratio) * inner, block)
    if not 0 < kept < inner:
        raise ValueError(
            f"ratio must leave some and not all of {inner} inner features, in blocks of {block}; "
            f"ratio {ratio} leaves {kept}; use another ratio or a smaller block"
        )
    return kept


def whole_blocks(features: float, block: int, up: bool = False) -> int:
    """Return the features in whole blocks, rounded down or up."""
    blocks = features / block
    # 0.1 of 1280 features are 128, whatever 1 - 0.9 is in binary
    return (math.ceil(blocks - 1e-9) if up else math.floor(blocks + 1e-9)) * block


def check_config(model: nn.Module, mlps: Mapping[str, MLP], kept: int) -> None:
    """Refuse a model of which the smaller width in its config would change anything else."""
    config: Any = copy.deepcopy(model.config)
    config.get_text_config().intermediate_size = kept
    with torch.device("meta"):
        narrow = type(model)(config)
    shapes = {id(parameter): parameter.shape for parameter in model.parameters()}
    for into, down in mlps.values():
        shapes[id(down.weight)] = torch.Size((down.out_features, kept))
        for linear in into:
            rows = linear.out_features // down.in_features * kept
            for parameter in linear.parameters():
                shapes[id(parameter)] = torch.Size((rows, *parameter.shape[1:]))
    wanted = {name: shapes[id(parameter)] for name, parameter in model.named_parameters()}
    for name, parameter in narrow.named_parameters():
        if wanted.get(name) == parameter.shape:
            continue
        raise ValueError(
            f"intermediate_size must be that of dense MLPs alone, of {type(model).__name__} it is "
            f"of {name}, too; compress it"
        )


def text_config(model: nn.Module) -> Any:
    """The config of what reads text; None where the model has none."""
    config: Any = getattr(model, "config", None)
    return config if config is None else config.get_text_config()


def narrow_(mlp: MLP, columns: Tensor, narrow: Tensor) -> None:
    """Take the rows of these inner features, and the columns that were found for them."""
    inner = mlp.down.in_features
    for linear in mlp.into:
        rows = rows_of(columns, linear.out_features, inner)
        _set_(linear, linear.weight[rows])
        if linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias[rows], linear.bias.requires_grad)
    _set_(mlp.down, narrow)


def rows_of(columns: Tensor, rows: int, inner: int) -> Tensor:
    """Return what makes these inner features: gate and up may be one, a half after the other."""
    starts = torch.arange(0, rows, inner, device=columns.device)
    return (starts[:, None] + columns).flatten()


def _set_(linear: nn.Linear, weight: Tensor) -> None:
    linear.weight = nn.Parameter(weight.contiguous(), linear.weight.requires_grad)
    linear.out_features, linear.in_features = weight.shape


def narrowed_down(
    name: str, weight: Tensor, moment: SecondMoment, kept: int
) -> tuple[Tensor, Tensor, float]:
    """Return the inner features that stay, their columns of a weight `[N, I]`, and the loss.

    Raises:
        NonFiniteError: a column is NaN or Inf in the weight's dtype; names the Linear.
    """
    columns = kept_features(weight, moment.matrix, kept)
    refitted, loss = _refitted(weight, moment.matrix, columns)
    narrow = refitted.to(weight)
    if not torch.isfinite(narrow).all():
        raise NonFiniteError(
            f"{name}: weight must be finite, got NaN or Inf; prune the model in a wider dtype"
        )
    return columns.to(weight.device), narrow, loss


def kept_features(weight: Tensor, moment: Tensor, kept: int) -> Tensor:
    """Return which columns of a weight stay when others go, one after the other.

    With H the second moment, removing column i of W and refitting the others adds
    `|w_i|^2 / [H^-1]_ii` to the squared error of the output; the least goes next.

    Args:
        weight: `[N, I]`.
        moment: `[I, I]` of what it multiplies, fp64.
        kept: columns that stay.

    Returns:
        Their numbers `[kept]`, in order, on the moment's device.
    """
    inner = len(moment)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(_ridged(moment)))
    left = weight.to(moment, copy=True)
    stays = torch.ones(inner, dtype=torch.bool, device=moment.device)
    while (over := int(stays.sum()) - kept) > 0:
        costs = left.square().sum(0) / inverse.diagonal()
        costs[~stays] = torch.inf
        goes = costs.argsort()[: min(over, -(-inner // SWEEPS))]
        # what goes is projected out of the others; a row of zeros stays one
        share = torch.linalg.solve(inverse[goes][:, goes], inverse[goes])
        left.addmm_(left[:, goes], share, alpha=-1)
        inverse.addmm_(inverse[:, goes], share, alpha=-1)
        stays[goes] = False
        inverse[goes, goes] = 1.0
    return stays.nonzero().flatten()


def _refitted(weight: Tensor, moment: Tensor, columns: Tensor) -> tuple[Tensor, float]:
    """What the columns that stay become, `[N, kept]` in fp64, and the relative loss."""
    w, ridged = weight.to(moment), _ridged(moment)
    target = w @ ridged
    root = torch.linalg.cholesky(ridged[columns][:, columns])
    narrow = torch.cholesky_solve(target[:, columns].t(), root).t()
    whole = float((target * w).sum())
    lost = whole - float((narrow * target[:, columns]).sum())
    return narrow, max(0.0, lost / whole) if whole > 0 else 0.0


def _ridged(moment: Tensor) -> Tensor:
    ridge = RIDGE * moment.diagonal().mean().clamp_min(torch.finfo(moment.dtype).tiny)
    return moment + ridge * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
