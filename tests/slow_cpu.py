"""A CPU without units for bfloat16 and float16, on any machine."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neuronmm_ops.ops import products
from neuronmm_ops.ops.backends import cpu
from neuronmm_ops.ops.definitions import xuv

SLOW = frozenset({torch.bfloat16, torch.float16})
_NARROW_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def make_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package believe that this CPU multiplies only float32 and wider fast."""
    for module in (cpu, xuv):
        monkeypatch.setattr(module, "SLOW_DTYPES", SLOW)
    monkeypatch.setattr(products, "_MM_ROWS", frozenset())
    monkeypatch.setattr(cpu, "multiplies_fast", lambda dtype: dtype not in SLOW)


class NarrowProducts(TorchDispatchMode):
    """Keep the shapes of matrix products in bfloat16 or float16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _NARROW_PRODUCTS and args[1].dtype in SLOW:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))
