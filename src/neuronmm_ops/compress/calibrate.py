"""Second moments of activations: streamed in fp32 on the device, summed in fp64.

For a Linear `y = x @ W.T`, `W[N, K]`, only the smaller side is kept where the method allows it:
`E = X.T @ X` `[K, K]`, or `Y.T @ Y` `[N, N]` of the outputs without bias.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuronmm_ops.errors import NonFiniteError

# One pass over the calibration data holds at most this much; more layers mean more passes.
MAX_MOMENT_BYTES = 4 * 2**30

Side = Literal["input", "output"]
Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass
class Moment:
    """Uncentred second moment of one side of a Linear.

    Attributes:
        side: `input`, `X.T @ X` `[K, K]`; or `output`, `Y.T @ Y` `[N, N]` without bias.
        matrix: fp64, summed over tokens.
        tokens: how many rows were summed.
    """

    side: Side
    matrix: Tensor
    tokens: int = 0

    @torch.no_grad()
    def add(self, product: Tensor, tokens: int) -> None:
        """Add the fp32 (or fp64) product of `tokens` rows."""
        # Strip by strip: converting all of it to fp64 first would take three times as long.
        for total, part in zip(self.matrix.split(64), product.split(64), strict=True):
            total += part
        self.tokens += tokens


def collect_moments(
    model: nn.Module,
    sides: Mapping[str, Side],
    batches: Sequence[Tensor],
    progress: Progress | None = None,
) -> Iterator[tuple[str, Moment]]:
    """Run the model over the batches and yield each named Linear's moment.

    The model runs in eval mode without gradients, once for every `MAX_MOMENT_BYTES` of moments,
    so that the moments of few layers are alive at once; use each before taking the next.

    Args:
        model: called as `model(batch)`; of a Transformers model only the body runs.
        sides: name of the Linear to the side to measure.
        batches: token ids `[B, T]` (or whatever the model takes), any number of them.
        progress: told `("calibrate", batches done, batches in all)`.

    Raises:
        NonFiniteError: an activation is NaN or Inf; names the layer.
        ValueError: there are no batches, or a Linear was never called.
    """
    if not batches:
        raise ValueError("calibration has no batches; give at least one")
    groups = _split(model, sides)
    body = _body(model, sides)
    total = len(groups) * len(batches)
    for index, names in enumerate(groups):
        moments = {name: _empty_moment(model.get_submodule(name), sides[name]) for name in names}
        with eval_mode(model), _Recorder(model, moments), torch.no_grad():
            for done, batch in enumerate(batches, start=1 + index * len(batches)):
                body(batch)
                if progress:
                    progress("calibrate", done, total)
        for name in names:
            if moments[name].tokens == 0:
                raise ValueError(f"{name} was not called during calibration; leave it out")
            yield name, moments.pop(name)


def fingerprint(batches: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the batches' values and shapes, in order."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(f"{list(batch.shape)} {batch.dtype};".encode())
        digest.update(batch.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass
class _Recorder:
    """Forward hooks that add to the moments, alive for a `with` block."""

    model: nn.Module
    moments: Mapping[str, Moment]
    _handles: list[Any] = field(default_factory=list)
    # gate_proj and up_proj are given the same tensor object: its product is formed once.
    _last: tuple[Tensor, int, Tensor] | None = None  # x, its version, X.T @ X

    def __enter__(self) -> "_Recorder":
        for name, moment in self.moments.items():
            module = self.model.get_submodule(name)
            hook = self._hook(name, moment)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str, moment: Moment) -> Callable[..., None]:
        def record(
            module: nn.Linear, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
        ) -> None:
            if moment.side == "input":
                x = args[0] if args else kwargs["input"]
                rows = x.reshape(-1, module.in_features)
                product = self._input_product(x)
            else:
                rows = _wide(output).reshape(-1, module.out_features)
                if module.bias is not None:
                    rows = rows - _wide(module.bias)
                product = rows.t() @ rows
            # A NaN or Inf anywhere in a column shows on the diagonal.
            if not torch.isfinite(product.diagonal()).all():
                raise NonFiniteError(
                    f"{name}: {moment.side} activations must be finite, got NaN or Inf "
                    "during calibration; check the weights, or run in a wider dtype"
                )
            moment.add(product, rows.shape[0])

        return record

    def _input_product(self, x: Tensor) -> Tensor:
        # A residual added in place keeps the object and changes the version; only an inference
        # tensor has none.
        version = -1 if x.is_inference() else x._version
        if self._last is None or self._last[0] is not x or self._last[1] != version or version < 0:
            rows = _wide(x).reshape(-1, x.shape[-1])
            self._last = (x, version, rows.t() @ rows)
        return self._last[2]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _empty_moment(linear: nn.Module, side: Side) -> Moment:
    assert isinstance(linear, nn.Linear)
    size = linear.in_features if side == "input" else linear.out_features
    return Moment(side, torch.zeros(size, size, dtype=torch.float64, device=linear.weight.device))


def _split(model: nn.Module, sides: Mapping[str, Side]) -> list[list[str]]:
    """Split the names, in order, into groups whose moments fit in MAX_MOMENT_BYTES."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, side in sides.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        size = 8 * (linear.in_features if side == "input" else linear.out_features) ** 2
        if groups[-1] and used + size > MAX_MOMENT_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _body(model: nn.Module, sides: Mapping[str, Side]) -> nn.Module:
    """Return Transformers' base model when every Linear is in it: no logits are needed."""
    body = getattr(model, "base_model", None)
    if not isinstance(body, nn.Module):
        return model
    inside = set(body.modules())
    return body if all(model.get_submodule(name) in inside for name in sides) else model


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None, None, None]:
    """Put every module in eval mode for a block, then each back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
