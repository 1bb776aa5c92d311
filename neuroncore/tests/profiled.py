"""Shared by the tests of profiles: kernels small enough to be worked out by hand."""

from typing import Any

import pytest

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl


def profile_of(kernel: Any, *shapes: tuple[int, ...], **options: Any) -> nc.Profile:
    """Of a trace on tensors in bfloat16."""
    specs = [nc.TensorSpec(shape, nl.bfloat16) for shape in shapes]
    return nc.simulate(kernel, *specs, mode="trace", **{"target": "trn2", **options}).profile


def documented(kernel: Any, *shapes: tuple[int, ...], **options: Any) -> nc.Profile:
    return profile_of(kernel, *shapes, **{"model": "documented", **options})


def tile(like: Any, columns: int = 512, rows: int = 128) -> Any:
    return nl.ndarray((rows, columns), like.dtype)


def psum() -> Any:
    return nl.ndarray((128, 512), nl.float32, buffer=nl.psum)


@nc.jit
def idle(x):
    return x


@nc.jit
def tiles(x, w):
    """Each core its tiles of the columns; </script> and {{about}} are texts like any other."""
    core, cores = nl.program_id(0), nl.num_programs(0)
    y = nl.ndarray((128, w.shape[1]), x.dtype, buffer=nl.shared_hbm, name="y")
    a = nl.ndarray((128, 128), x.dtype, name="a")
    nisa.dma_copy(a, x[:, 128 * core : 128 * (core + 1)])
    for n in range(core, w.shape[1] // 512, cores):
        b = nl.ndarray((128, 512), w.dtype, name='the "right" tile')
        nisa.dma_copy(b, w[:, 512 * n : 512 * (n + 1)])  # "</script><b>{{about}}{{x}}"
        total = psum()
        nisa.nc_matmul(total, a, b)
        out = tile(x)
        nisa.tensor_copy(out, total)
        nisa.dma_copy(y[:, 512 * n : 512 * (n + 1)], out)
    return y


@nc.jit
def parts(x):
    """Tensors on a quarter, a half and all of the partitions, and two with addresses."""
    y = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    pinned = [
        nl.ndarray((128, 64), x.dtype, address=(0, byte), name=f"at{byte}") for byte in (0, 1024)
    ]
    for at in pinned:
        nisa.dma_copy(at, x[:, 0:64])
    for _ in range(3):
        low, mid, high = tile(x, rows=32), tile(x, rows=64), tile(x)
        for t in (low, mid, high):
            nisa.dma_copy(t, x[0 : t.shape[0]])
            nisa.tensor_scalar(t, t, nl.multiply, 2.0)
            nisa.dma_copy(y[0 : t.shape[0]], t)
    for at in pinned:
        nisa.dma_copy(y[:, 0:64], at)
    return y


@nc.jit
def halves(x):
    """Each core copies its half of the columns; core 1 then waits for the late tile of core 0."""
    core = nl.program_id(0)
    y = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm, name="y")
    a, b = tile(x), tile(x)
    columns = x[:, 512 * core : 512 * (core + 1)]
    nisa.dma_copy(a, columns)
    if core == 0:
        for _ in range(20):
            nisa.tensor_scalar(a, a, nl.multiply, 2.0)
    nisa.sendrecv(a, b, 1 - core, 1 - core, 0)
    nisa.dma_copy(y[:, 512 * core : 512 * (core + 1)], b)
    return y


def many(x, count=600):
    """More instructions than a plot draws one by one."""
    return matmuls(x, count)


def matmuls(x, count=64):
    """Of one stationary operand."""
    a, total = tile(x), psum()
    nisa.dma_copy(a, x)
    for _ in range(count):
        nisa.nc_matmul(total, a[:, 0:128], a)
    return x


def keeps_the_old_file(save: Any, directory: Any, at: tuple[Any, ...]) -> None:
    """`save` of a path fails where its `at` does, and leaves what was there, and nothing else."""
    path = directory / "old"
    path.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*at, fail)
        with pytest.raises(OSError, match="disk full"):
            save(path)
    assert path.read_text() == "old"
    assert list(directory.iterdir()) == [path]
