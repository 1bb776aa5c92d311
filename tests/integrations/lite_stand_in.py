"""A stand-in for libtorch_neuronx_lite's `wrap_nki`, by what is public of it.

It takes the arguments' names from the kernel's function and keeps nothing of the kernel's own grid;
it is called in Python while Dynamo traces, and leaves one node a launch. Kernels compute on the
simulated NeuronCore, with as many cores as the grid says.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from neuronmm_ops.neuroncore.boundary import TensorSpec
from neuronmm_ops.neuroncore.kernel import run

kernels: list[Any] = []
calls: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []


@torch.compiler.assume_constant_result
def registered(index: int, grid: tuple[int, ...], names: tuple[str, ...], values: Any) -> int:
    """Remember a call's constants."""
    constants = dict(zip(names, values, strict=True))
    assert all(value is None or type(value) in (int, bool, str) for value in values)
    hash(tuple(sorted(constants)))
    calls.append((kernels[index].func.__name__, grid, constants))
    return len(calls) - 1


class Caller:
    """What `wrap_nki` returns; without `[grid]` its grid is empty."""

    def __init__(self, index: int, grid: tuple[int, ...], names: list[str]) -> None:
        self.index, self.grid, self.names = index, grid, names

    def __getitem__(self, grid: int | tuple[int, ...]) -> "Caller":
        return Caller(self.index, (grid,) if isinstance(grid, int) else grid, self.names)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tensors = [name for name in self.names if isinstance(given[name], Tensor)]
        others = tuple([name for name in self.names if name not in tensors])
        values = tuple([given[name] for name in others])
        call = registered(self.index, self.grid, others, values)
        return torch.ops.lite.kernel([given[name] for name in tensors], tensors, call, self.index)


def wrap_nki(nki_kernel: Any) -> Caller:
    """Wrap a kernel."""
    kernels.append(nki_kernel)
    return Caller(len(kernels) - 1, (), list(inspect.signature(nki_kernel.func).parameters))


def arguments(tensors: Sequence[Any], names: Sequence[str], call: int) -> dict[str, Any]:
    """All arguments of a call by name."""
    return {**calls[call][2], **dict(zip(names, tensors, strict=True))}


@torch.library.custom_op("lite::kernel", mutates_args=())
def kernel(tensors: Sequence[Tensor], names: Sequence[str], call: int, index: int) -> Tensor:
    """Compute on the simulated core."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    (lnc,) = calls[call][1]
    return run(kernels[index][lnc], (), arguments(tensors, names, call)).outputs


@kernel.register_fake
def _(tensors: Sequence[Tensor], names: Sequence[str], call: int, index: int) -> Tensor:
    assert isinstance(tensors[0], FakeTensor)
    (lnc,) = calls[call][1]
    specs = [TensorSpec(tuple(map(int, t.shape)), str(t.dtype)[6:]) for t in tensors]
    traced = run(kernels[index][lnc], (), arguments(specs, names, call), mode="trace")
    return tensors[0].new_empty(traced.outputs.shape)
