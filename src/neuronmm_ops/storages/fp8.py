"""float8_e4m3fn up to 240: bit for bit the e4m3 of trn1 and trn2, which ends there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops.storages.storage import WeightStorage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BITS_OF_240 = 0x77
# The bits of e4m3, moved to the place of float16's exponent, are the value times 2^-8.
_SHIFT = 7
_MASK = ~0x4000  # the sign's copy next to it
_BIAS = 2.0**8


class Fp8(WeightStorage):
    """A byte a number, which TensorE multiplies as it is."""

    name, dtype, header = "fp8", "float8_e4m3fn", "F8_E4M3"
    # In e4m3 the octave below the last is as fine, and errors that are fed back may then be as
    # large as the numbers themselves.
    largest, full = 240, 120.0
    is_multiplied, computes = True, ("x", "fp8")

    def nearest(self, numbers: Tensor) -> Tensor:
        """Round by way of fp32, whose rounding is too fine to matter: none casts from fp64."""
        return self.encode(numbers.clamp(-self.largest, self.largest).float()).to(numbers)

    def why_not(self, tensor: Tensor) -> str | None:
        """Refuse what is beyond 240, and NaN."""
        import torch

        bits = tensor.view(torch.uint8) & 0x7F
        if not bits.numel() or int(bits.max()) <= _BITS_OF_240:
            return None
        return (
            "must be in -240..240, the range of e4m3 on trn1 and trn2; got a magnitude of "
            f"{float(bits.max().view(tensor.dtype)):g}"
        )

    def widened(self, tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the numbers times 2^-8: torch's own conversion takes ten times as long."""
        import torch

        if not tensor.is_cpu:
            return super().widened(tensor, scale, dtype)
        bits = tensor.view(torch.int8).to(torch.int16)
        bits.bitwise_left_shift_(_SHIFT).bitwise_and_(_MASK)
        # By way of float32: float16 to bfloat16 takes seven times as long as that and its rounding.
        return bits.view(torch.float16).float().to(dtype), scale * _BIAS
