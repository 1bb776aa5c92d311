"""What a storage is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor


class WeightStorage:
    """A matrix `[K, N]` as numbers in a tensor of bytes, and float32 scales that multiply them.

    Here every column has a scale, and every number a byte. A storage whose numbers or scales lie
    otherwise overrides the methods; a column of its tensor is always a column of the matrix.

    Attributes:
        name: in configs, commands and layers.
        dtype: of the numbers, by its name in torch, NKI and JSON.
        header: the tensor's dtype in safetensors.
        largest: magnitude of a number.
        full: to what the largest entry of each scale is divided before it is rounded.
        group: rows of a column that share a scale; None: all.
        is_multiplied: whether TensorE multiplies the numbers with 16-bit activations as they are;
            others are cast on the way there.
        computes: what products may be computed in, see `set_compute_`.
    """

    name: ClassVar[str]
    dtype: ClassVar[str]
    header: ClassVar[str]
    largest: ClassVar[int]
    full: ClassVar[float]
    group: ClassVar[int | None] = None
    is_multiplied: ClassVar[bool] = False
    computes: ClassVar[tuple[str, ...]] = ("x",)

    @property
    def tensor_dtype(self) -> str:
        """The name of the tensor's dtype, which no other storage has."""
        return self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        import torch

        return getattr(torch, self.tensor_dtype)

    def shapes(self, K: int, *N: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of tensor and scales for a matrix `[K, N]`."""
        return (K, *N), N

    def size(self, rows: int, *columns: int) -> tuple[int, ...]:
        """Return `(K, N)` for the shape of a tensor."""
        return rows, *columns

    # --- values

    def nearest(self, numbers: Tensor) -> Tensor:
        """Round to the nearest numbers of the storage, ties to even, in the dtype given."""
        raise NotImplementedError

    def encode(self, numbers: Tensor) -> Tensor:
        """Return the tensor of numbers of the storage `[K, N]`."""
        return numbers.to(self.torch_dtype)

    def decode(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers `[K, N]` of a tensor."""
        return tensor.to(dtype)

    def magnitudes(self, matrix: Tensor) -> Tensor:
        """Return the largest magnitude of what each scale multiplies, in the scales' shape."""
        return matrix.abs().amax(0)

    def spread(self, scale: Tensor, K: int) -> Tensor:
        """Return scales that broadcast to a matrix of K rows."""
        return scale

    def dequantize(self, tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix `[K, N]`, rounded once to `dtype`."""
        import torch

        numbers = self.decode(tensor, torch.promote_types(dtype, torch.float32))
        return (numbers * self.spread(scale, len(numbers))).to(dtype)

    def why_not(self, tensor: Tensor) -> str | None:
        """Say which rule a tensor's values break, and what was found; None where they are valid."""
        raise NotImplementedError

    # --- products on the host's CPU

    def sums(self, a: Tensor, tensor: Tensor) -> Tensor | None:
        """Return `a @ numbers` in the dtype of a, where a kernel of torch's is the fastest."""
        return None

    def packed(self, tensor: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return the product `[M, N]` with bfloat16 `[M, K]`, by a kernel of torch's that has an
        order of its own; the tensor need not be kept. None where there is none.
        """
        return None

    def widened(self, tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a matrix in `dtype` and what multiplies the columns of a product with it."""
        return self.decode(tensor, dtype), scale
