"""One decoder layer at a time: its values, and running it."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from neuronmm_ops.compress.batches import takes
from neuronmm_ops.compress.layers import LayerStack
from neuronmm_ops.compress.running import fast_products
from neuronmm_ops.compress.targets import text_modules
from neuronmm_ops.hf.streaming.checkpoint import Checkpoint


class NamedLayer(nn.Module):
    """A layer whose modules have their names in the whole model."""

    def __init__(self, layer: nn.Module, prefix: str) -> None:
        super().__init__()
        self.layer, self._prefix = layer, prefix

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name in the whole model."""
        return self.layer.get_submodule(target.removeprefix(self._prefix))


class Sweep:
    """The layers of a checkpoint's model, without values but for those in use.

    Args:
        checkpoint: of a decoder.
        dtype: to compute in.
        device: to compute on.

    Attributes:
        stack: of the model's layers.

    Raises:
        ValueError: the model has no list of layers, or takes no `inputs_embeds`.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.stack = LayerStack(checkpoint.model)
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._model = checkpoint.model
        if not takes(self._model, [{"inputs_embeds": None}]):
            raise ValueError(
                f"{type(self._model).__name__} takes no inputs_embeds, so that its layers cannot "
                "be run one by one; compress it without --stream"
            )
        layers, read = f"{self.stack.name}.", text_modules(self._model)
        ends = checkpoint.ends()
        around = [
            name
            for name in checkpoint.names()
            if not name.startswith(layers)
            and self._model.get_submodule(name.rpartition(".")[0]) in read
        ]
        self._ends = [name for name in around if name in ends]
        self._around = [name for name in around if name not in ends]

    def check_states(self) -> None:
        """Raise ValueError where layers are given other hidden states than `[B, T, H]`."""
        B, T = 1, 2
        with self.with_ends():
            shape = self.embed(torch.zeros(B, T, dtype=torch.int64)).shape
        if shape[:-1] != (B, T):
            raise ValueError(
                f"{type(self._model).__name__} gives its layers hidden states {list(shape)} for "
                f"token ids [{B}, {T}], not [{B}, {T}, H], so that they cannot be run one by one; "
                "compress it without --stream"
            )

    def __len__(self) -> int:
        return len(self.stack)

    def layer_of(self, name: str) -> int:
        """Return the number of the layer that a module is in; raise ValueError where in none."""
        index = self.stack.index_of(name)
        if index is None:
            raise ValueError(
                f"{name} is in none of {self.stack.name}, which are all that is streamed; leave it "
                "out of the targets, or compress without --stream"
            )
        return index

    @contextmanager
    def layer(self, index: int) -> Generator["NamedLayer"]:
        """Give a layer, with its values for a block."""
        prefix = f"{self.stack.name}.{index}."
        with self._checkpoint.filled(self._checkpoint.names(prefix), self._dtype, self._device):
            yield NamedLayer(self.stack[index], prefix)

    @contextmanager
    def running(self) -> Generator[None]:
        """Let layers be run in a block: what is around them, but embedding and head, has values."""
        with self._checkpoint.filled(self._around, self._dtype, self._device):
            yield

    @contextmanager
    def with_ends(self) -> Generator[None]:
        """Let token ids be embedded, and logits be computed, in a block."""
        with ExitStack() as stack:
            names = [*self._ends, *self._around]
            stack.enter_context(self._checkpoint.filled(names, self._dtype, self._device))
            stack.enter_context(fast_products(self._model))
            yield

    @property
    def vocabulary(self) -> int:
        """V, the rows of the embedding."""
        return self._embedding.shape[0]

    @property
    def width(self) -> int:
        """H, of the hidden states."""
        return self._model.config.get_text_config().hidden_size

    def states(self, kept: Mapping[str, Tensor]) -> list[Tensor]:
        """Return kept tensors in the order of their keys, on the device."""
        return [kept[key].to(self._device) for key in sorted(kept)]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the hidden states `[B, T, H]` that enter the first layer."""
        return self.stack.first_input(ids.to(self._device))

    def run(self, index: int, hidden: Tensor) -> Tensor:
        """Return what a layer makes of hidden states `[B, T, H]`."""
        if index > 0:
            self.run_once(hidden)
        return self.stack.run(index, self.inputs(hidden), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[B, T, V]` of what leaves the last layer, `[B, T, H]`."""
        self.run_once(hidden)
        return self.stack.finish(self.inputs(hidden), hidden).logits

    def run_once(self, hidden: Tensor) -> None:
        """Let the stack learn what layers return, where a run goes on behind the first one."""
        if not self.stack.has_run:
            token = hidden[:1, :1].detach()
            with self.layer(0), torch.no_grad():
                self.stack.run(0, self.inputs(token), token)

    def inputs(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return a batch that makes the masks and positions of hidden states `[B, T, H]`."""
        # Masks and positions depend on the shape alone: the embedding's values are not needed.
        return {"inputs_embeds": hidden.new_zeros(*hidden.shape[:2], self._embedding.shape[1])}

    @property
    def _embedding(self) -> Tensor:
        weight = self._model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight
