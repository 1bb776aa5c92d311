"""StoredLinear: `nn.Linear` with its weight in one byte a number."""

from collections.abc import Sequence
from math import sqrt
from typing import Any, Self

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.factors import check_matrix
from neuronmm_ops.nn.nearest import nearest
from neuronmm_ops.ops import xw
from neuronmm_ops.storages import STORAGES, checked, dequantized, size_of


class StoredLinear(CompressedLinear):
    """Linear layer `y = (x @ w) * w_scale + bias`, run as one `neuronmm::xw`.

    Args:
        in_features: K.
        out_features: N.
        storage: of the weight, of `storages.STORAGES`: `fp8` or `int8`.
        bias: whether to add a learned `[N]` bias.
        device: of the parameters; `meta` is fine.
        dtype: of bias, placeholder and results.

    Attributes:
        w: `[K, N]`.
        w_scale: `[N]`, float32.

    Raises:
        ValueError: a size is smaller than 1, the storage is unknown, or the dtype is one.
    """

    MATRICES = ("w",)
    rank = None
    storage: str
    w: nn.Parameter
    w_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        storage: str,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if min(in_features, out_features) < 1:
            raise ValueError(
                "in_features and out_features must be at least 1, "
                f"got {in_features} and {out_features}"
            )
        super().__init__({"w": (in_features, out_features)}, bias, device, dtype, storage)
        if not self.w.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight as `nn.Linear` does by default."""
        bound = 1 / sqrt(self.in_features)
        self._draw("w", bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_matrix(
        cls,
        w: Tensor,
        w_scale: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Build a layer from `w[K, N]`, its scales and `bias[N]`; the device is w's.

        A `nn.Parameter` given as bias is kept as it is, not copied.

        Args:
            w: float8_e4m3fn within +-240, or int8 within +-127.
            w_scale: `[N]` in float32.
            bias: or None.
            dtype: of bias and placeholder; default the bias's, and torch's default where there is
                none.

        Raises:
            ValueError: shapes, dtypes or values do not fit.
        """
        storage = check_matrix(w, w_scale)
        if dtype is None:
            dtype = torch.get_default_dtype() if bias is None else bias.dtype
        K, N = size_of(w)
        return cls(K, N, storage, False, "meta", dtype)._take(((w, w_scale),), bias, dtype)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, storage: str) -> Self:
        """Build a layer from a Linear, its weight rounded to nearest.

        `compress_` feeds errors back instead, by what activations say.

        Raises:
            ValueError: the storage is unknown, the weight is on the meta device, or not finite.
        """
        checked(storage)
        weight, bias = linear.weight.detach(), linear.bias
        if weight.is_meta:
            raise ValueError("cannot round a weight on the meta device; load its values first")
        if not weight.isfinite().all():
            raise ValueError("weight must be finite, got NaN or Inf; the checkpoint is damaged")
        bias = None if bias is None else bias.detach()
        return cls.from_matrix(*nearest(weight.t(), STORAGES[storage]), bias, dtype=weight.dtype)

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return the dense `nn.Linear`, its weight rounded to the model's dtype."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = dequantized(self.w, self.w_scale, self.dtype).t().contiguous()
        linear.weight = nn.Parameter(weight)
        linear.register_parameter("bias", self.bias)
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to `[..., N]`."""
        return xw(x, self.w, self.bias, self.w_scale, self.compute)

    @staticmethod
    def _check_matrices(pairs: Sequence[tuple[Any, Any]], name: str) -> object:
        return check_matrix(*pairs[0], name)
