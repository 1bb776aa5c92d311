"""What `tensor[...]` means: integers, slices, registers and tiles as indices."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn

from neuroncore.checks import views as check
from neuroncore.checks.base import refuse
from neuroncore.checks.operands import is_tile

if TYPE_CHECKING:
    from neuroncore.memory.geometry import Geometry
    from neuroncore.memory.tensor import NkiTensor


class VirtualRegister:
    """An integer register; its value is known when the instruction that sets it has run.

    `loop` is the loop of the device whose variable it holds, if any: the kernel's code sees its
    first value only, and cannot branch on it or compute with it.
    """

    __slots__ = ("frozen", "loop", "value")

    def __init__(self, state: int | None = None, frozen: bool = False, loop: Any = None) -> None:
        self.value = 0 if state is None else int(state)
        self.frozen = frozen
        self.loop = loop

    def __repr__(self) -> str:
        return f"VirtualRegister({self.value})"

    def __bool__(self) -> bool:
        if self.loop is not None:
            self._refused()
        return self.value != 0

    def _refused(self, *_: Any) -> NoReturn:
        refuse(
            "a register has its value on the device, where Python cannot compute with it or branch "
            "on it; index with it, and choose the loop's step"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __index__ = _refused


class DynamicSlice:
    """`nl.ds(register, size)`: a slice whose start is known when the instruction runs."""

    __slots__ = ("size", "start")

    def __init__(self, start: Any, size: int) -> None:
        self.start, self.size = start, size


def hashable(key: Any) -> tuple[Any, ...]:
    """An index as a tuple that can be a key of a dict: slices cannot, in Python 3.11."""
    keys = key if isinstance(key, tuple) else (key,)
    return tuple([(k.start, k.stop, k.step) if isinstance(k, slice) else k for k in keys])


_PLAIN = {int, slice}


def _full_index(tensor: NkiTensor, key: Any) -> list[Any]:
    """One entry per dimension, `...` and what is left out made explicit."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if len(keys) == tensor.ndim and _PLAIN.issuperset(map(type, keys)):
        return keys
    # nkipy's kernels index with nl.affine_range(n), which is a range
    keys = [slice(k.start, k.stop, k.step) if isinstance(k, range) else k for k in keys]
    dots = [i for i, k in enumerate(keys) if isinstance(k, EllipsisType)]
    entries = len(keys) - len(dots)
    if len(dots) > 1 or entries > tensor.ndim:
        refuse(
            f"{tensor}: index has {entries} entries and {len(dots)} ellipses; "
            f"use at most {tensor.ndim} entries and one ellipsis"
        )
    fill = [slice(None)] * (tensor.ndim - entries)
    at = dots[0] if dots else len(keys)
    return keys[:at] + fill + keys[at + len(dots) :]


def static_index(tensor: NkiTensor, key: Any) -> Geometry:
    """The geometry of a static index."""
    geometry = tensor.geometry
    shape: list[int] = []
    strides: list[int] = []
    offset = geometry.offset
    for dim, k in enumerate(_full_index(tensor, key)):
        count, stride = geometry.shape[dim], geometry.strides[dim]
        if isinstance(k, slice):
            start, stop, step = check.slice_of(tensor, dim, k)
            if (start, stop, step) != (0, count, 1):
                check.not_the_indirect(tensor, dim)
            shape.append(-(-(stop - start) // step))
            strides.append(stride * step)
            offset += start * stride if start < stop else 0  # an empty view lies nowhere
        else:
            check.not_the_indirect(tensor, dim)
            offset += check.index_of(tensor, dim, k) * stride
            if geometry.on_chip and dim == 0:
                shape.append(1)
                strides.append(stride)
    if (geometry.on_chip and len(shape) == 1) or not shape:
        shape.append(1)
        strides.append(1)
    return geometry.derive(tuple(shape), tuple(strides), offset)


def dynamic_index(tensor: NkiTensor, key: Any) -> NkiTensor:
    """An index with one register, tile or `nl.ds(register, size)` in it: what is static first."""
    keys = _full_index(tensor, key)
    moving = [isinstance(k, DynamicSlice | VirtualRegister) or is_tile(k) for k in keys]
    still = tuple([slice(None) if m else k for k, m in zip(keys, moving, strict=True)])
    view = tensor.with_geometry(static_index(tensor, still), tensor.index)
    stays = [m or isinstance(k, slice) for k, m in zip(keys, moving, strict=True)]
    stays[0] |= tensor.geometry.on_chip
    for at in reversed([i for i, m in enumerate(moving) if m]):  # earlier dimensions keep places
        dim, k = sum(stays[:at]), keys[at]
        if isinstance(k, DynamicSlice):
            check.one_dynamic_index(view, dim)
            shape = (*view.shape[:dim], k.size, *view.shape[dim + 1 :])
            view = view.moved(k.start, ("scalar", dim, view.strides[dim]), shape)
        else:
            view = view.select(dim, k)
    return view
