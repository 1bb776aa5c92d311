"""SVDLinear: `nn.Linear` with its weight as a low-rank pair."""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.nn.pair import LinearPair
from neuronmm_ops.ops import xuv
from neuronmm_ops.ops.backends.neuron import DEVICE


class SVDLinear(nn.Module):
    """Linear layer `y = (x @ u) @ v + bias` with `weight.T ≈ u @ v`, run as one `neuronmm::xuv`.

    Both parameters are stored contiguous along their contraction (u as a transposed view of
    `[r, K]`, v of `[N, r]`), the order `nn.Linear` uses: a CPU's decode-time matmul runs in half
    the time there. A NeuronCore reads rows, so on a device `neuron` they are contiguous as they
    are in checkpoints, `[K, r]` and `[r, N]`.

    `weight` is an empty buffer of the factors' dtype and device. Model code that asks a Linear's
    weight for these finds them, code that multiplies by it raises, and in a checkpoint it makes a
    loader that does not know the factors raise, where it would draw a random weight.

    Args:
        in_features: K.
        out_features: N.
        rank: r, at least 1.
        bias: whether to add a learned `[N]` bias.
        device: of the parameters; `meta` is fine.
        dtype: of the parameters.

    Attributes:
        u: `[K, r]`.
        v: `[r, N]`.
        bias: `[N]` or None.
        weight: `[0]`, a placeholder.

    Raises:
        ValueError: a size is smaller than 1.
    """

    weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(in_features, out_features, rank) < 1:
            raise ValueError(
                "in_features, out_features and rank must be at least 1, "
                f"got {in_features}, {out_features} and {rank}"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.rank = rank
        self.u = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=dtype).t())
        self.v = nn.Parameter(torch.empty(out_features, rank, device=device, dtype=dtype).t())
        self.register_buffer("weight", torch.empty(0, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw u and v so that `u @ v` has the variance of `nn.Linear`'s default weight."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.u, -bound, bound)
        # A sum of r products: r * var(u) * var(v) = var(weight) = bound² / 3.
        nn.init.uniform_(self.v, -math.sqrt(3 / self.rank), math.sqrt(3 / self.rank))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_factors(cls, u: Tensor, v: Tensor, bias: Tensor | None = None) -> Self:
        """Build a layer from `u[K, r]`, `v[r, N]` and `bias[N]`; dtype and device are u's.

        A `nn.Parameter` given as bias is kept as it is, not copied.

        Raises:
            ValueError: the shapes do not fit.
        """
        if u.dim() != 2 or v.dim() != 2 or u.shape[1] != v.shape[0]:
            raise ValueError(
                f"u must be [K, r] and v [r, N], got {list(u.shape)} and {list(v.shape)}"
            )
        if bias is not None and bias.shape != (v.shape[1],):
            raise ValueError(f"bias must be [{v.shape[1]}], got {list(bias.shape)}")
        layer = cls(u.shape[0], v.shape[1], u.shape[1], bias=False, device="meta", dtype=u.dtype)
        layer.u = nn.Parameter(_contraction_major(u.detach()))
        layer.v = nn.Parameter(_contraction_major(v.detach().to(u)))
        layer.weight = u.new_empty(0)
        if bias is not None:
            is_parameter = isinstance(bias, nn.Parameter)
            layer.bias = bias if is_parameter else nn.Parameter(bias.detach().to(u).clone())
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
        """Return the dense `nn.Linear` with weight `(u @ v).T`, multiplied in fp32 or wider."""
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        wide = torch.promote_types(self.u.dtype, torch.float32)
        weight = (self.u.to(wide) @ self.v.to(wide)).t()
        linear.weight = nn.Parameter(weight.to(self.u.dtype).contiguous())
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone())
        return linear

    def to_pair(self) -> LinearPair:
        """Return two `nn.Linear` that compute the same; they share the factors' memory."""
        u = nn.Linear(self.in_features, self.rank, bias=False, device="meta")
        v = nn.Linear(self.rank, self.out_features, bias=False, device="meta")
        for linear, factor in ((u, self.u), (v, self.v)):
            # No copy where the factor lies along its contraction, as a Linear's weight does.
            weight = factor.detach().t().contiguous()
            linear.weight = nn.Parameter(weight, requires_grad=factor.requires_grad)
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

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, *rest: Any
    ) -> None:
        if prefix + "weight" not in state_dict:  # saved before there was a placeholder
            state_dict = {**state_dict, prefix + "weight": self.weight}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __setstate__(self, state: Any) -> None:
        if state.pop("packed", False):
            raise CheckpointError(
                "an SVDLinear was pickled with a packed u, which this version cannot read; "
                "save its state_dict with the version that packed it"
            )
        super().__setstate__(state)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast, and restore the order in memory where the devices' orders differ."""
        before = self.u.device.type
        super()._apply(fn, recurse)
        after = self.u.device.type
        # torch_xla keeps no strides: what comes back from it lies in rows.
        if before != after and (DEVICE in (before, after) or before == "xla"):
            self.relayout_()
        return self

    @torch.no_grad()
    def relayout_(self) -> Self:
        """Store u and v in their device's order again, after values were assigned."""
        row_major = self.u.device.type == DEVICE
        for name in ("u", "v"):
            matrix: Tensor = getattr(self, name).data
            ordered = matrix.contiguous() if row_major else matrix.t().contiguous().t()
            getattr(self, name).data = ordered
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., K]` to `[..., N]`."""
        return xuv(x, self.u, self.v, self.bias)

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
        )


def _contraction_major(matrix: Tensor) -> Tensor:
    """Copy a matrix [K, r] into memory that runs along K."""
    return matrix.t().clone(memory_format=torch.contiguous_format).t()
