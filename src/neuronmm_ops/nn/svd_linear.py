"""SVDLinear: `nn.Linear` with its weight as a low-rank pair."""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from neuronmm_ops.nn.factors import check_factors, why_not_loadable, without_cast
from neuronmm_ops.nn.pair import LinearPair
from neuronmm_ops.ops import xuv
from neuronmm_ops.storages import (
    FACTORS,
    SCALES,
    STORAGES,
    checked,
    dequantized,
    dtype_name,
    pair_shapes,
    size_of,
    storage_of,
    tensor_dtype,
)


class SVDLinear(nn.Module):
    """Linear layer `y = (x @ u) @ v + bias` with `weight.T ≈ u @ v`, run as one `neuronmm::xuv`.

    Both parameters are contiguous, as checkpoints, NeuronCores and FSDP2 have them; `nn.relayout_`
    stores them in the order that a CPU reads faster for a few tokens.

    `weight` is an empty buffer of the model's dtype and device. Model code that asks a Linear's
    weight for these finds them, code that multiplies by it raises, and in a checkpoint it makes a
    loader that does not know the factors raise, where it would draw a random weight.

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
        v_scale: `[N]` likewise.
        storage: of the factors, or None.
        bias: `[N]` or None.
        weight: `[0]`, a placeholder.
        compute: `x`, or `fp8`: the op may round activations to e4m3, too, see `set_compute_`.

    Raises:
        ValueError: a size is smaller than 1, the storage is unknown, or the dtype is one.
    """

    u: nn.Parameter
    v: nn.Parameter
    weight: Tensor
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
        super().__init__()
        checked(storage)
        other = None if dtype is None else storage_of(dtype)
        if other is not None:
            raise ValueError(
                f"dtype must be a float of two bytes or more, got {dtype}; for factors in it give "
                f"storage={other.name!r}"
            )
        if min(in_features, out_features, rank) < 1:
            raise ValueError(
                "in_features, out_features and rank must be at least 1, "
                f"got {in_features}, {out_features} and {rank}"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.rank = rank
        stored = tensor_dtype(storage, dtype or torch.get_default_dtype())
        shapes = pair_shapes(in_features, out_features, rank, storage)
        for name in FACTORS:
            factor = torch.empty(shapes[name], device=device, dtype=stored)
            setattr(self, name, nn.Parameter(factor, requires_grad=storage is None))
        for name in SCALES:
            if name not in shapes:
                setattr(self, name, None)  # torch.export cannot take a buffer registered as None
            else:
                scale = torch.empty(shapes[name], device=device, dtype=torch.float32)
                self.register_buffer(name, scale)
        self.storage, self.compute = storage, "x"
        self.register_buffer("weight", torch.empty(0, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        if not self.u.is_meta:
            self.reset_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: that of bias and results, and of the factors where they need no scale."""
        return self.u.dtype if self.storage is None else self.weight.dtype

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw u and v so that `u @ v` has the variance of `nn.Linear`'s default weight."""
        bound = 1 / math.sqrt(self.in_features)
        # A sum of r products: r * var(u) * var(v) = var(weight) = bound² / 3.
        limits = (bound, math.sqrt(3 / self.rank))
        for (factor, scale), limit in zip(self._scaled_factors(), limits, strict=True):
            if self.storage is None or scale is None:
                nn.init.uniform_(factor, -limit, limit)
            else:
                storage = STORAGES[self.storage]
                numbers = storage.decode(factor, torch.float32)
                numbers.uniform_(-storage.largest, storage.largest)
                factor.copy_(storage.encode(numbers.round_()))
                scale.fill_(limit / storage.largest)
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
            v: likewise; one-byte factors have one dtype.
            bias: or None.
            u_scale: `[r]` in float32, of one-byte factors only.
            v_scale: `[N]` in float32, of one-byte factors only.
            dtype: of bias and placeholder where the factors are in one byte; default the bias's,
                and torch's default where there is none. Otherwise it is u's.

        Raises:
            ValueError: shapes, dtypes or values do not fit.
        """
        storage = check_factors(u, v, u_scale, v_scale)
        if bias is not None and bias.shape != (v.shape[1],):
            raise ValueError(f"bias must be [{v.shape[1]}], got {list(bias.shape)}")
        if storage is None:
            dtype = u.dtype
        elif dtype is None:
            dtype = torch.get_default_dtype() if bias is None else bias.dtype
        layer = cls(size_of(u)[0], v.shape[1], u.shape[1], False, "meta", dtype, storage)
        trainable = storage is None
        for name, factor in zip(FACTORS, (u, v), strict=True):
            contiguous = factor.detach().to(u).clone(memory_format=torch.contiguous_format)
            setattr(layer, name, nn.Parameter(contiguous, requires_grad=trainable))
        if u_scale is not None and v_scale is not None:
            layer.u_scale = u_scale.detach().to(u.device).clone()
            layer.v_scale = v_scale.detach().to(u.device).clone()
        layer.weight = u.new_empty(0, dtype=dtype)
        if isinstance(bias, nn.Parameter):
            layer.bias = bias
        elif bias is not None:
            layer.bias = nn.Parameter(bias.detach().to(layer.weight).clone())
        return layer

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
        u, v = (dequantized(*pair, wide).to(wide) for pair in self._scaled_factors())
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
        for linear, (factor, scale) in zip((u, v), self._scaled_factors(), strict=True):
            weight = dequantized(factor.detach(), scale, self.dtype).t().contiguous()
            trainable = factor.requires_grad or scale is not None
            linear.weight = nn.Parameter(weight, requires_grad=trainable)
        v.register_parameter("bias", self.bias)
        return LinearPair(u, v).train(self.training)

    def _scaled_factors(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        return (self.u, self.u_scale), (self.v, self.v_scale)

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

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, *rest: Any
    ) -> None:
        problem = why_not_loadable(self, state_dict, prefix)
        if problem is not None:
            errors: list[str] = rest[-1]
            errors.append(problem)
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast; what is in one byte, and its scales, is moved only."""
        return super()._apply(without_cast(fn, self), recurse)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let the parameters ask for gradients, or not; those of one-byte factors do not exist.

        Raises:
            ValueError: gradients are asked of one-byte factors.
        """
        if requires_grad and self.storage is not None:
            raise ValueError(
                f"factors in {dtype_name(self.storage)} have no gradient; add LoRA "
                "(hf.lora_config), or train float factors and quantize them then"
            )
        return super().requires_grad_(requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to `[..., N]`."""
        return xuv(x, self.u, self.v, self.bias, self.u_scale, self.v_scale, self.compute)

    @property
    def precision(self) -> tuple[str | None, str]:
        """What layers that one op computes have in common."""
        return self.storage, self.compute

    @property
    def effective_ratio(self) -> float:
        """Fraction of the dense weight's parameters that this layer does without."""
        dense = self.in_features * self.out_features
        return 1 - self.rank * (self.in_features + self.out_features) / dense

    def extra_repr(self) -> str:
        """Describe sizes, rank and effective ratio for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"bias={self.bias is not None}, effective_ratio={self.effective_ratio:.3f}"
            + ("" if self.storage is None else f", storage={self.storage}")
            + ("" if self.compute == "x" else f", compute={self.compute}")
        )
