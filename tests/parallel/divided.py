"""Shared by the tests of divided layers: layers, and what a rank counts of what it sends."""

import torch
import torch.distributed as dist
from quantized import nearest, quantize_
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from neuronmm_ops import SVDMLP, StoredLinear, SVDLinear

FUNCTIONAL = torch.ops._c10d_functional


def mesh() -> DeviceMesh:
    """The mesh of all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def linear(
    K: int = 24,
    N: int = 36,
    r: int = 10,
    bias: bool = True,
    storage: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> SVDLinear:
    """A layer, the same on every rank."""
    torch.manual_seed(K + N + r)
    layer = nn.Sequential(SVDLinear(K, N, r, bias, dtype=dtype))
    return quantize_(layer, storage)[0] if storage else layer[0]


def mlp(
    K: int = 24,
    inner: int = 30,
    ranks: tuple[int, int, int] = (10, 7, 9),
    activation: str = "silu",
    storage: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> SVDMLP:
    """An MLP, the same on every rank."""
    torch.manual_seed(K + inner)
    layer = SVDMLP(K, inner, ranks, activation, dtype=dtype)
    return quantize_(layer, storage) if storage else layer


def stored(
    K: int, N: int, bias: bool, storage: str, dtype: torch.dtype = torch.float32
) -> StoredLinear:
    """A dense layer in a storage, the same on every rank."""
    torch.manual_seed(K + N)
    w, vector = torch.randn(K, N) / K**0.5, torch.randn(N, dtype=dtype) if bias else None
    return StoredLinear.from_matrix(*nearest(w, storage), vector, dtype=dtype)


def stored_mlp(K: int, inner: int, storage: str, dtype: torch.dtype = torch.float32) -> SVDMLP:
    """An MLP of them."""
    shapes = ((K, inner), (K, inner), (inner, K))
    layers = [stored(*shape, False, storage, dtype) for shape in shapes]
    return SVDMLP.from_projections(*layers, "silu")


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random values, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Sent(TorchDispatchMode):
    """Adds up what this rank sends in ring collectives while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0
        self.collectives: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as what DTensor makes of it
        tp = dist.get_world_size()
        of_input = {
            FUNCTIONAL.all_gather_into_tensor.default: tp - 1,
            FUNCTIONAL.all_reduce.default: 2 * (tp - 1) / tp,
            FUNCTIONAL.reduce_scatter_tensor.default: (tp - 1) / tp,
            FUNCTIONAL.wait_tensor.default: 0,
            FUNCTIONAL._wrap_tensor_autograd.default: 0,
        }
        if func in of_input:
            if of_input[func]:
                self.bytes += of_input[func] * args[0].numel() * args[0].itemsize
                self.collectives.append((str(func).split(".")[1], tuple(args[0].shape)))
        else:
            assert "c10d" not in str(func), f"{func} sends what nobody counts"
        return func(*args, **(kwargs or {}))
