"""int4, symmetric: -7 to 7, two to a byte, with a scale for each 128 rows of a column.

Rows 2i and 2i + 1 share byte i, the even one its low half: a partition of the decode kernels reads
neighbouring rows, and finds in a byte what two K tiles multiply. Halves are numbers + 8, as in
GPTQ's files and torch's own kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops.storages.storage import WeightStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

GROUP = 128
ZERO = 8
"""What a half byte holds for 0."""


class Int4(WeightStorage):
    """Half a byte a number, multiplied by its scale on the way to TensorE."""

    name, dtype, header = "int4", "int4", "U8"
    largest, full, group = 7, 7.0, GROUP

    @property
    def tensor_dtype(self) -> str:
        """Bytes."""
        return "uint8"

    def shapes(self, K: int, *N: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `[K / 2, N]` and `[ceil(K / 128), N]`; ValueError where K is odd."""
        if K % 2:
            raise ValueError(
                f"int4 packs two rows in a byte: features and ranks must be even, got {K}; "
                "use another storage"
            )
        return (K // 2, *N), (-(-K // GROUP), *N)

    def size(self, rows: int, *columns: int) -> tuple[int, ...]:
        """Return `(2 rows, N)`."""
        return 2 * rows, *columns

    def nearest(self, numbers: Tensor) -> Tensor:
        """Round to integers."""
        return numbers.clamp(-self.largest, self.largest).round()

    def encode(self, numbers: Tensor) -> Tensor:
        """Return the bytes `[K / 2, N]`."""
        halves = (numbers + ZERO).to(self.torch_dtype)
        return halves[::2] | halves[1::2] << 4

    def decode(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers `[K, N]` of bytes."""
        import torch

        return torch.stack([tensor & 15, tensor >> 4], 1).flatten(0, 1).to(dtype) - ZERO

    def magnitudes(self, matrix: Tensor) -> Tensor:
        """Return the largest magnitude of each group of rows."""
        import torch

        return torch.stack([rows.abs().amax(0) for rows in matrix.split(GROUP)])

    def spread(self, scale: Tensor, K: int) -> Tensor:
        """Return a scale for every number."""
        return scale.repeat_interleave(GROUP, 0)[:K]

    def dequantize(self, tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix `[K, N]`, rounded once: a number has few bits, its product is fp32."""
        import torch

        shape = (len(tensor), 2, *tensor.shape[1:])
        numbers = torch.empty(shape, dtype=dtype, device=tensor.device)
        numbers[:, 0], numbers[:, 1] = tensor & 15, tensor >> 4
        numbers = numbers.flatten(0, 1).sub_(ZERO)
        whole = len(numbers) // GROUP
        of_groups = numbers[: whole * GROUP].unflatten(0, (whole, GROUP))
        of_groups.mul_(scale[:whole, None])
        numbers[whole * GROUP :].mul_(scale[whole:])
        return numbers

    def why_not(self, tensor: Tensor) -> str | None:
        """Refuse -8."""
        if not bool(((tensor & 15 == 0) | (tensor < 16)).any()):
            return None
        return "must be in -7..7 (scales are symmetric), got -8"

    def packed(self, tensor: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Read four bits a number and widen them in registers; for multiples of 16 columns."""
        import torch
        import torch.nn.functional as F

        K, N = self.size(*tensor.shape)
        if N % 16:
            return None
        missing = -K % GROUP
        numbers = F.pad(self.decode(tensor, torch.int32) + ZERO, (0, 0, 0, missing))
        halves = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.t().contiguous(), 1)
        zeros = torch.zeros_like(scale)
        scales = torch.stack([scale, zeros], -1).bfloat16()  # exact: they are bfloat16 numbers

        def product(a: Tensor) -> Tensor:
            a = F.pad(a, (0, missing))
            return torch.ops.aten._weight_int4pack_mm_for_cpu(a, halves, GROUP, scales)

        return product

    def widened(self, tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the matrix itself: sums over groups cannot be scaled."""
        return self.dequantize(tensor, scale, dtype), scale.new_ones(())
