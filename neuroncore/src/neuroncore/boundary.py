"""Where a kernel begins and ends: arrays become HBM tensors, and its result arrays again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuroncore import dtypes
from neuroncore import language as nl
from neuroncore.checks.base import note, refuse
from neuroncore.checks.tensors import shape_of
from neuroncore.core import KernelRun, SimulatedCore
from neuroncore.dtypes import DType
from neuroncore.memory.storage import Storage
from neuroncore.memory.tensor import NkiTensor


@dataclass(frozen=True)
class TensorSpec:
    """An argument of which only shape and dtype are given, for mode="trace"."""

    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True)
class PerRank:
    """An argument of `simulate(..., ranks=)` that each rank has its own of, in order of ranks."""

    values: Sequence[Any]

    def of(self, name: str, rank: int, ranks: int | None) -> Any:
        """The rank's own. Raises ValueError where there is not one for each."""
        if ranks is None or len(self.values) != ranks:
            raise ValueError(
                f"argument {name} is a PerRank of {len(self.values)} values; "
                f"{'set ranks=' if ranks is None else f'there are {ranks} ranks'}"
            )
        return self.values[rank]


class Boundary:
    """A rank's arguments from outside become HBM tensors, and outputs become their kind.

    Of `many` ranks each gets a copy of an array that is given to all.
    """

    def __init__(self, launch: KernelRun, rank: int, many: bool) -> None:
        self.launch, self.rank, self.many = launch, rank, many
        self.framework = ""
        self._held: list[np.ndarray] = []
        self._copied: list[tuple[np.ndarray, Storage]] = []

    def enter(self, name: str, value: Any) -> Any:
        """An argument as the kernel sees it: storages for arrays, the rest unchanged."""
        own = isinstance(value, PerRank) or not self.many
        if isinstance(value, PerRank):
            value = value.of(name, self.rank, self.launch.ranks if self.many else None)
        if isinstance(value, list):
            note(
                f"argument {name} is a list and taken as it is; NKI 0.3 and later refuse it, for "
                "arguments must be hashable: pass a tuple"
            )
        if isinstance(value, tuple | list):
            return _like(value, [self.enter(f"{name}{i}", v) for i, v in enumerate(value)])
        if isinstance(value, dict):
            return {key: self.enter(f"{name}.{key}", v) for key, v in value.items()}
        if isinstance(value, TensorSpec):
            if self.launch.execute:
                raise ValueError(
                    f'argument {name} is a TensorSpec without values; use mode="trace" or an array'
                )
            return self._storage(name, tuple(value.shape), dtypes.dtype_of(value.dtype))
        if is_torch(value):
            self.framework = "torch"
            value = torch_array(name, value)
        elif type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
            self.framework = "jax"
            value = np.asarray(value)
        if isinstance(value, np.ndarray):
            return self._array(name, value if own else value.copy())
        return value

    def _storage(self, name: str, shape: tuple[int, ...], dtype: DType) -> Storage:
        layout = self.launch.layout(shape_of(shape), dtype, nl.shared_hbm)
        storage = Storage(layout, name)
        storage.initialised = True
        return storage

    def _array(self, name: str, array: np.ndarray) -> Storage:
        dtype = dtypes.from_numpy(array.dtype)
        storage = self._storage(name, array.shape, dtype)
        if not self.launch.execute:
            return storage
        if dtype.is_float and not self.launch.precise:
            values = dtypes.to_fp32(array, dtype).copy()
            storage.store = values.dtype
            self._copied.append((array, storage))
        else:
            values = array
            if not array.flags.c_contiguous:
                values = np.ascontiguousarray(array)
                self._copied.append((array, storage))
        if not values.flags.writeable:
            values = values.copy()
        self._held.append(storage.hold(values))
        return storage

    def write_back(self) -> None:
        """Inputs that had to be copied get what the kernel wrote into them."""
        for array, storage in self._copied:
            if array.flags.writeable:
                array[...] = self._values(storage)

    def _values(self, storage: Storage) -> np.ndarray:
        assert storage.data is not None
        values = storage.data.view(storage.store).reshape(storage.layout.shape)
        dtype = storage.layout.dtype
        return values if values.dtype == dtype.numpy else dtypes.from_fp32(values, dtype)

    def leave(self, result: Any) -> Any:
        """The kernel's result as arrays, tensors of torch or jax, or specs."""
        if result is None:
            return None
        many = isinstance(result, tuple | list)
        tensors: list[NkiTensor] = list(result) if many else [result]
        for t in tensors:
            self._check_output(t)
        outputs = tuple([self._output(t) for t in tensors])
        return outputs if many else outputs[0]

    def _check_output(self, t: Any) -> None:
        """An output is a tensor in shared HBM (migration guide) that instructions have written."""
        memory = getattr(t, "buffer", None)
        remedy = "allocate it with buffer=nl.shared_hbm and dma_copy the result into it"
        if memory is nl.private_hbm and self.launch.lnc == 1:
            note(f"kernel output {t!r} does not compile since NKI 0.3 (migration guide); {remedy}")
        elif memory is not nl.shared_hbm:
            refuse(f"kernel output {t!r} must be a tensor in nl.shared_hbm; {remedy}")
        storage = t.storage
        if storage.covered(t.geometry.region):
            return
        problem = f"kernel output {storage.describe()}"
        if not storage.written and self.launch.uninitialised != "warn":
            refuse(f"{problem} was never written; store into it with dma_copy before returning it")
        which = "some of it was never" if storage.written else "none of it was ever"
        self.launch.undefined(f"{problem} is returned, and {which} written")

    def _output(self, t: NkiTensor) -> Any:
        if not self.launch.execute:
            return TensorSpec(t.shape, t.dtype)
        storage = t.storage
        if storage.store == storage.layout.dtype.numpy:
            values = t.geometry.array(storage)
        else:
            values = dtypes.from_fp32(t.geometry.array(storage), t.dtype)
        if self.framework == "jax":
            return sys.modules["jax"].numpy.asarray(values)
        return _torch_tensor(values) if self.framework else values


def _like(like: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Items in a tuple, named tuple or list of the kind given."""
    make = getattr(like, "_make", type(like))
    return make(items)


def on_core(core: SimulatedCore, value: Any) -> Any:
    """An argument with the core's own tensors in the places of the storages."""
    if isinstance(value, Storage):
        return core.adopt(value)
    if isinstance(value, tuple | list):
        return _like(value, [on_core(core, v) for v in value])
    if isinstance(value, dict):
        return {key: on_core(core, v) for key, v in value.items()}
    return value


def is_torch(value: Any) -> bool:
    """Whether a value is a torch tensor; torch need not be installed."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr")


def torch_array(name: str, tensor: Any) -> np.ndarray:
    """A CPU torch tensor's memory as an array; bfloat16 and fp8 through their bits."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"argument {name} is on {tensor.device}; the simulated core takes CPU tensors"
        )
    tensor = tensor.detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype.startswith(("bfloat16", "float8")):
        torch = sys.modules["torch"]  # imported by whoever made the tensor: not needed otherwise
        bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
        return tensor.view(bits).numpy().view(dtypes.dtype_of(dtype).numpy)
    return tensor.numpy()


def _torch_tensor(values: np.ndarray) -> Any:
    torch = sys.modules["torch"]
    if values.dtype.kind in "fiub" and values.dtype.isbuiltin == 1:
        return torch.from_numpy(np.ascontiguousarray(values))
    bits = np.int16 if values.dtype.itemsize == 2 else np.uint8
    name = dtypes.from_numpy(values.dtype)
    if not hasattr(torch, str(name)):
        raise TypeError(f"torch has no {name}; give the kernel NumPy arrays, or cast its output")
    return torch.from_numpy(np.ascontiguousarray(values).view(bits)).view(getattr(torch, str(name)))


def as_arrays(outputs: Any) -> list[np.ndarray]:
    """A function's result as arrays: None is none, a tuple or list is several."""
    if outputs is None:
        return []
    if isinstance(outputs, tuple | list):
        return [array for output in outputs for array in as_arrays(output)]
    return [torch_array("output", outputs) if is_torch(outputs) else np.asarray(outputs)]
