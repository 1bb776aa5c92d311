"""A rank's parameters, and how each is read from the checkpoint.

A parameter has the name of its tensor, so that the engine's own `load_weights` finds it; two that
the engine names otherwise, of the fused queries, keys and values and of attention's output, are
read from the files by their loaders. All of a rank's parts have one width, filled up with zeros.
"""

from collections.abc import Mapping

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad

from neuronmm_ops.checkpoint import TensorHeader
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.vllm_neuron.engine import Slice, Transform, set_loader
from neuronmm_ops.parallel.sharding import Kind, pair_dims, part, part_width

_DENSE_DIM = {"column": 1, "row": 0}
"""In which dimension of a dense weight `[K, N]` ranks divide it."""


def parameter(shape: tuple[int, int], dtype: torch.dtype, transform: Transform) -> nn.Parameter:
    """Return an empty parameter that the engine fills by a transform."""
    made = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    set_loader(made, transform)
    return made


def divided(
    shape: tuple[int, int],
    dim: int | None,
    tp: int,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
) -> nn.Parameter:
    """Return a rank's part of a matrix, which the engine reads from the tensor of its name.

    Args:
        shape: of the whole; larger than the file's where zeros are to be added.
        dim: in which ranks divide it.
        tp: ranks.
        dtype: of the parameter.
        transposed: whether the file has `[N, K]`.
    """
    assert dim is not None
    size = (
        (part_width(shape[0], tp), shape[1]) if dim == 0 else (shape[0], part_width(shape[1], tp))
    )

    def read(slices: list[Slice], rank: int) -> Tensor:
        (view,) = slices
        return read_part(view, dim, rank, tp, size, transposed=transposed)

    return parameter(size, dtype, read)


class Projection(nn.Module):
    """A rank's part of a linear layer: `u` and `v`, or `weight` `[K, N]` where it stays dense.

    Args:
        layer: what the checkpoint's record says of it.
        kind: `column` or `row`; ranks divide both factors.
        tp: ranks.
        dtype: of the parameters.
    """

    def __init__(self, layer: LayerReport, kind: Kind, tp: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.K, self.N, self.r = layer.K, layer.N, layer.r
        if layer.r is None:
            dim = _DENSE_DIM[kind]
            self.weight = divided((layer.K, layer.N), dim, tp, dtype, transposed=True)
            return
        dims = pair_dims(kind, "both")
        # x @ u of all ranks has zero columns where tp does not divide r: so has v zero rows.
        rows = tp * part_width(layer.r, tp) if kind == "column" else layer.r
        self.u = divided((layer.K, layer.r), dims["u"], tp, dtype)
        self.v = divided((rows, layer.N), dims["v"], tp, dtype)

    @property
    def is_low_rank(self) -> bool:
        """Whether it has factors."""
        return self.r is not None


def read_part(
    view: Slice, dim: int, rank: int, tp: int, size: tuple[int, int], *, transposed: bool = False
) -> Tensor:
    """Read a rank's part of a matrix, filled up with zeros to a size.

    Args:
        view: the tensor in its file.
        dim: of the parameter in which ranks divide it.
        rank: of this process.
        tp: ranks.
        size: of the part.
        transposed: whether the file has `[N, K]`.
    """
    stored_dim = 1 - dim if transposed else dim
    own = part(view.get_shape()[stored_dim], rank, tp, "the tensor", padded=True)
    # An empty slice of a file is an error: a rank without a column reads one and drops it.
    empty = own.start == own.stop
    index = [slice(None), slice(None)]
    index[stored_dim] = slice(0, 1) if empty else own
    found = view[tuple(index)]
    if empty:
        found = found.narrow(stored_dim, 0, 0)
    found = found.t() if transposed else found
    return pad(found, (0, size[1] - found.shape[1], 0, size[0] - found.shape[0]))


class Files:
    """A checkpoint's tensors, for parameters that the engine maps to another one."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.headers = headers

    def part(self, name: str, dim: int, rank: int, tp: int, size: tuple[int, int]) -> Tensor:
        """Read a rank's part of a matrix, as `read_part`."""
        with safe_open(self.headers[name].file, framework="pt") as file:
            return read_part(file.get_slice(name), dim, rank, tp, size)

    def columns(self, layer: LayerReport, own: slice) -> Tensor:
        """Return columns of a layer's matrix `[K, N]` in fp32; of a low-rank one, of u @ v."""
        if layer.r is None:
            return self._read(f"{layer.name}.weight", (own, slice(None))).t().float()
        u = self._read(f"{layer.name}.u", (slice(None), slice(None)))
        return u.float() @ self._read(f"{layer.name}.v", (slice(None), own)).float()

    def _read(self, name: str, index: tuple[slice, slice]) -> Tensor:
        with safe_open(self.headers[name].file, framework="pt") as file:
            return file.get_slice(name)[index]
