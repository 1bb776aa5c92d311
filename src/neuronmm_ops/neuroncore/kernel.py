"""`jit`, `Kernel` and `simulate`: from a Python function and arrays to outputs and a profile."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from neuronmm_ops.hardware import MODELS, Model, resolve_target
from neuronmm_ops.neuroncore import dtypes
from neuronmm_ops.neuroncore import language as nl
from neuronmm_ops.neuroncore.checks.base import refuse
from neuronmm_ops.neuroncore.checks.tensors import shape_of
from neuronmm_ops.neuroncore.collector import no_collection
from neuronmm_ops.neuroncore.core import KernelRun, SimulatedCore, running
from neuronmm_ops.neuroncore.dtypes import DType
from neuronmm_ops.neuroncore.memory.storage import Storage
from neuronmm_ops.neuroncore.memory.tensor import NkiTensor
from neuronmm_ops.neuroncore.profile.profile import Profile
from neuronmm_ops.neuroncore.timing.schedule import schedule

Mode = Literal["execute", "trace"]


@dataclass(frozen=True)
class TensorSpec:
    """An argument of which only shape and dtype are given, for mode="trace"."""

    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True)
class Simulation:
    """What `simulate` returns: the kernel's outputs and its profile.

    In trace mode each output is a `TensorSpec`.
    """

    outputs: Any
    profile: Profile


class Kernel:
    """A jitted kernel: `kernel(*args)` or `kernel[2](*args)` runs it on the simulated core."""

    def __init__(self, func: Callable[..., Any], lnc: int = 1) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.lnc = lnc

    def __getitem__(self, lnc: int) -> Kernel:
        if lnc not in (1, 2):
            refuse(f"kernel[{lnc}]: a launch takes 1 or 2 cores (LNC)")
        return Kernel(self.func, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it in execute mode and return its outputs."""
        if running() is not None:  # called from another kernel: inlined
            return self.func(*args, **kwargs)
        return run(self, args, kwargs).outputs

    def __repr__(self) -> str:
        return f"<nki kernel {self.func.__name__}, lnc {self.lnc}>"


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make a function a kernel. `mode=` is accepted and ignored, as NKI 0.3 and later do."""
    unknown = set(kwargs) - {"mode"}
    if unknown:
        raise TypeError(
            f"nki.jit takes no {', '.join(sorted(unknown))}; set the target by "
            "NEURON_PLATFORM_TARGET_OVERRIDE or neuroncore.simulate(target=)"
        )
    if fn is None:
        return jit
    return Kernel(fn)


def run(
    kernel: Kernel | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    target: str | None = None,
    mode: Mode = "execute",
    model: Model = "calibrated",
    seed: int = 0,
) -> Simulation:
    """Run a kernel and schedule what it issued. See `simulate`."""
    if mode not in ("execute", "trace"):
        raise ValueError(f'mode must be "execute" or "trace"; got {mode!r}')
    if model not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}; got {model!r}")
    if type(kernel).__module__.partition(".")[0] == "nki":
        raise TypeError(
            f"the simulated core runs functions and kernels of neuroncore.jit, got {kernel!r}, "
            "made by the installed nki; simulate in an environment without it"
        )
    kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    launch = KernelRun(resolve_target(target), mode == "execute", kernel.lnc, seed)
    boundary = _Boundary(launch)
    signature = inspect.signature(kernel.func)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    inputs = {name: boundary.enter(name, value) for name, value in bound.arguments.items()}

    def body(core: SimulatedCore) -> Any:
        own = {name: _on_core(core, value) for name, value in inputs.items()}
        call = inspect.BoundArguments(signature, OrderedDict(own))
        return kernel.func(*call.args, **call.kwargs)

    with no_collection(), np.errstate(all="ignore"):
        results = launch.run(body)
        boundary.write_back()
        outputs = boundary.leave(results[0])
        profile = Profile(kernel.func.__name__, launch, schedule(launch, model))
    return Simulation(outputs, profile)


class _Boundary:
    """Arrays and tensors from outside become HBM tensors, and outputs become their kind."""

    def __init__(self, launch: KernelRun) -> None:
        self.launch = launch
        self.torch = False
        self._copied: list[tuple[np.ndarray, Storage]] = []

    def enter(self, name: str, value: Any) -> Any:
        """An argument as the kernel sees it: storages for arrays, the rest unchanged."""
        if isinstance(value, tuple):
            return tuple([self.enter(f"{name}{i}", v) for i, v in enumerate(value)])
        if isinstance(value, dict):
            return {key: self.enter(f"{name}.{key}", v) for key, v in value.items()}
        if isinstance(value, TensorSpec):
            if self.launch.execute:
                raise ValueError(
                    f'argument {name} is a TensorSpec without values; use mode="trace" or an array'
                )
            return self._storage(name, tuple(value.shape), dtypes.dtype_of(value.dtype))
        if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr"):
            self.torch = True
            value = _torch_array(name, value)
        if isinstance(value, np.ndarray):
            return self._array(name, value)
        if isinstance(value, list):
            raise TypeError(f"argument {name} is a list; kernels take tuples, which are hashable")
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
        storage.data = values.reshape(-1).view(np.uint8)
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
        """The kernel's result as arrays, torch tensors or specs."""
        if result is None:
            return None
        many = isinstance(result, tuple | list)
        tensors: list[NkiTensor] = list(result) if many else [result]
        for t in tensors:
            if getattr(t, "buffer", None) is not nl.shared_hbm:
                refuse(
                    f"kernel output {t!r} must be a tensor in nl.shared_hbm; "
                    "allocate it with buffer=nl.shared_hbm and dma_copy the result into it"
                )
        found = tuple([self._output(t) for t in tensors])
        return found if many else found[0]

    def _output(self, t: NkiTensor) -> Any:
        if not self.launch.execute:
            return TensorSpec(t.shape, t.dtype)
        storage = t.storage
        if storage.store == storage.layout.dtype.numpy:
            values = t.geometry.array(storage)
        else:
            values = dtypes.from_fp32(t.geometry.array(storage), t.dtype)
        return _torch_tensor(values) if self.torch else values


def _on_core(core: SimulatedCore, value: Any) -> Any:
    if isinstance(value, Storage):
        return core.adopt(value)
    if isinstance(value, tuple):
        return tuple([_on_core(core, v) for v in value])
    if isinstance(value, dict):
        return {key: _on_core(core, v) for key, v in value.items()}
    return value


def _torch_array(name: str, tensor: Any) -> np.ndarray:
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


def simulate(
    kernel: Kernel | Callable[..., Any],
    *args: Any,
    target: str | None = None,
    mode: Mode = "execute",
    model: Model = "calibrated",
    seed: int = 0,
    **kwargs: Any,
) -> Any:
    """Run a kernel on the simulated NeuronCore.

    Two forms. `simulate(kernel, *args, target=, mode=)` returns a `Simulation` with `outputs` and
    `profile`. `simulate(kernel)(*args)`, AWS's form, takes no arguments here and returns a
    callable that returns the outputs.

    Args:
        kernel: a jitted kernel, `kernel[2]` for two cores, or a plain function.
        args: NumPy arrays, CPU torch tensors, compile-time values; `TensorSpec` in trace mode.
        target: "trn1", "trn2" or "trn3"; None as `hardware.resolve_target`.
        mode: "execute" computes values; "trace" computes none, so that full sizes take seconds.
        model: "calibrated" adds the fitted matmul overhead to the documented costs;
            "stationary_reuse", a what-if, only where the stationary operand changes.
        seed: of the random number generators of the core.

    Raises NkiValidationError where the kernel breaks a rule, ValueError for bad arguments.
    """
    bound = functools.partial(run, kernel, target=target, mode=mode, model=model, seed=seed)
    if args or kwargs:
        return bound(args, kwargs)
    return lambda *args, **kwargs: bound(args, kwargs).outputs


@contextmanager
def as_nki() -> Generator[types.ModuleType]:
    """Install this simulator as `nki` while the block runs, so that published kernels import it.

    Raises RuntimeError where a real `nki` is installed or imported: it is not to be shadowed.
    """
    import importlib.util

    from neuronmm_ops.neuroncore import isa
    from neuronmm_ops.neuroncore import typing as nt

    if "nki" in sys.modules or importlib.util.find_spec("nki") is not None:
        raise RuntimeError(
            "as_nki: the package nki is installed; use it, or uninstall it to simulate"
        )
    package = types.ModuleType(
        "nki", "The simulated NeuronCore, under the name of the real package."
    )
    package.__path__ = []
    parts = {"language": nl, "isa": isa, "typing": nt}
    vars(package).update(parts, jit=jit, simulate=simulate, dtype=DType)
    modules = {"nki": package, **{f"nki.{name}": part for name, part in parts.items()}}
    sys.modules.update(modules)
    try:
        yield package
    finally:
        for name in modules:
            sys.modules.pop(name, None)
