"""Layer by layer: factors that regress towards the dense model from the compressed one's inputs."""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.batches import Batch, row_mask, unmasked, wide_rows
from neuronmm_ops.compress.calibrate import Progress, eval_mode, fast_products
from neuronmm_ops.compress.factorization import SecondMoment
from neuronmm_ops.compress.factorize import check_finite, factorize
from neuronmm_ops.compress.layers import LayerStack
from neuronmm_ops.compress.methods import METHODS, drift, kfac
from neuronmm_ops.compress.quantize import quantize_matrix, quantize_pair
from neuronmm_ops.compress.workers import Factors
from neuronmm_ops.nn.dense_linear import DenseLinear, as_dense_linear
from neuronmm_ops.nn.swap import is_stored, swap_modules_


@torch.no_grad()
def follow_drift(
    model: nn.Module,
    method: str,
    factors: Mapping[str, Factors],
    batches: Sequence[Batch],
    progress: Progress | None = None,
    stored: Mapping[str, str] | None = None,
    gradients: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Factors], dict[str, float]]:
    """Return factors of the same ranks, each found from what the ones before it produce.

    Also the relative loss of each, of what full rank explains of the dense outputs.

    The hidden states of the dense and of the compressed prefix go through the layers side by side;
    in a layer, Linears are taken in the order of their calls, those with one input together. Many
    workers take a share of the batches each.

    Args:
        model: a decoder, still dense; left as it was.
        method: one that needs `cross`.
        factors: of every Linear to compress, which stand for it until its own are found; one
            matrix and its scales where it stays dense.
        batches: token ids, or mappings of the model's arguments.
        progress: told `("drift", layers done, layers in all)`.
        stored: the storage of each that has one: it is rounded before the next is found.
        gradients: what `collect_gradients` says of each Linear, for a method that needs it.

    Raises:
        NonFiniteError: a factor in the weight's dtype is NaN or Inf.
        ValueError: the model has no list of layers.
    """
    batches = workers.share(batches)
    stack = LayerStack(model)
    pairs, losses = dict(factors), dict.fromkeys(factors, 0.0)
    gradients, stored = gradients or {}, stored or {}
    has_metric = METHODS[method].gradient is not None
    with eval_mode(model), fast_products(model):
        dense = [stack.first_input(batch) for batch in batches]
        drifted = list(dense)
        for index in range(len(stack)):
            prefix = f"{stack.name}.{index}."
            inside = [n.removeprefix(prefix) for n in factors if n.startswith(prefix)]
            layer = copy.deepcopy(stack[index])
            passed = _LayerPass(stack, index, layer, model, batches, dense, drifted)
            for group in passed.groups(inside):
                linears = {name: passed.linear(name) for name in group}
                owners = workers.spread(linears)
                moment, cross = passed.moments(group)
                local: dict[str, Factors] = {}
                lost: dict[str, float] = {}
                for name in (name for name in group if owners[name] == workers.index()):
                    weight, first = linears[name].weight, factors[prefix + name]
                    storage = stored.get(prefix + name)
                    if storage and is_stored(first):
                        target, ridged = drift.regression(weight, moment.matrix, cross)
                        local[name], lost[name] = quantize_matrix(target, storage, ridged), 0.0
                        continue
                    rank = first[0].shape[1]
                    gradient = gradients[prefix + name] if has_metric else None
                    result = factorize(weight, method, moment, rank, cross=cross, gradient=gradient)
                    u, v = (f.to(weight.dtype) for f in result.truncate(rank))
                    check_finite(prefix + name, u, v, "compress the model in a wider dtype")
                    local[name], lost[name] = (u, v), result.relative_loss(rank)
                    if storage:
                        target, ridged = drift.regression(weight, moment.matrix, cross)
                        metric = None if gradient is None else kfac.damped(gradient)
                        local[name] = quantize_pair(u, v, storage, target, ridged, metric)
                swapped = workers.exchange(local, owners, linears)
                pairs |= {prefix + name: pair for name, pair in swapped.items()}
                losses |= {prefix + n: loss for n, loss in workers.gather_names(lost).items()}
                swap_modules_(layer, swapped)
            dense, drifted = passed.outputs()
            if progress:
                progress("drift", index + 1, len(stack))
    return pairs, losses


class _LayerPass:
    """One layer, dense and as far as it is compressed, over all batches."""

    def __init__(
        self,
        stack: LayerStack,
        index: int,
        layer: nn.Module,
        model: nn.Module,
        batches: Sequence[Batch],
        dense: Sequence[Tensor],
        drifted: Sequence[Tensor],
    ) -> None:
        self._stack, self._index, self._layer = stack, index, layer
        self._masks = [row_mask(model, batch) for batch in batches]
        self._states = list(zip(batches, dense, drifted, strict=True))

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """Return the Linears in the order of their calls, those given one tensor together."""
        if not names:
            return []
        groups: dict[int, list[str]] = {}
        if workers.index() == 0:  # others may have no batch
            batch, dense, _ = self._states[0]
            inputs = self._inputs(self._stack[self._index], batch, dense, names, None)
            for name, x in inputs.items():
                groups.setdefault(id(x), []).append(name)
        return workers.gather(list(groups.values()))[0]

    def linear(self, name: str) -> DenseLinear:
        """Return a Linear of the dense layer."""
        return as_dense_linear(self._stack[self._index].get_submodule(name))

    def moments(self, group: Sequence[str]) -> tuple[SecondMoment, Tensor]:
        """Return X̂ᵀX̂ and XᵀX̂ `[K, K]` of the Linears of one input, of all workers' batches."""
        # One input: what holds of the first holds of all.
        name = group[0]
        linear = self.linear(name)
        K, device = linear.in_features, linear.weight.device
        zeros = torch.zeros(K, K, dtype=torch.float64, device=device)
        moment, cross = SecondMoment("input", zeros), zeros.clone()
        for (batch, dense, drifted), mask in zip(self._states, self._masks, strict=True):
            clean = self._rows(self._stack[self._index], batch, dense, name, mask)
            seen = self._rows(self._layer, batch, drifted, name, mask)
            moment.add(seen.t() @ seen, len(seen))
            cross += clean.t() @ seen
        moment.tokens = sum(workers.gather(moment.tokens))
        workers.sum_(moment.matrix, cross)
        return moment, cross

    def outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the hidden states that leave the dense layer and the compressed one."""
        index, stack = self._index, self._stack
        return (
            [stack.run(index, batch, dense) for batch, dense, _ in self._states],
            [stack.run(index, batch, seen, self._layer) for batch, _, seen in self._states],
        )

    def _rows(
        self, layer: nn.Module, batch: Batch, hidden: Tensor, name: str, mask: Tensor | None
    ) -> Tensor:
        return wide_rows(self._inputs(layer, batch, hidden, [name], mask)[name])

    def _inputs(
        self,
        layer: nn.Module,
        batch: Batch,
        hidden: Tensor,
        names: Sequence[str],
        mask: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return what each Linear is given, in the order of the calls."""
        inputs: dict[str, Tensor] = {}

        def record(name: str, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            (x,) = args or kwargs.values()
            inputs[name] = unmasked(x, mask)

        handles = [
            layer.get_submodule(name).register_forward_pre_hook(
                lambda _, args, kwargs, name=name: record(name, args, kwargs), with_kwargs=True
            )
            for name in names
        ]
        try:
            self._stack.run(self._index, batch, hidden, layer)
        finally:
            for handle in handles:
                handle.remove()
        return inputs
