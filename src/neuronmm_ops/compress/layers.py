"""A decoder's stack of layers, run one layer at a time.

The model's own forward makes masks and positions, so that every architecture's rules hold: of all
layers the one that is to run is given hidden states that the caller holds, and others are skipped.
"""

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm_ops.compress.batches import Batch, call_model, single_rows
from neuronmm_ops.compress.running import eval_mode, fast_products
from neuronmm_ops.compress.targets import text_decoder, text_modules

# Of the model's output, by what that of its layers run one by one may differ.
SAME = 1e-3


class LayerStack:
    """The layers of a Transformers decoder.

    Run the first one before any other, and before `finish`: some models' layers return a tuple.

    Args:
        model: with an `nn.ModuleList` of layers whose first argument are hidden states.

    Attributes:
        model: as given.
        name: of the list in the model, such as `model.layers`.

    Raises:
        ValueError: the model has no list of layers.
    """

    def __init__(self, model: nn.Module) -> None:
        inside = set(text_decoder(model).modules())
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) and module in inside
        }
        if not lists:
            raise ValueError(
                f"{type(model).__name__} has no list of layers to go through one by one; "
                "it cannot be streamed"
            )
        # The list of layers holds more than those of one layer's experts or branches.
        sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in lists.items()}
        self.name = max(sizes, key=lambda name: sizes[name])
        self.model = model
        self._layers = lists[self.name]
        read = text_modules(model)
        self._unread = {index for index, layer in enumerate(self._layers) if layer not in read}
        self._returns_tuple: bool | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self._layers[index]

    def index_of(self, name: str) -> int | None:
        """Return the number of the layer that a module is in, by its name; None where in none."""
        prefix = f"{self.name}."
        if not name.startswith(prefix):
            return None
        return int(name.removeprefix(prefix).partition(".")[0])

    def depth_of(self, names: Iterable[str]) -> int:
        """Return how many layers there are up to the last that one of the modules is in."""
        indices = [self.index_of(name) for name in names]
        return max((index + 1 for index in indices if index is not None), default=0)

    @property
    def has_run(self) -> bool:
        """Whether a layer has run; what layers return is not known before the first one has."""
        return self._returns_tuple is not None

    def first_input(self, batch: Batch) -> Tensor:
        """Return the hidden states `[B, T, H]` that enter the first layer."""
        return _states(self._stopped_at(0, batch, lambda states, *_, **__: states))

    def run(
        self, index: int, batch: Batch, hidden: Tensor, layer: nn.Module | None = None
    ) -> Tensor:
        """Return what layer `index`, or `layer` in its place, makes of `hidden` `[B, T, H]`.

        Text passes by a layer that attends to images alone.
        """
        if index in self._unread and (isinstance(batch, Tensor) or "inputs_embeds" in batch):
            return hidden
        module = self._layers[index] if layer is None else layer
        output = self._stopped_at(
            index, batch, lambda _, *args, **kwargs: module(hidden, *args, **kwargs)
        )
        self._returns_tuple = isinstance(output, (tuple, list))
        return _states(output)

    def inputs(
        self, index: int, batch: Batch, hidden: Tensor, layer: nn.Module, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return what Linears of `layer`, in the place of layer `index`, are given, in order.

        It is run no further than they need; one that is not called is left out.
        """
        inputs: dict[str, Tensor] = {}

        def record(name: str, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            (inputs[name],) = args or kwargs.values()
            if len(inputs) == len(names):
                raise _Stop(None)

        with ExitStack() as stack:
            for name in names:
                hook = layer.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: record(name, args, kwargs), with_kwargs=True
                )
                stack.callback(hook.remove)
            self._stopped_at(
                index, batch, lambda _, *args, **kwargs: layer(hidden, *args, **kwargs)
            )
        return inputs

    def finish(self, batch: Batch, hidden: Tensor) -> Any:
        """Return the model's output where `hidden` `[B, T, H]` leaves the last layer."""
        with self._replaced(lambda *_, **__: self._as_output(hidden)):
            return call_model(self.model, batch)

    def _stopped_at(self, index: int, batch: Batch, call: Any) -> Any:
        """Return what `call` returns, given what the model calls layer `index` with."""

        def stop(*args: Any, **kwargs: Any) -> None:
            raise _Stop(call(*args, **kwargs))

        with self._replaced(lambda states, *_, **__: self._as_output(states), {index: stop}):
            try:
                call_model(self.model, batch)
            except _Stop as stopped:
                return stopped.output
        raise ValueError(f"{self.name}.{index} is not called by {type(self.model).__name__}")

    def _as_output(self, hidden: Tensor) -> Any:
        return (hidden, None) if self._returns_tuple else hidden

    @contextmanager
    def _replaced(self, call: Any, calls: dict[int, Any] | None = None) -> Generator[None]:
        """Let `call`, or `calls[index]`, stand for every layer for a block."""
        layers = list(self._layers)
        for index, layer in enumerate(layers):
            self._layers[index] = _Stand((calls or {}).get(index, call), layer)
        try:
            yield
        finally:
            for index, layer in enumerate(layers):
                self._layers[index] = layer


class _Stop(Exception):  # noqa: N818  (no error)
    """Ends the model's forward where nothing after it is wanted."""

    def __init__(self, output: Any) -> None:
        self.output = output


class _Stand(nn.Module):
    """Stands for a layer: what the model asks of that one's attributes it gets."""

    def __init__(self, call: Any, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(call=call, layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the hidden states on as the first positional argument."""
        if not args:
            args = (kwargs.pop("hidden_states"),)
        return self.__dict__["call"](*args, **kwargs)


def _states(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@torch.no_grad()
def hindrance(model: nn.Module, names: Collection[str], batches: Sequence[Batch]) -> str:
    """Say why layers cannot be run one by one to factor Linears; empty where they can.

    One row of the first batch is tried.

    Args:
        model: any.
        names: of the Linears, whose inputs must be those of all tokens.
        batches: of calibration.
    """
    ((_, row),) = single_rows(batches[:1], 1)
    with eval_mode(model), fast_products(model):
        output = call_model(model, row)
        try:
            return _difference(LayerStack(model), names, row, _states(output).float())
        except Exception as error:  # of another model's code, called as its author did not mean it
            return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _difference(stack: LayerStack, names: Collection[str], row: Batch, expected: Tensor) -> str:
    hidden = stack.first_input(row)
    for index in range(len(stack)):
        prefix = f"{stack.name}.{index}."
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        inputs = stack.inputs(index, row, hidden, stack[index], inside) if inside else {}
        for name in inside:
            x = inputs.get(name)
            # Experts are given rows, and not all.
            if x is None or (x.dim() == 2 < hidden.dim() and len(x) != hidden[..., 0].numel()):
                return f"{prefix}{name} is not given all tokens, as an expert is not"
        hidden = stack.run(index, row, hidden)
    error = _states(stack.finish(row, hidden)).float() - expected
    if error.norm() > SAME * expected.norm():
        return f"run one by one, {stack.name} give another output than {type(stack.model).__name__}"
    return ""
