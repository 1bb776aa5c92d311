"""One layer, dense and as far as it is compressed, over all batches."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.batches import Batch, row_mask, unmasked, wide_rows
from neuronmm_ops.compress.factorization import SecondMoment
from neuronmm_ops.compress.layers import LayerStack
from neuronmm_ops.compress.running import fast_products
from neuronmm_ops.nn.dense_linear import DenseLinear, as_dense_linear

# A batch, and the hidden states [B, T, H] that enter the layer in the dense model and in the
# compressed one.
Paths = Iterable[tuple[Batch, Tensor, Tensor]]


class SideBySide:
    """A dense layer with its values, its compressed copy, and what enters both.

    Many workers take a share of the batches each.

    Args:
        stack: of the model's layers.
        index: of this one.
        paths: gives this worker's batches, as often as it is called.

    Attributes:
        prefix: of its modules' names in the model.
        dense: as it is in the model.
        compressed: a copy, for the caller to replace Linears in.
    """

    def __init__(self, stack: LayerStack, index: int, paths: Callable[[], Paths]) -> None:
        self.prefix = f"{stack.name}.{index}."
        self.dense, self.compressed = stack[index], copy.deepcopy(stack[index])
        self._stack, self._index, self._paths = stack, index, paths

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """Return the Linears in the order of their calls, those given one tensor together.

        Raises:
            ValueError: one is not called.
        """
        if not names:
            return []
        groups: dict[int, list[str]] = {}
        if workers.index() == 0:  # others may have no batch
            batch, hidden, _ = next(iter(self._paths()))
            inputs = self._inputs(self.dense, batch, hidden, names)
            for name in names:
                if name not in inputs:
                    raise ValueError(self._refusal(name))
            for name, x in inputs.items():
                groups.setdefault(id(x), []).append(name)
        return workers.gather(list(groups.values()))[0]

    def linear(self, name: str) -> DenseLinear:
        """Return a Linear of the dense layer."""
        return as_dense_linear(self.dense.get_submodule(name))

    def moments(self, name: str) -> tuple[SecondMoment, Tensor]:
        """Return X̂ᵀX̂ and XᵀX̂ `[K, K]` of a Linear's inputs, of all workers' batches.

        Raises:
            ValueError: X and X̂ are not of the same tokens, as those of an expert.
        """
        linear = self.linear(name)
        K, device = linear.in_features, linear.weight.device
        zeros = torch.zeros(K, K, dtype=torch.float64, device=device)
        moment, cross = SecondMoment("input", zeros), zeros.clone()
        for batch, hidden, drifted in self._paths():
            clean = self._rows(self.dense, batch, hidden, name)
            compressed = self._rows(self.compressed, batch, drifted, name)
            if len(clean) != len(compressed):
                raise ValueError(self._refusal(name))
            moment.add(compressed.t() @ compressed, len(compressed))
            cross += clean.t() @ compressed
        moment.tokens = sum(workers.gather(moment.tokens))
        workers.sum_(moment.matrix, cross)
        return moment, cross

    def outputs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the hidden states that leave the dense layer and the compressed one."""
        for batch, hidden, drifted in self._paths():
            with fast_products(self.dense):
                dense = self._stack.run(self._index, batch, hidden)
                after_drift = self._stack.run(self._index, batch, drifted, self.compressed)
            yield dense, after_drift

    def _rows(self, layer: nn.Module, batch: Batch, hidden: Tensor, name: str) -> Tensor:
        inputs = self._inputs(layer, batch, hidden, [name])
        if name not in inputs:
            raise ValueError(self._refusal(name))
        return wide_rows(unmasked(inputs[name], row_mask(self._stack.model, batch)))

    def _inputs(
        self, layer: nn.Module, batch: Batch, hidden: Tensor, names: Sequence[str]
    ) -> dict[str, Tensor]:
        with fast_products(self.dense):
            return self._stack.inputs(self._index, batch, hidden, layer, names)

    def _refusal(self, name: str) -> str:
        return (
            f"{self.prefix}{name} is not given the same tokens in the dense and in the compressed "
            "model, as an expert is not; use method kfac, or leave it out of the targets"
        )
