"""Layer by layer: factors that regress towards the dense model from the compressed one's inputs."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.allocate import Rank
from neuronmm_ops.compress.batches import Batch
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.factorize import check_finite, factorize
from neuronmm_ops.compress.layers import LayerStack, hindrance
from neuronmm_ops.compress.methods import METHODS, drift, kfac
from neuronmm_ops.compress.nested import first_method
from neuronmm_ops.compress.quantize import (
    Quantized,
    QuantizedMatrix,
    quantize_matrix,
    quantize_pair,
)
from neuronmm_ops.compress.running import eval_mode
from neuronmm_ops.compress.side_by_side import SideBySide
from neuronmm_ops.compress.source import LayerSource, Task
from neuronmm_ops.compress.workers import Factors
from neuronmm_ops.errors import CompressionWarning
from neuronmm_ops.nn.swap import is_stored, swap_modules_


@torch.no_grad()
def followable(
    model: nn.Module, config: SVDConfig, names: Collection[str], batches: Sequence[Batch]
) -> SVDConfig:
    """Return the config; where its method cannot follow drift, of that which it has ranks by.

    Layers run one by one must give what the model does, and what a Linear of theirs is given must
    not depend on a router's choice. One row of the text is tried; a model whose values are
    elsewhere is not. Warns with the reason.

    Args:
        model: dense.
        config: what was asked for.
        names: of the Linears to replace.
        batches: of calibration.
    """
    is_here = not any(parameter.is_meta for parameter in model.parameters())
    if not METHODS[config.method].follows_drift or not batches or not is_here:
        return config
    reason = hindrance(model, names, batches)
    if not reason:
        return config
    method = first_method(config)
    warnings.warn(
        f"method {method} is used, not {config.method}, which goes layer by layer: {reason}",
        CompressionWarning,
        stacklevel=5,  # of compress_'s caller; no_grad's wrappers are two
    )
    return replace(config, method=method)


def drifting_names(model: nn.Module, task: Task) -> list[str]:
    """Return which Linears `follow_drift` is to find: those of the layers, for a method that does.

    Raises:
        ValueError: the method does, and the model has no list of layers.
    """
    if not METHODS[task.config.method].follows_drift or not task.replaced:
        return []
    stack = LayerStack(model)
    return [name for name in task.replaced if stack.index_of(name) is not None]


@torch.no_grad()
def follow_drift(
    source: LayerSource,
    method: str,
    ranks: Mapping[str, Rank],
    stored: Mapping[str, str],
    gradients: Mapping[str, Tensor],
) -> tuple[dict[str, Factors], dict[str, float]]:
    """Return factors of these ranks, each found from what the ones before it produce.

    Also the relative loss of each, of what full rank explains of the dense outputs.

    The hidden states of the dense and of the compressed prefix go through the layers side by side;
    in a layer, Linears are taken in the order of their calls, those with one input together.

    Args:
        source: of a decoder, still dense; its model is left as it was.
        method: one that needs `cross`.
        ranks: of every Linear of the layers to replace; None where it stays dense, in a storage.
        stored: the storage of each that has one: it is rounded before the next is found.
        gradients: what `collect_gradients` says of each Linear, for a method that needs it.

    Raises:
        NonFiniteError: a factor in the weight's dtype is NaN or Inf.
        ValueError: a Linear is not given the same tokens on both paths.
    """
    find = _Find(method, ranks, stored, gradients)
    # Closed where an error ends the block: it holds the values of a layer.
    with eval_mode(source.model), closing(source.side_by_side(ranks)) as layers:
        for layer in layers:
            inside = [n.removeprefix(layer.prefix) for n in ranks if n.startswith(layer.prefix)]
            for group in layer.groups(inside):
                group_factors, losses = find.group(layer, group)
                swap_modules_(layer.compressed, group_factors)
                for name, factors in group_factors.items():
                    loss = torch.tensor(losses[name], dtype=torch.float64)
                    tensors = {**_named(factors), "loss": loss}
                    source.keep("drift", layer.prefix + name, tensors)
    kept = source.kept("drift")
    pairs = {name: factors_of(tensors) for name, tensors in kept.items()}
    return pairs, {name: float(tensors["loss"]) for name, tensors in kept.items()}


class _Find:
    """What does not change from one group of Linears to the next, as of `follow_drift`."""

    def __init__(
        self,
        method: str,
        ranks: Mapping[str, Rank],
        stored: Mapping[str, str],
        gradients: Mapping[str, Tensor],
    ) -> None:
        self._method, self._ranks, self._stored, self._gradients = method, ranks, stored, gradients

    def group(
        self, layer: SideBySide, group: Sequence[str]
    ) -> tuple[dict[str, Factors], dict[str, float]]:
        """Return the factors and relative losses of the Linears of one input, all workers'."""
        linears = {name: layer.linear(name) for name in group}
        owners = workers.spread(linears)
        # One input: what holds of the first holds of all.
        moment, cross = layer.moments(group[0])
        local: dict[str, Factors] = {}
        lost: dict[str, float] = {}
        for name in (name for name in group if owners[name] == workers.index()):
            weight, whole = linears[name].weight, layer.prefix + name
            rank, storage = self._ranks[whole], self._stored.get(whole)
            target, ridged, gradient = weight.t(), None, None
            if storage:
                target, ridged = drift.regression(weight, moment, cross)
            if rank is None:
                assert storage
                local[name], lost[name] = quantize_matrix(target, storage, ridged), 0.0
                continue
            if METHODS[self._method].gradient is not None:
                gradient = self._gradients[whole]
            result = factorize(weight, self._method, moment, rank, cross=cross, gradient=gradient)
            u, v = (f.to(weight.dtype) for f in result.truncate(rank))
            check_finite(whole, u, v, "compress the model in a wider dtype")
            local[name], lost[name] = (u, v), result.relative_loss(rank)
            if storage:
                metric = None if gradient is None else kfac.damped(gradient)
                local[name] = quantize_pair(u, v, storage, target, ridged, metric)
        return workers.exchange(local, owners, linears), workers.gather_names(lost)


def factors_of(tensors: Mapping[str, Tensor]) -> Factors:
    """Return kept factors, or a kept matrix, as what they are; other tensors are left out."""
    if "w" in tensors:
        return QuantizedMatrix(*(tensors[name] for name in QuantizedMatrix._fields))
    if "u_scale" in tensors:
        return Quantized(*(tensors[name] for name in Quantized._fields))
    return tensors["u"], tensors["v"]


def _named(factors: Factors) -> dict[str, Tensor]:
    """Return factors as `factors_of` takes them: from other workers they come as plain tuples."""
    names = QuantizedMatrix._fields if is_stored(factors) else Quantized._fields
    return dict(zip(names, factors, strict=False))
