"""Run any module on a CPU without ever multiplying in a dtype that it multiplies slowly."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from neuronmm_ops.ops.matmul import SLOW_DTYPES, mm

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class WideProducts(TorchDispatchMode):
    """Compute products of slow dtypes on the CPU in float32, and round each result once.

    No weight is changed or kept in another dtype: operands are cast for one product at a time, the
    weights of Linears in strips. Every result has the dtype that it has without this mode. Active
    for a `with` block; for inference.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        options = kwargs or {}
        if func not in _PRODUCTS or not _is_slow(args[0]):
            return func(*args, **options)
        if func is _aten.mm.default:
            return mm(*args)
        if func is _aten.addmm.default and not options and args[0].dim() == 1:
            return mm(args[1], args[2], args[0])
        result = func(*tree_map(_widened, args), **tree_map(_widened, options))
        if isinstance(result, Tensor):
            return result.to(args[0].dtype)
        return (result[0].to(args[0].dtype), *result[1:])  # attention: its output comes first


def _is_slow(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cpu and value.dtype in SLOW_DTYPES


def _widened(value: Any) -> Any:
    return value.float() if _is_slow(value) else value
