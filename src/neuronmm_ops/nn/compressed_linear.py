"""CompressedLinear: what the layers have in common that hold a Linear's weight in other tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.rank import parameter_count
from neuronmm_ops.storages import STORAGES, checked, dtype_name, storage_of, tensor_dtype


class CompressedLinear(nn.Module):
    """Linear layer whose weight is held as one or two matrices, which may be in one byte a number.

    `weight` is an empty buffer of the model's dtype and device. Model code that asks a Linear's
    weight for these finds them, code that multiplies by it raises, and in a checkpoint it makes a
    loader that does not know the matrices raise, where it would draw a random weight.

    Matrices in a storage have scales, as buffers, and no gradient; `.to(dtype)` casts neither.

    Args:
        matrices: name to `(rows, columns)` of each.
        bias: whether to add a learned `[N]` bias.
        device: of the parameters.
        dtype: of the parameters, or where they are in a storage of bias, placeholder and results.
        storage: of the matrices; None is `dtype`.

    Attributes:
        in_features: K.
        out_features: N.
        rank: of the pair; None where the weight is one matrix.
        storage: of the matrices, or None.
        bias: `[N]` or None.
        weight: `[0]`, a placeholder.
        compute: `x`, or `fp8`: the op may round activations to e4m3, too, see `set_compute_`.

    Raises:
        ValueError: the storage is unknown, or the dtype is one.
    """

    MATRICES: ClassVar[tuple[str, ...]]
    in_features: int
    out_features: int
    rank: int | None
    weight: Tensor

    def __init__(
        self,
        matrices: Mapping[str, tuple[int, int]],
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        storage: str | None,
    ) -> None:
        super().__init__()
        checked(storage)
        other = None if dtype is None else storage_of(dtype)
        if other is not None:
            raise ValueError(
                f"dtype must be a float of two bytes or more, got {dtype}; for numbers in it give "
                f"storage={other.name!r}"
            )
        sizes = list(matrices.values())
        self.in_features, self.out_features = sizes[0][0], sizes[-1][1]
        stored = tensor_dtype(storage, dtype or torch.get_default_dtype())
        for name, size in matrices.items():
            shape: tuple[int, ...] = size
            if storage is None:
                setattr(self, scale_of(name), None)  # torch.export takes no buffer that is None
            else:
                shape, scale_shape = STORAGES[storage].shapes(*size)
                scale = torch.empty(scale_shape, device=device, dtype=torch.float32)
                self.register_buffer(scale_of(name), scale)
            matrix = torch.empty(shape, device=device, dtype=stored)
            setattr(self, name, nn.Parameter(matrix, requires_grad=storage is None))
        self.storage, self.compute = storage, "x"
        self.register_buffer("weight", torch.empty(0, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            value = torch.empty(self.out_features, device=device, dtype=dtype)
            self.bias = nn.Parameter(value)
        else:
            self.register_parameter("bias", None)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: that of bias and results, and of matrices that need no scale."""
        return self.weight.dtype if self.storage else getattr(self, self.MATRICES[0]).dtype

    @property
    def precision(self) -> tuple[str | None, str]:
        """What layers that one op computes have in common."""
        return self.storage, self.compute

    @property
    def effective_ratio(self) -> float:
        """Fraction of the dense weight's parameters that this layer does without."""
        K, N = self.in_features, self.out_features
        return 1 - parameter_count(K, N, self.rank) / (K * N)

    def scaled(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """Return each matrix with its scales."""
        return tuple((getattr(self, n), getattr(self, scale_of(n))) for n in self.MATRICES)

    def to_linear(self) -> nn.Linear:
        """Return the dense `nn.Linear` of the model's dtype that computes the same."""
        raise NotImplementedError

    def check_values(self, name: str = "") -> None:
        """Check the matrices and scales of a layer of that name; meta values are not looked at.

        Raises:
            ValueError: one holds what it must not; says what was found, and the remedy.
        """
        self._check_matrices(self.scaled(), name)

    @staticmethod
    def _check_matrices(pairs: Sequence[tuple[Any, Any]], name: str) -> object:
        raise NotImplementedError

    def one_byte_tensors(self) -> list[Tensor]:
        """Return the matrices in one byte and their scales, which no cast may reach."""
        if self.storage is None:
            return []
        return [tensor for pair in self.scaled() for tensor in pair if tensor is not None]

    def _draw(self, name: str, limit: float) -> None:
        """Draw a matrix uniformly within +-limit."""
        matrix, scale = getattr(self, name), getattr(self, scale_of(name))
        if self.storage is None:
            nn.init.uniform_(matrix, -limit, limit)
            return
        storage = STORAGES[self.storage]
        numbers = storage.decode(matrix, torch.float32)
        numbers.uniform_(-storage.largest, storage.largest)
        matrix.copy_(storage.encode(numbers.round_()))
        scale.fill_(limit / storage.largest)

    def _take(
        self,
        pairs: Sequence[tuple[Tensor, Tensor | None]],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Self:
        """Put copies of matrices and scales, and a bias, in the place of what is on `meta`.

        A `nn.Parameter` given as bias is kept as it is; the device is the matrices'.
        """
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias must be [{self.out_features}], got {list(bias.shape)}")
        device = pairs[0][0].device
        for name, (matrix, scale) in zip(self.MATRICES, pairs, strict=True):
            value = matrix.detach().to(device).clone(memory_format=torch.contiguous_format)
            setattr(self, name, nn.Parameter(value, requires_grad=self.storage is None))
            if scale is not None:
                setattr(self, scale_of(name), scale.detach().to(device).clone())
        self.weight = torch.empty(0, device=device, dtype=dtype)
        if isinstance(bias, nn.Parameter):
            self.bias = bias
        elif bias is not None:
            self.bias = nn.Parameter(bias.detach().to(self.weight).clone())
        return self

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, *rest: Any
    ) -> None:
        problem = self._why_not_loadable(state_dict, prefix)
        if problem is not None:
            errors: list[str] = rest[-1]
            errors.append(problem)
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _why_not_loadable(self, state: Mapping[str, Any], prefix: str) -> str | None:
        """Say why the layer cannot load a state dict's matrices: copying would cast in silence.

        None where it can, or where torch will say what is missing or has another shape.
        """
        loaded = [
            (state.get(prefix + name), state.get(prefix + scale_of(name))) for name in self.MATRICES
        ]
        for name, (matrix, _) in zip(self.MATRICES, loaded, strict=True):
            current = getattr(self, name)
            if matrix is not None and storage_of(matrix.dtype) != STORAGES.get(self.storage or ""):
                return (
                    f"{prefix}{name} must be {name_of(current.dtype)}, got "
                    f"{name_of(matrix.dtype)}; give the layer the storage of the state dict "
                    f"({self._get_name()}(..., storage=))"
                )
        if self.storage is None or any(
            tensor is None or tensor.shape != expected.shape
            for pair, ours in zip(loaded, self.scaled(), strict=True)
            for tensor, expected in zip(pair, ours, strict=True)
            if expected is not None
        ):
            return None
        try:
            self._check_matrices(loaded, prefix.removesuffix("."))
        except ValueError as error:
            return str(error)
        return None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast; what is in one byte, and its scales, is moved only."""
        kept = {id(tensor) for tensor in self.one_byte_tensors()}

        def move(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            is_cast = id(tensor) in kept and result.dtype != tensor.dtype
            return tensor.to(result.device) if is_cast else result

        return super()._apply(move if kept else fn, recurse)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let the parameters ask for gradients, or not; those of one-byte matrices do not exist.

        Raises:
            ValueError: gradients are asked of one-byte matrices.
        """
        if requires_grad and self.storage is not None:
            raise ValueError(
                f"numbers in {dtype_name(self.storage)} have no gradient; add LoRA "
                "(hf.lora_config), or train floats and quantize them then"
            )
        return super().requires_grad_(requires_grad)

    def extra_repr(self) -> str:
        """Describe sizes and storage for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            + ("" if self.rank is None else f"rank={self.rank}, ")
            + f"bias={self.bias is not None}"
            + ("" if self.rank is None else f", effective_ratio={self.effective_ratio:.3f}")
            + ("" if self.storage is None else f", storage={self.storage}")
            + ("" if self.compute == "x" else f", compute={self.compute}")
        )


def scale_of(matrix: str) -> str:
    """Return the name of a matrix's scales."""
    return f"{matrix}_scale"
