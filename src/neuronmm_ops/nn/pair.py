"""LinearPair: a low-rank layer as two `nn.Linear`, for libraries that know nothing else."""

from collections import OrderedDict
from typing import Any, cast

from torch import Tensor, nn

from neuronmm_ops.nn.bare import is_bare
from neuronmm_ops.storages import storage_of

CHILDREN = ("u", "v")


class LinearPair(nn.Sequential):
    """`y = v(u(x))`: two Linears without an activation between them, the bias on the second.

    peft, torchao, bitsandbytes and `torch.nn.utils.prune` find the children, which are ordinary
    `nn.Linear`. The state dict is that of the `SVDLinear` which the pair stands for, `u` `[K, r]`,
    `v` `[r, N]`, `bias` `[N]` and an empty `weight`, so a checkpoint is the same. It has the
    children's own keys while one of them is not a plain Linear: wrapped, quantized or pruned.

    Args:
        u: without bias, weight `[r, K]`.
        v: weight `[N, r]`.

    Attributes:
        weight: `[0]`, a placeholder as `SVDLinear` has it.

    Raises:
        ValueError: u's outputs are not v's inputs, or u has a bias.
    """

    weight: Tensor

    def __init__(self, u: nn.Linear, v: nn.Linear) -> None:
        if u.out_features != v.in_features:
            raise ValueError(
                f"u must give what v takes, got {u.out_features} and {v.in_features} features"
            )
        if u.bias is not None:
            raise ValueError("u must have no bias; the bias of a pair is v's")
        super().__init__(OrderedDict(zip(CHILDREN, (u, v), strict=True)))
        self.register_buffer("weight", u.weight.new_empty(0))

    @property
    def linears(self) -> tuple[nn.Linear, nn.Linear]:
        """u and v; wrapped ones may be of another type."""
        u, v = (self.get_submodule(name) for name in CHILDREN)
        return cast(nn.Linear, u), cast(nn.Linear, v)

    def why_not_plain(self) -> str | None:
        """Say which child is not a plain `nn.Linear` any more, and the remedy; None if both are."""
        for name, child in zip(CHILDREN, self.linears, strict=True):
            kind = type(child)
            if kind is not nn.Linear:
                got = f"{kind.__module__}.{kind.__name__}"
                return f"{name} is a {got}; merge adapters, or undo what changed it"
            weight = child._parameters.get("weight")
            if type(weight) is not nn.Parameter:
                got = "computed" if weight is None else f"a {type(weight).__name__}"
                return f"{name}.weight is {got}; make a pruning final, or dequantize"
            if not is_bare(child):
                return f"{name} has hooks or another forward; remove them"
            if name == "u" and child.bias is not None:
                return "u has a bias; give it to v"
        return None

    # Overridden, not hooked: a replacement gets the hooks of the module that it replaces.

    def state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, prefix: str = "", **options: Any
    ) -> Any:
        """Return the state dict of the `SVDLinear`; of the children where they are not plain."""
        state = super().state_dict(*args, prefix=prefix, **options)
        return _renamed(state, prefix, to_factors=True) if self.why_not_plain() is None else state

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, *rest: Any
    ) -> None:
        for name in CHILDREN:
            factor = state_dict.get(prefix + name)
            if factor is not None and storage_of(factor.dtype) is not None:
                errors: list[str] = rest[-1]
                errors.append(
                    f"{prefix}{name} is {str(factor.dtype).removeprefix('torch.')}, which a pair "
                    "of nn.Linear cannot hold; load it into an SVDLinear, then to_pair()"
                )
                return
        super()._load_from_state_dict(_renamed(state_dict, prefix, to_factors=False), prefix, *rest)


# The factors' keys, the children's, and whether one is the other's transpose.
_KEYS = (("u", "u.weight", True), ("v", "v.weight", True), ("bias", "v.bias", False))


def _renamed(state: Any, prefix: str, to_factors: bool) -> Any:
    for factor, child, is_transposed in _KEYS:
        old, new = (child, factor) if to_factors else (factor, child)
        tensor = state.pop(prefix + old, None)
        if tensor is not None:
            state[prefix + new] = tensor.t() if is_transposed else tensor
    return state
