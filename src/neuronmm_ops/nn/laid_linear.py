"""Dense `nn.Linear`s whose weight lies `[in, out]`, as kernels read it.

PyTorch/XLA gives every view a buffer of its own: a graph that takes `weight.t()` transposes the
weight each time that it runs.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

BY_STRIDES = ("cpu", "cuda", "meta")
"""Devices whose `weight.t()` moves nothing; what runs there is no NKI kernel."""


def lay_(linear: Any) -> None:
    """Let a Linear on a device hold its weight transposed; `state_dict` has it as before."""
    if linear.weight.device.type in BY_STRIDES or is_laid(linear):
        return
    _transpose_(linear)
    linear.forward = partial(_forward, linear)
    linear.laid = (
        linear.register_state_dict_post_hook(_transposed),
        linear.register_load_state_dict_pre_hook(_transposed),
    )


def unlay_(linear: nn.Linear) -> None:
    """Undo `lay_`."""
    if not is_laid(linear):
        return
    for handle in linear.__dict__.pop("laid"):
        handle.remove()
    del linear.__dict__["forward"]
    _transpose_(linear)


def is_laid(module: nn.Module) -> bool:
    """Say whether a module is a Linear that `lay_` has changed."""
    return getattr(module.__dict__.get("forward"), "func", None) is _forward


def _transpose_(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.detach().t().contiguous()


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.t(), linear.bias)


def _transposed(linear: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Transpose the weight of a `state_dict`."""
    name = f"{prefix}weight"
    if name in state:
        state[name] = state[name].t().contiguous()
