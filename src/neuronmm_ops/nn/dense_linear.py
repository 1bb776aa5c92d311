"""Which modules are linear layers, and the weight of each as `nn.Linear` would hold it."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

# Transformers' classes that compute what an nn.Linear does; of True the weight is [K, N].
_TRANSPOSED = {"Conv1D": True, "FalconLinear": False}


@dataclass(frozen=True)
class DenseLinear:
    """A module that computes `y = x @ weight.T + bias`, seen as an `nn.Linear`.

    Attributes:
        module: `nn.Linear`, or Transformers' `Conv1D` (of GPT-2) or `FalconLinear`.
        is_transposed: whether the module holds its weight as `[K, N]`.
    """

    module: nn.Module
    is_transposed: bool = False

    @property
    def stored(self) -> Tensor:
        """The weight as the module holds it: `[N, K]`, or `[K, N]` where it is transposed."""
        assert isinstance(self.module.weight, Tensor)
        return self.module.weight

    @property
    def weight(self) -> Tensor:
        """The weight `[N, K]`, a view of the module's where that is transposed."""
        return self.stored.t() if self.is_transposed else self.stored

    @property
    def bias(self) -> Tensor | None:
        """The bias `[N]`, or None."""
        bias = self.module.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    @property
    def in_features(self) -> int:
        """K."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[0]

    @contextmanager
    def computing(self, matrix: Tensor) -> Generator[None]:
        """Let the module compute `y = x @ matrix`, `[K, N]`, for a block."""
        weight = self.stored.data
        try:
            cast = matrix.to(weight).contiguous()
            self.stored.data = cast if self.is_transposed else cast.t()
            yield
        finally:
            self.stored.data = weight


def dense_linear(module: nn.Module) -> DenseLinear | None:
    """Return the module as a `DenseLinear`, None where it is another kind of module.

    Other subclasses of `nn.Linear` may compute something else, and are none.
    """
    kind = type(module)
    if kind is nn.Linear:
        return DenseLinear(module)
    if kind.__name__ in _TRANSPOSED and kind.__module__.startswith("transformers."):
        return DenseLinear(module, _TRANSPOSED[kind.__name__])
    return None


def as_dense_linear(module: nn.Module) -> DenseLinear:
    """Return a module that is known to be a linear layer as a `DenseLinear`."""
    linear = dense_linear(module)
    assert linear is not None, type(module).__name__
    return linear


def dense_linears(model: nn.Module) -> dict[str, DenseLinear]:
    """Return the model's linear layers by name."""
    candidates = {name: dense_linear(module) for name, module in model.named_modules()}
    return {name: linear for name, linear in candidates.items() if linear is not None}
