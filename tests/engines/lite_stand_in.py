"""A stand-in for libtorch_neuronx_lite's `wrap_nki`, by what is public of it.

It takes the arguments' names from the kernel's function and keeps nothing of the kernel's own grid;
it is called in Python while Dynamo traces, and leaves one node a launch. Kernels compute on the
simulated NeuronCore, with as many cores as the grid says.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from neuroncore.boundary import TensorSpec
from neuroncore.kernel import RunSettings, run


@dataclass
class Call:
    """One call of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[str, ...]
    constants: dict[str, Any]

    def arguments(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """All arguments by name."""
        return {**self.constants, **dict(zip(self.tensors, tensors, strict=True))}


kernels: list[Any] = []
calls: list[Call] = []


@torch.compiler.assume_constant_result
def registered(
    index: int,
    grid: tuple[int, ...],
    tensors: tuple[str, ...],
    names: tuple[str, ...],
    values: tuple[Any, ...],
) -> int:
    """Remember a call's constants."""
    assert all(value is None or type(value) in (int, bool, str) for value in values)
    constants = dict(zip(names, values, strict=True))
    calls.append(Call(kernels[index], grid, tensors, constants))
    return len(calls) - 1


class Caller:
    """What `wrap_nki` returns; without `[grid]` its grid is empty."""

    def __init__(
        self, index: int, grid: tuple[int, ...], names: list[str], defaults: dict[str, Any]
    ) -> None:
        self.index, self.grid, self.names, self.defaults = index, grid, names, defaults

    def __getitem__(self, grid: int | tuple[int, ...]) -> "Caller":
        grid = (grid,) if isinstance(grid, int) else grid
        return Caller(self.index, grid, self.names, self.defaults)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for name in self.names:
            if name not in given:
                given[name] = self.defaults[name]
        tensors = tuple([name for name in self.names if isinstance(given[name], Tensor)])
        others = tuple([name for name in self.names if name not in tensors])
        values = tuple([given[name] for name in others])
        call = registered(self.index, self.grid, tensors, others, values)
        return torch.ops.lite.kernel([given[name] for name in tensors], call)


def wrap_nki(nki_kernel: Any) -> Caller:
    """Wrap a kernel."""
    kernels.append(nki_kernel)
    parameters = inspect.signature(nki_kernel.func).parameters.items()
    defaults = {name: p.default for name, p in parameters if p.default is not p.empty}
    return Caller(len(kernels) - 1, (), [name for name, _ in parameters], defaults)


@torch.library.custom_op("lite::kernel", mutates_args=())
def kernel(tensors: Sequence[Tensor], call: int) -> Tensor:
    """Compute on the simulated core."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return simulated(tensors, call, "execute").outputs


@kernel.register_fake
def _(tensors: Sequence[Tensor], call: int) -> Tensor:
    assert isinstance(tensors[0], FakeTensor)
    specs = [TensorSpec(tuple(map(int, t.shape)), str(t.dtype)[6:]) for t in tensors]
    return tensors[0].new_empty(simulated(specs, call, "trace").outputs.shape)


def simulated(tensors: Sequence[Any], call: int, mode: Any) -> Any:
    """Run the kernel of a call on as many cores as its grid says."""
    made = calls[call]
    (lnc,) = made.grid
    chosen = made.kernel if lnc == 1 else made.kernel[lnc]
    return run(chosen, (), made.arguments(tensors), RunSettings(mode=mode))
