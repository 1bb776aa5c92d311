"""Ops on NVIDIA GPUs: in CUDA graphs of few tokens kernels of their own, else the references."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from neuronmm_ops.ops.definitions import SPECS
from neuronmm_ops.ops.products import batched, rows
from neuronmm_ops.ops.register import LIBRARY
from neuronmm_ops.ops.spec import OpSpec
from neuronmm_ops.storages import size_of, storage_of
from neuronmm_ops.storages.int4 import GROUP as STEP

MAX_ROWS = 64
"""Tokens that the kernels take: more are bound by arithmetic, at which cuBLAS is best."""

# Measured on an H100: columns of a tile, programs for each of its processors, and how often the
# contraction is cut at most.
_LOW_COLUMNS, _COLUMNS = 32, 32
_PROGRAMS, _MAX_PARTS = 4, 16
_LAUNCH = {"num_warps": 4, "num_stages": 4}
_MIN_ROWS = 16  # of a tile that tensor cores multiply
_SUMMED = 256

Matrix = tuple[Tensor, Tensor | None]
"""A weight `[K, N]` in x's dtype, or of a storage with its scales."""


def xuv(x: Tensor, u: Matrix, v: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return `(x @ u) @ v + bias` for x `[M, K]` in two launches, or three."""
    return _high(_low(x, [u]), [v], bias, "")


def svd_mlp(x: Tensor, matrices: Sequence[Matrix], activation: str) -> Tensor:
    """Return `down(act(gate(x)) * up(x))` for x `[M, K]` and u, v of gate, up and down."""
    u_gate, v_gate, u_up, v_up, u_down, v_down = matrices
    hidden = _high(_low(x, [u_gate, u_up]), [v_gate, v_up], None, activation)
    return xuv(hidden, u_down, v_down)


def _low(x: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
    """Return the products of x `[M, K]` with one or two matrices, `[M, r]` each."""
    M, K = x.shape
    sizes = [size_of(w)[1] for w, _ in matrices]
    tiles = sum(_blocks(size, _LOW_COLUMNS) for size in sizes)
    steps = _blocks(K, STEP)
    cut = max(1, min(_MAX_PARTS, steps, _programs(x) // tiles))
    steps_of_part = _blocks(steps, cut)
    parts = _blocks(steps, steps_of_part)
    y = x.new_empty(M * sum(sizes))
    sums = y if parts == 1 else x.new_empty(parts, len(y), dtype=torch.float32)
    operands = [
        (*_of(matrix), size, *matrix[0].stride())
        for matrix, size in zip(matrices, sizes, strict=True)
    ]
    _kernels().low_kernel[_blocks(max(sizes), _LOW_COLUMNS), parts, len(matrices)](
        *(x, sums, M, K, x.stride(0), len(y)),
        *operands[0],
        *operands[-1],
        *(steps_of_part, *_constants(M, matrices[0], _LOW_COLUMNS)),
        **_LAUNCH,
    )
    if parts > 1:
        _kernels().sum_kernel[_blocks(len(y), _SUMMED),](sums, y, len(y), parts, _SUMMED)
    return [each.view(M, -1) for each in y.split([M * size for size in sizes])]


def _high(
    inputs: Sequence[Tensor], matrices: Sequence[Matrix], bias: Tensor | None, activation: str
) -> Tensor:
    """Return `x0 @ w0 + bias`, or with an activation `act(x0 @ w0) * (x1 @ w1)`."""
    M, N = len(inputs[0]), size_of(matrices[0][0])[1]
    y = inputs[0].new_empty(M, N)
    sizes = [x.shape[1] for x in inputs]
    operands = [
        (x, *_of(matrix), size, *matrix[0].stride())
        for x, matrix, size in zip(inputs, matrices, sizes, strict=True)
    ]
    _kernels().high_kernel[_blocks(N, _COLUMNS),](
        *(y, bias, M, N),
        *operands[0],
        *operands[-1],
        *(_blocks(sizes[0], STEP), _blocks(sizes[-1], STEP), bias is not None, activation),
        *_constants(M, matrices[0], _COLUMNS),
        **_LAUNCH,
    )
    return y


def _kernels() -> Any:
    """Import the kernels when they are launched: a torch that is built for CPUs has no Triton."""
    from neuronmm_ops.ops.cuda import kernels

    return kernels


def _of(matrix: Matrix) -> Matrix:
    weight, scale = matrix
    # Older GPUs convert no e4m3: the kernels move its bits.
    bits = weight.view(torch.int8) if weight.dtype == torch.float8_e4m3fn else weight
    return bits, None if scale is None else scale.contiguous()


def _constants(M: int, matrix: Matrix, columns: int) -> tuple[str, int, int]:
    """Return STORED, BLOCK_M and BLOCK_N."""
    storage = storage_of(matrix[0].dtype)
    block_m = max(_MIN_ROWS, 1 << (M - 1).bit_length())
    return "" if storage is None else storage.name, block_m, columns


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _programs(x: Tensor) -> int:
    """Return how many programs keep a GPU's processors loading; a few for the interpreter."""
    if not x.is_cuda:
        return 8
    return _PROGRAMS * torch.cuda.get_device_properties(x.device).multi_processor_count


def _xuv(tensors: Sequence[Any]) -> Tensor:
    x, u, v, bias, u_scale, v_scale = tensors
    x_rows = rows(x).contiguous()
    return xuv(x_rows, (u, u_scale), (v, v_scale), None if bias is None else bias.contiguous())


def _svd_mlp(tensors: Sequence[Any], activation: str) -> Tensor:
    matrices = list(zip(tensors[1:7], tensors[7:], strict=True))
    return svd_mlp(rows(tensors[0]).contiguous(), matrices, activation)


KERNELS: dict[str, Callable[..., Tensor]] = {"xuv": _xuv, "svd_mlp": _svd_mlp}
"""What launches an op's kernels for its tensors and choices."""


def takes(x: Tensor, compute: str) -> bool:
    """Whether there are kernels for a call's dtype of x, tokens and rounding of x."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return is_half and compute == "x" and 0 < x.numel() <= MAX_ROWS * x.shape[-1]


def implementation(spec: OpSpec) -> Callable[..., Any]:
    """Return the op that runs its kernels while a CUDA graph is captured.

    Outside of graphs their launches would take a host longer than the reference's. A graph is
    captured after a call of the same shapes, which compiles them.
    """
    known: set[tuple[Any, ...]] = set()

    def on_cuda(x: Tensor, *others: Any) -> Any:
        arguments = spec.complete((x, *others), {})
        # Triton launches on the current device.
        if takes(x, arguments[-1]) and x.device.index == torch.cuda.current_device():
            tensors, (*choices, _) = spec.split(arguments)
            call = tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors])
            key = (x.device.index, *choices, *call)
            is_captured = torch.cuda.is_current_stream_capturing()
            if is_captured and key in known:
                return batched(KERNELS[spec.name](tensors, *choices), x)
            if not is_captured and key not in known:
                spec.check(*arguments)
                KERNELS[spec.name](tensors, *choices)
                known.add(key)
        return spec.reference(*arguments)

    return on_cuda


# Triton comes with torch where it can compile for its GPUs.
if torch.version.cuda is not None and find_spec("triton") is not None:
    for _name in KERNELS:
        LIBRARY.impl(_name, implementation(SPECS[_name]), "CUDA")
