"""A share of what a budget removes, by narrower MLPs; pairs take the rest."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from neuronmm_ops.compress.batches import Batch, count_tokens
from neuronmm_ops.compress.budget import dense_costs
from neuronmm_ops.compress.calibrate import warn_if_few
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.prune import (
    MLP,
    check_config,
    downs_of,
    inner_features,
    mlps_of,
    narrow_,
    text_config,
    whole_blocks,
)
from neuronmm_ops.compress.report import NarrowedMLPs
from neuronmm_ops.compress.source import LayerSource
from neuronmm_ops.compress.targets import select_targets

SHARES = (0.5, 0.75, 1.0)
"""Of what is removed, that `compare` tries."""
WIDTHS = (0.05, 0.1, 0.2, 0.3)
"""The same, of all there is, where storages remove from a budget of bytes or time, too."""


@contextmanager
def narrowed(
    source: LayerSource,
    config: SVDConfig,
    calibration: Sequence[Batch],
    only_text: bool,
    check: Callable[[LayerSource, SVDConfig, bool], object],
) -> Generator[tuple[SVDConfig, NarrowedMLPs]]:
    """Leave out inner features for the `prune_share` of what the config removes.

    Args:
        source: its model is as it was where the block fails; what it holds in memory is held
            next to what is new until then.
        config: with a `prune_share`.
        calibration: as of `compress_`.
        only_text: as of `select_targets`.
        check: called with the source, the config for what is left of the budget and `only_text`
            before anything is measured, while Linears have the new sizes, without values.

    Yields:
        That config, and what was left out.

    Raises:
        ValueError: `kept_width` finds none, `check` raises it, or `prune_` refuses the MLPs.
        NonFiniteError: as of `prune_`.
    """
    model, dtypes = source.model, source.dtypes
    kept = kept_width(model, config, dtypes, only_text)
    mlps = mlps_of(model)
    inner = inner_features(model, mlps)
    warn_if_few(sum(map(count_tokens, calibration)), downs_of(mlps), stacklevel=7)
    linears = [linear for mlp in mlps.values() for linear in (*mlp.into, mlp.down)]
    before = [(linear, linear.weight, linear.bias) for linear in linears]
    parameters = sum(weight.numel() for _, weight, _ in before)
    cost = sum(_costs(model, config, dtypes, only_text).values())

    def restore() -> None:
        text_config(model).intermediate_size = inner
        for linear, weight, bias in before:
            linear.weight, linear.bias = weight, bias
            linear.out_features, linear.in_features = weight.shape

    try:
        for mlp in mlps.values():
            _narrow_without_values(mlp, kept)
        removed = parameters - sum(linear.weight.numel() for linear in linears)
        left = sum(_costs(model, config, dtypes, only_text).values())
        rest = replace(config, ratio=max(0.0, 1 - (1 - config.ratio) * cost / left))
        check(source, rest, only_text)
    finally:
        restore()
    source.narrow(config, calibration, mlps, kept)
    try:
        itemsize = dtypes.get(next(iter(mlps)), linears[0].weight.dtype).itemsize
        yield rest, NarrowedMLPs(inner, kept, removed, removed * itemsize)
    except BaseException:
        restore()
        raise


def _narrow_without_values(mlp: MLP, kept: int) -> None:
    for linear in (*mlp.into, mlp.down):
        for name, parameter in linear.named_parameters(recurse=False):
            setattr(linear, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    narrow_(mlp, torch.arange(kept, device="meta"), mlp.down.weight[:, :kept])


def kept_width(
    model: nn.Module, config: SVDConfig, dtypes: Mapping[str, torch.dtype], only_text: bool
) -> int:
    """Return how many inner features stay: blocks that remove at most the share, or at least all.

    Raises:
        ValueError: the MLPs are not what `prune_` takes, one is not targeted, or no whole block
            goes, or none stays.
    """
    if config.ratio == 0:
        raise ValueError("prune_share is of what ratio removes, got ratio 0; leave one of them out")
    mlps = mlps_of(model)
    inner = inner_features(model, mlps)
    costs = _costs(model, config, dtypes, only_text)
    names = {module: name for name, module in model.named_modules()}
    linears = [names[linear] for mlp in mlps.values() for linear in (*mlp.into, mlp.down)]
    missing = next((name for name in linears if name not in costs), None)
    if missing:
        raise ValueError(
            f"prune_share narrows all MLPs, {missing} is not among the targets; add mlp to them"
        )
    removed = config.ratio * config.prune_share * sum(costs.values())
    left = inner * (1 - removed / sum(costs[name] for name in linears))
    kept = min(whole_blocks(left, config.block, up=config.prune_share < 1), inner)
    if not 0 < kept < inner:
        raise ValueError(
            f"prune_share must leave some and not all of {inner} inner features, in blocks of "
            f"{config.block}; {config.prune_share} of ratio {config.ratio} leaves {kept}; use "
            "another share or a smaller block"
        )
    check_config(model, mlps, kept)
    return kept


def compared(
    model: nn.Module, config: SVDConfig, dtypes: Mapping[str, torch.dtype]
) -> list[SVDConfig]:
    """Return the config with each of `SHARES`, or `WIDTHS`, that the model and budget allow."""
    if config.budget == "parameters" or not (config.one_byte or config.is_mixed):
        return shares(model, config, dtypes, SHARES)
    tried = [width / config.ratio for width in WIDTHS if config.ratio]
    return shares(model, config, dtypes, tried)


def shares(
    model: nn.Module,
    config: SVDConfig,
    dtypes: Mapping[str, torch.dtype],
    tried: Sequence[float],
) -> list[SVDConfig]:
    """Return the config with each `prune_share` that is tried and the model and budget allow."""
    configs: list[SVDConfig] = []
    for share in tried:
        try:
            kept_width(model, each := replace(config, prune_share=share), dtypes, only_text=True)
        except ValueError:
            continue
        configs.append(each)
    return configs


def _costs(
    model: nn.Module, config: SVDConfig, dtypes: Mapping[str, torch.dtype], only_text: bool
) -> dict[str, float]:
    return dense_costs(config, select_targets(model, config, only_text).linears, dtypes)
