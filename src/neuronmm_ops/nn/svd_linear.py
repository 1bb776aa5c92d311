"""SVDLinear: `nn.Linear` with its weight as a low-rank pair."""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.compressed_linear import CompressedLinear
from neuronmm_ops.nn.factors import check_factors
from neuronmm_ops.nn.pair import LinearPair
from neuronmm_ops.ops import xuv
from neuronmm_ops.storages import FACTORS, dequantized, size_of


class SVDLinear(CompressedLinear):
    """Linear layer `y = (x @ u) @ v + bias` with `weight.T ≈ u @ v`, run as one `neuronmm::xuv`.

    Both parameters are contiguous, as checkpoints, NeuronCores and FSDP2 have them; `nn.relayout_`
    stores them in the order that a CPU reads faster for a few tokens.

    Factors in one byte (`storage`) have a scale for each column: `h = (x @ u) * u_scale`,
    `y = (h @ v) * v_scale + bias`. They have no gradient, and `.to(dtype)` casts neither them nor
    the scales; bias, placeholder and the results have the model's dtype.

    Args:
        in_features: K.
        out_features: N.
        rank: r, at least 1.
        bias: whether to add a learned `[N]` bias.
        device: of the parameters; `meta` is fine.
        dtype: of the parameters.
        storage: of the factors, of `storages.STORAGES`: `fp8` or `int8`; None is `dtype`.

    Attributes:
        u: `[K, r]`.
        v: `[r, N]`.
        u_scale: `[r]` in float32 where the factors have a storage, else None.
        v_scale: `[N]`, as u_scale.
        storage: of the factors, or None.
        bias: `[N]` or None.
        weight: `[0]`, a placeholder.
        compute: `x`, or `fp8`: the op may round activations to e4m3, too, see `set_compute_`.

    Raises:
        ValueError: a size is smaller than 1, the storage is unknown, or the dtype is one.
    """

    MATRICES = FACTORS
    rank: int  # pyright: ignore[reportIncompatibleVariableOverride]
    u: nn.Parameter
    v: nn.Parameter
    u_scale: Tensor | None
    v_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        storage: str | None = None,
    ) -> None:
        if min(in_features, out_features, rank) < 1:
            raise ValueError(
                "in_features, out_features and rank must be at least 1, "
                f"got {in_features}, {out_features} and {rank}"
            )
        matrices = {"u": (in_features, rank), "v": (rank, out_features)}
        super().__init__(matrices, bias, device, dtype, storage)
        self.rank = rank  # pyright: ignore[reportIncompatibleVariableOverride]
        if not self.u.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw u and v so that `u @ v` has the variance of `nn.Linear`'s default weight."""
        bound = 1 / math.sqrt(self.in_features)
        # A sum of r products: r * var(u) * var(v) = var(weight) = bound² / 3.
        self._draw("u", bound)
        self._draw("v", math.sqrt(3 / self.rank))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_factors(
        cls,
        u: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        u_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Build a layer from `u[K, r]`, `v[r, N]` and `bias[N]`; the device is u's.

        A `nn.Parameter` given as bias is kept as it is, not copied.

        Args:
            u: of a float dtype, or float8_e4m3fn within +-240, or int8 within +-127.
            v: as u; one-byte factors have one dtype.
            bias: or None.
            u_scale: `[r]` in float32, of one-byte factors only.
            v_scale: `[N]` in float32, of one-byte factors only.
            dtype: of bias and placeholder where the factors are in one byte; default the bias's,
                and torch's default where there is none. Otherwise it is u's.

        Raises:
            ValueError: shapes, dtypes or values do not fit.
        """
        storage = check_factors(u, v, u_scale, v_scale)
        if storage is None:
            dtype = u.dtype
        elif dtype is None:
            dtype = torch.get_default_dtype() if bias is None else bias.dtype
        layer = cls(size_of(u)[0], v.shape[1], u.shape[1], False, "meta", dtype, storage)
        return layer._take(((u, u_scale), (v.to(u), v_scale)), bias, dtype)

    @classmethod
    def from_linear(cls, linear: nn.Linear, rank: int) -> Self:
        """Build a layer from the rank-`rank` truncated SVD of a Linear's weight.

        The best approximation of the weight, not of the outputs: `compress_` looks at activations.

        Raises:
            ValueError: rank is outside 1..min(K, N), or the weight is on the meta device.
        """
        limit = min(linear.in_features, linear.out_features)
        if not 1 <= rank <= limit:
            raise ValueError(f"rank must be in 1..min(K, N) = {limit}, got {rank}")
        if linear.weight.is_meta:
            raise ValueError("cannot factor a weight on the meta device; load its values first")
        weight = linear.weight.detach()
        p, sigma, qh = torch.linalg.svd(weight.double().t(), full_matrices=False)
        root = sigma[:rank].sqrt()
        u = (p[:, :rank] * root).to(weight.dtype)
        v = (root[:, None] * qh[:rank]).to(weight.dtype)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls.from_factors(u, v, bias)

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """Return the dense `nn.Linear` with weight `(u @ v).T`, multiplied in fp32 or wider.

        Its dtype is the model's.
        """
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        wide = torch.promote_types(self.dtype, torch.float32)
        u, v = (dequantized(*pair, wide).to(wide) for pair in self.scaled())
        linear.weight = nn.Parameter((u @ v).t().to(self.dtype).contiguous())
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone())
        return linear

    def to_pair(self) -> LinearPair:
        """Return two `nn.Linear` that compute the same.

        One-byte factors are multiplied by their scales and rounded to the model's dtype, so that
        what `from_pair` makes of them is in that.
        """
        u = nn.Linear(self.in_features, self.rank, bias=False, device="meta")
        v = nn.Linear(self.rank, self.out_features, bias=False, device="meta")
        for linear, (factor, scale) in zip((u, v), self.scaled(), strict=True):
            weight = dequantized(factor.detach(), scale, self.dtype).t().contiguous()
            trainable = factor.requires_grad or scale is not None
            linear.weight = nn.Parameter(weight, requires_grad=trainable)
        v.register_parameter("bias", self.bias)
        return LinearPair(u, v).train(self.training)

    @classmethod
    def from_pair(cls, pair: LinearPair) -> Self:
        """Build a layer from what `to_pair` gave, with the values that it has by now.

        Raises:
            ValueError: one of the two is wrapped, quantized, pruned or hooked into.
        """
        problem = pair.why_not_plain()
        if problem is not None:
            raise ValueError(f"a pair must hold two plain nn.Linear: {problem}")
        u, v = pair.linears
        layer = cls.from_factors(u.weight.t(), v.weight.t(), v.bias)
        layer.u.requires_grad_(u.weight.requires_grad)
        layer.v.requires_grad_(v.weight.requires_grad)
        return layer.train(pair.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to `[..., N]`."""
        return xuv(x, self.u, self.v, self.bias, self.u_scale, self.v_scale, self.compute)

    @staticmethod
    def _check_matrices(pairs: Sequence[tuple[Any, Any]], name: str) -> object:
        (u, u_scale), (v, v_scale) = pairs
        return check_factors(u, v, u_scale, v_scale, name)
