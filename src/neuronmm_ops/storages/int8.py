"""int8, symmetric: -127 to 127."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops.storages.storage import WeightStorage

if TYPE_CHECKING:
    from torch import Tensor

# torch's kernel reads the matrix again for every four rows, which beats widening up to eight.
_MAX_ROWS = 8
# It steps through a row by 16 or 32 entries, and reads past the end of one that has a rest.
_STEP = 32


class Int8(WeightStorage):
    """A byte a number, cast on the way to TensorE."""

    name, dtype, header = "int8", "int8", "I8"
    largest, full = 127, 127.0

    def nearest(self, numbers: Tensor) -> Tensor:
        """Round to integers."""
        return numbers.clamp(-self.largest, self.largest).round()

    def why_not(self, tensor: Tensor) -> str | None:
        """Refuse -128."""
        if not tensor.numel() or int(tensor.min()) >= -self.largest:
            return None
        return "must be in -127..127 (scales are symmetric), got -128"

    def sums(self, a: Tensor, tensor: Tensor) -> Tensor | None:
        """Return what torch's weight-only kernel does, which wins for a few rows of bfloat16."""
        import torch

        fits = tensor.t().is_contiguous() and a.shape[1] % _STEP == 0 and 0 < len(a) <= _MAX_ROWS
        if not fits or a.dtype != torch.bfloat16:
            return None
        ones = torch.ones(tensor.shape[1], dtype=a.dtype)
        return torch.ops.aten._weight_int8pack_mm(a.contiguous(), tensor.t(), ones)
