"""Stand-ins for the packages nki and torch_neuronx, strict about how they are called.

Kernels compute on the simulated NeuronCore, in a graph each call is one node `stand_in::kernel`.
Behaviour follows the Neuron SDK's guide "How to work with NKI kernels from torch-neuronx".
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils._pytree import tree_leaves

from neuroncore import hardware
from neuroncore.boundary import TensorSpec
from neuroncore.kernel import RunSettings, run

# The kernels are bound to the simulator before any nki stands on the path.
from neuronmm_ops.kernels import shim as shim
from neuronmm_ops.ops.backends import environment, neuron

BRIDGES = {
    "0.2": "nki/_torch_xla.py",
    "0.3": "nki/framework/torch_xla.py",
    "0.4": "nki/framework/torch_xla.py",
    "0.5": "nki/framework/_torch_xla.py",
    "0.6": "nki/framework/_torch_xla.py",
    "0.7": "nki/framework/_torch_xla.py",
}
TORCH_NEURONX = {
    "nki_op": {"torch_neuronx/__init__.py": "from stand_ins import nki_op, wrap_nki"},
    "wrap_nki": {"torch_neuronx/__init__.py": "from stand_ins import wrap_nki"},
    "wrap_nki in nki_hop": {
        "torch_neuronx/__init__.py": "",
        "torch_neuronx/nki_hop.py": "from stand_ins import wrap_nki",
    },
    "wrap_nki in lite": {"libtorch_neuronx_lite/nki/nki_hop.py": "from stand_ins import wrap_nki"},
    "nki_op alone": {"torch_neuronx/__init__.py": "from stand_ins import nki_op"},
    "direct": {"torch_neuronx/__init__.py": ""},
}
"""What torch_neuronx, or libtorch_neuronx_lite in its place, may offer."""


@dataclass
class Call:
    """One call of a kernel: in which mode, and how the stand-in was called."""

    mode: str
    kernel: Any
    grid: tuple[int, ...]
    constants: dict[str, Any]


@dataclass
class Record:
    """What has been asked of the stand-ins."""

    calls: list[Call] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    wrapped: int = 0


record = Record()

# --- torch_neuronx -------------------------------------------------------------------------------


def nki_op(name: str, fn: Callable[..., Any] | None = None, *, mutates_args: Any) -> Any:
    """Make an op whose kernel, fake and decomposition are all the function."""
    if fn is None:
        return lambda fn: nki_op(name, fn, mutates_args=mutates_args)
    schema = torch.library.infer_schema(fn, mutates_args=mutates_args)
    op = torch.library.custom_op(name, fn, mutates_args=mutates_args, schema=schema)
    op.register_fake(fn)

    def decompose(mode, op, types, args, kwargs):
        with mode:
            return fn(*args, **kwargs)

    op.register_torch_dispatch(FunctionalTensorMode, decompose)
    record.ops.append(name)
    return op


class Caller:
    """What `wrap_nki` returns: a kernel with a grid of its own."""

    def __init__(self, kernel: Any, grid: tuple[int, ...] = ()) -> None:
        self.kernel = kernel
        self.grid = grid

    def __getitem__(self, grid: tuple[int, ...]) -> "Caller":
        assert type(grid) is tuple
        assert all(type(size) is int for size in grid)
        return Caller(self.kernel, grid)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        (cores,) = self.grid
        kernel = self.kernel if cores == 1 else self.kernel[cores]
        return called(Call("wrap_nki", kernel, self.grid, kwargs), args)


def wrap_nki(kernel: "DirectKernel") -> Caller:
    """Make a kernel traceable; every wrapper takes a place in a registry."""
    assert kernel.kernel.lnc == 1, "a kernel that has its grid already loses it"
    record.wrapped += 1
    return Caller(kernel.kernel)


# --- nki -----------------------------------------------------------------------------------------


class DirectKernel:
    """A kernel as the real `nki.jit` makes it: called on device tensors."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, cores: int) -> "DirectKernel":
        return DirectKernel(self.kernel[cores])

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return called(Call("direct", self.kernel, (self.kernel.lnc,), kwargs), args)


def called(call: Call, args: Sequence[Tensor | None]) -> Tensor:
    """Check how a kernel is called and run it as one node."""
    inspect.signature(call.kernel.func).bind(*args, **call.constants)
    assert call.grid == (call.kernel.lnc,)
    assert args[0] is not None
    assert args[0].dim() == 2
    flat = tree_leaves(args)
    assert all(t is None or (isinstance(t, Tensor) and t.is_contiguous()) for t in flat)
    constants = tree_leaves(call.constants)
    assert all(type(value) in (int, bool, str, float) for value in constants)
    record.calls.append(call)
    several = torch.int32 in [t.dtype for t in flat if t is not None]  # it has positions, so caches
    if len(flat) != len(args) or several:  # a node takes no lists of lists, and returns one tensor
        return run(call.kernel, tuple(args), call.constants).outputs
    return torch.ops.stand_in.kernel(args, len(record.calls) - 1)


@torch.library.custom_op("stand_in::kernel", mutates_args=())
def kernel_node(args: Sequence[Tensor | None], index: int) -> Tensor:
    """Compute on the simulated core of NEURON_PLATFORM_TARGET_OVERRIDE."""
    call = record.calls[index]
    return run(call.kernel, tuple(args), call.constants).outputs


@kernel_node.register_fake
def _(args: Sequence[Tensor | None], index: int) -> Tensor:
    call, x = record.calls[index], args[0]
    assert isinstance(x, FakeTensor)
    specs = [t if t is None else TensorSpec(tuple(t.shape), str(t.dtype)[6:]) for t in args]
    return x.new_empty(
        run(call.kernel, tuple(specs), call.constants, RunSettings(mode="trace")).outputs.shape
    )


# --- a machine with them installed ---------------------------------------------------------------


class NeuronMachine:
    """A Neuron machine of a test: its instance type and its packages."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.monkeypatch = monkeypatch
        for variable in (
            hardware.TARGET_VARIABLE,
            environment.LNC_VARIABLE,
            environment.ROUTE_VARIABLE,
        ):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(hardware, "PRODUCT_NAME", str(root / "product_name"))
        monkeypatch.syspath_prepend(root)

    def instance(self, name: str) -> None:
        """Make it an EC2 instance."""
        Path(hardware.PRODUCT_NAME).write_text(f"{name}\n")

    def environment(self, **variables: str) -> None:
        """Set environment variables."""
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)

    def package(self, name: str, version: str, files: dict[str, str]) -> None:
        """Install a distribution."""
        information = self.root / f"{name}-{version}.dist-info"
        information.mkdir()
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (information / "METADATA").write_text(header)
        for file, source in files.items():
            path = self.root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
            for parent in path.relative_to(self.root).parents[:-1]:
                (self.root / parent / "__init__.py").touch()

    def nki(self, version: str = "0.7.0") -> None:
        """Install a nki of a known line, or of a later one."""
        bridge = BRIDGES.get(version[:3], BRIDGES["0.7"])
        self.package("nki", version, {"nki/__init__.py": "", bridge: ""})

    def torch_neuronx(self, offers: str = "nki_op", version: str = "2.13.3.0") -> None:
        """Install a package that offers one of `TORCH_NEURONX`."""
        files = TORCH_NEURONX[offers]
        self.package(next(iter(files)).partition("/")[0], version, files)


def forget() -> None:
    """Forget what this process found about packages."""
    environment.nki_release.cache_clear()
    environment._route_of_packages.cache_clear()
    environment.wrapper.cache_clear()
    neuron.call_mode.cache_clear()
    neuron._implementations.cache_clear()
    neuron._wrapped.clear()
    record.calls.clear()
    record.ops.clear()
    record.wrapped = 0
    installed = ("nki", *environment.NEURON_PACKAGES)
    for name in [n for n in sys.modules if n.partition(".")[0] in installed]:
        del sys.modules[name]


@contextmanager
def neuron_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NeuronMachine]:
    """A machine without a package or an instance type."""
    forget()
    try:
        yield NeuronMachine(root, monkeypatch)
    finally:
        forget()
