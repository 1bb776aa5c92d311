"""What one rank holds of a layer of the checkpoint, in every engine. Imports none.

A layer of an engine stands for one or more layers of the checkpoint, its members: `qkv_proj` for
`q_proj`, `k_proj` and `v_proj`. A member is a low-rank pair, or one matrix: in a storage, or in the
model's dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress.factorize import check_finite
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.places import ColumnSection, Shard
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.nn.factors import check_stored
from neuronmm_ops.ops import mlp, svd_mlp, svd_qkv, xuv, xw
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.spec import FLOAT_DTYPES
from neuronmm_ops.parallel.sharding import matrix_dims, pair_dims, part, part_width
from neuronmm_ops.storages import FACTORS, SCALES, STORAGES, pair_shapes, tensor_dtype

Pack = Callable[[Tensor], Callable[[Tensor], Tensor]]
"""Makes the product with a weight `[N, K]`, which need not be kept."""
Shapes = dict[str, tuple[int, ...]]
Dims = dict[str, int | None]
STORED = ("w", "w_scale")
"""A dense member's tensors in a storage."""
ROWS_AT_A_TIME = 256
"""Of a packed weight, taken out."""
MISMATCH = "config and weights are not of the same checkpoint"
REMEDY = "copy the checkpoint again or compress the model again"
_OPS: dict[str, Callable[..., Tensor]] = {
    "mlp": mlp,
    "svd_mlp": svd_mlp,
    "svd_qkv": svd_qkv,
    "xuv": xuv,
    "xw": xw,
}


def run_op(op: str, *args: Any) -> Tensor:
    """Call an op by its name."""
    return _OPS[op](*args)


class Member(nn.Module):
    """A rank's part of one layer of the checkpoint.

    Args:
        layer: what the record says of it.
        place: how ranks divide it.
        sections: that the columns of its result consist of.
        dtype: the model's.
        pack: makes the products with matrices in no storage; None leaves them to torch and the ops.
        bias: whether it has one.

    Attributes:
        shapes: of its tensors in the checkpoint, by the last part of their names.
        dims: in which dimension ranks divide each of them, None for whole ones.
        width: columns of this rank's result.
        bias: `[width]`, of a row layer whole; or None.
        run: what calls ops.
        missing: tensors that have not been loaded.
        packed: products with tensors that `pack` has taken the place of, by their names. What is
            left of such a tensor, on the meta device, says its shape.
    """

    bias: Tensor | None
    run: Callable[..., Tensor]
    along_contraction = True
    """Whether matrices `[K, N]` lie in memory along K, as after `nn.relayout_`."""

    def __init__(
        self,
        layer: LayerReport,
        place: Shard,
        sections: Sequence[ColumnSection],
        dtype: torch.dtype,
        pack: Pack | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        name, storage = layer.name, layer.storage
        if place.kind is not None and place.tp > 1 and _is_grouped(storage):
            raise ValueError(
                f"{name}: factors in {storage}, whose groups of rows share scales, are not divided "
                "between ranks; use tp = 1 or another storage"
            )
        self.name, self.place, self.sections = name, place, tuple(sections)
        self.storage, self.compute, self.run = storage, layer.compute, run_op
        self.width = sum(section.width for section in sections)
        self.shapes, dims = self._tensors(layer)
        if bias:
            self.shapes["bias"] = (sum(section.size for section in sections),)
        dims["bias"] = 0 if place.kind == "column" else None
        self.dims = {key: dims.get(key) for key in self.shapes}
        self.missing = set(self.shapes)
        self.pack = pack if storage is None else None
        self.packed: dict[str, Callable[[Tensor], Tensor]] = {}
        for key in ("bias", *SCALES):  # what not every member has
            self.register_parameter(key, None)
        for key in self.shapes:
            is_matrix = key in (*FACTORS, "w")
            stored = tensor_dtype(storage, dtype) if is_matrix else dtype
            stored = torch.float32 if key.endswith("_scale") else stored
            shape = self.part(key, place.rank)[2]
            shape = shape if key != "weight" or self.along_contraction else shape[::-1]
            turned = is_matrix and self.along_contraction
            empty = torch.empty(shape[::-1] if turned else shape, dtype=stored)
            setattr(self, key, nn.Parameter(empty.t() if turned else empty, requires_grad=False))

    def _tensors(self, layer: LayerReport) -> tuple[Shapes, Dims]:
        """Return shapes and dims but for the bias; what is in no dims is whole."""
        raise NotImplementedError

    @property
    def precision(self) -> tuple[str | None, str]:
        """What members must share to be computed in one op."""
        return self.storage, self.compute

    @property
    def inner(self) -> tuple[Tensor, Tensor | None]:
        """The matrix on the side that ranks always divide, `[K, N]`, and its scale."""
        raise NotImplementedError

    def load(self, key: str, whole: Tensor, *, is_rehearsal: bool = False) -> None:
        """Take this rank's part of a tensor of the checkpoint, for the first time or once more.

        With the last one of them all are checked and, where that is asked for, packed.

        Args:
            key: the last part of its name.
            whole: as the checkpoint has it.
            is_rehearsal: copy as many elements as will be loaded to the meta device, and load none:
                vLLM counts them before it reloads a layer.

        Raises:
            CheckpointError: the record says otherwise of its shape or dtype, or has no such tensor;
                or see `check`.
            NonFiniteError: see `check`.
        """
        name, shape = f"{self.name}.{key}", list(whole.shape)
        if key not in self.shapes:
            if key == "weight" and not whole.numel():
                return  # the placeholder next to factors
            raise CheckpointError(
                f"{name}: config.json says nothing of it, the file has {shape}; {MISMATCH}"
            )
        expected, actual = str(list(self.shapes[key])), str(shape)
        if whole.shape == self.shapes[key]:
            dtypes = FLOAT_DTYPES if self.storage is None else (getattr(self, key).dtype,)
            expected, actual = " or ".join(map(name_of, dtypes)), name_of(whole.dtype)
        if actual not in expected.split(" or "):
            raise CheckpointError(
                f"{name}: config.json asks for {expected}, the file has {actual}; {MISMATCH}"
            )
        kept = getattr(self, key)
        if is_rehearsal:  # without `cut`, whose copies would be counted, too
            loaded = torch.empty_like(kept, device="meta")
            loaded.copy_(torch.empty_like(loaded))
            return
        part = self.cut(key, whole, self.place.rank)
        if kept.is_meta:  # packed
            kept = nn.Parameter(torch.empty_like(kept, device=part.device), requires_grad=False)
            setattr(self, key, kept)
        kept.data.copy_(part)
        self.missing = (self.missing or set(self.shapes)) - {key}
        if not self.missing:
            self.check()
            self.pack_weights()

    def pack_weights(self) -> None:
        """Let `pack` make the products with the weights, and free these."""
        if self.pack is None:
            return
        for key, weight in self.state().items():
            self.packed[key] = self.pack(weight)
            free = getattr(self, key).to("meta")
            setattr(self, key, nn.Parameter(free, requires_grad=False))

    def state(self) -> dict[str, Tensor]:
        """Return this rank's tensors, matrices as `[N, K]`: their own memory unless packed."""
        tensors: dict[str, Tensor] = {}
        for key in self.shapes:
            kept = getattr(self, key).detach()
            matrix = kept if key == "weight" else kept.t()
            tensors[key] = unpacked(self.packed[key], matrix) if kept.is_meta else matrix
        return tensors

    def part(self, key: str, rank: int) -> tuple[int, list[slice], tuple[int, ...]]:
        """Return which part of a tensor a rank has: slices of a dimension, filled up to a shape."""
        shape, dim, tp = list(self.shapes[key]), self.dims[key], self.place.tp
        if self.place.gathers and key == "v":  # next to the zero columns of the ranks' u
            shape[0] = tp * part_width(shape[0], tp)
        if dim is None:
            return 0, [slice(0, self.shapes[key][0])], tuple(shape)
        if self.place.kind == "column" and key not in ("u", "u_scale"):
            shape[dim] = self.width
            ends = [sum(s.size for s in self.sections[:at]) for at in range(len(self.sections))]
            slices = [section.own(rank, tp) for section in self.sections]
            moved = [slice(s.start + at, s.stop + at) for s, at in zip(slices, ends, strict=True)]
            return dim, moved, tuple(shape)
        own_part = part(shape[dim], rank, tp, key, padded=True)
        shape[dim] = part_width(shape[dim], tp)
        return dim, [own_part], tuple(shape)

    def cut(self, key: str, view: Any, rank: int) -> Tensor:
        """Return a rank's part of a tensor of the checkpoint, or of a file's slice, copied.

        Zeros, which are exact, fill up the last parts where tp does not divide a size.
        """
        dim, slices, shape = self.part(key, rank)
        at, result = 0, None
        widths = [section.width for section in self.sections]
        for source, width in zip(slices, widths if len(slices) > 1 else [shape[dim]], strict=True):
            # An empty slice of a file is an error: a rank without a column reads one and drops it.
            count = source.stop - source.start
            rows = view[(slice(None),) * dim + (source if count else slice(0, 1),)]
            if result is None:
                result = rows.new_zeros(shape)
            rows = rows.narrow(dim, 0, min(count, rows.shape[dim]))
            target = result.narrow(dim, at, width)
            target[tuple(slice(0, size) for size in rows.shape)] = rows
            at += width
        assert result is not None
        return result

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's columns `[..., width]` for x `[..., K]`, or its part of the sum."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that all values are possible.

        Raises:
            CheckpointError: a one-byte factor or scale holds what it must not.
            NonFiniteError: a factor is NaN or Inf.
        """

    def check_missing(self) -> None:
        """Check that every tensor was loaded since the last call.

        Raises:
            CheckpointError: one was not.
        """
        if self.missing:
            raise CheckpointError(
                f"{self.name}.{min(self.missing)}: config.json asks for "
                f"{list(self.shapes[min(self.missing)])}, the files have none; {MISMATCH}"
            )
        self.missing = set(self.shapes)

    def _check_stored(self, **matrices: tuple[Tensor, Tensor | None]) -> None:
        try:
            for key, (matrix, scale) in matrices.items():
                check_stored(matrix, scale, f"{self.name}: {key}")
        except ValueError as error:
            raise CheckpointError(f"{error}; or {REMEDY}") from None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast; of what is in one byte nothing is cast."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(fn if self.storage is None else move, recurse)


class DenseMember(Member):
    """A member that has stayed dense.

    Attributes:
        weight: `[N, K]` in the model's dtype, or this rank's rows or columns; `[K, N]` where
            matrices do not lie along the contraction.
        w: in a storage, `[K, N]` as that has it, or this rank's rows or columns.
        w_scale: `[N]` of its columns, or as the storage has them, in float32.
    """

    weight: Tensor
    w: Tensor
    w_scale: Tensor

    def _tensors(self, layer: LayerReport) -> tuple[Shapes, Dims]:
        kind, storage = self.place.kind, layer.storage
        dims = {} if kind is None else matrix_dims(kind, storage)
        if storage is not None:
            shapes = STORAGES[storage].shapes(layer.K, layer.N)
            return dict(zip(STORED, shapes, strict=True)), dims
        return {"weight": (layer.N, layer.K)}, {"weight": {"column": 0, "row": 1}.get(kind or "")}

    @property
    def inner(self) -> tuple[Tensor, Tensor | None]:
        """The matrix and its scale."""
        if self.storage is not None:
            return self.w, self.w_scale
        return (self.weight.t() if self.along_contraction else self.weight), None

    def check(self) -> None:
        """Check that all values are possible."""
        if self.storage is not None:
            self._check_stored(w=(self.w, self.w_scale))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's columns `[..., width]` for x `[..., K]`, or its part of the sum."""
        if self.packed:
            return _added(self.packed["weight"](x), bias)
        if self.storage is None and self.along_contraction:
            return F.linear(x, self.weight, bias)
        w, scale = self.inner
        return self.run("xw", x, w, bias, scale, self.compute)


class Pair(Member):
    """A rank's part of a low-rank pair.

    Attributes:
        u: `[K, r]`, or this rank's rows or columns of it. Columns are padded with zeros where tp
            does not divide r.
        v: `[r, N]`, or this rank's columns of it.
        u_scale: `[r]` of u's columns, in float32, where the factors are in one byte; else None.
        v_scale: `[N]` of v's columns, as u_scale.
    """

    u: Tensor
    v: Tensor
    u_scale: Tensor | None
    v_scale: Tensor | None

    def _tensors(self, layer: LayerReport) -> tuple[Shapes, Dims]:
        assert layer.r is not None
        kind, divide, storage = self.place.kind, self.place.divide, layer.storage
        dims = {} if kind is None else pair_dims(kind, divide, storage)
        return pair_shapes(layer.K, layer.N, layer.r, storage), dims

    @property
    def inner(self) -> tuple[Tensor, Tensor | None]:
        """v of a column layer, u of a row layer."""
        return (self.u, self.u_scale) if self.place.kind == "row" else (self.v, self.v_scale)

    def check(self) -> None:
        """Check that all values are possible."""
        if self.storage is None:
            check_finite(self.name, self.u, self.v, REMEDY)
            return
        u, v, u_scale, v_scale = self._without_padding()
        self._check_stored(u=(u, u_scale), v=(v, v_scale))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's columns `[..., width]` for x `[..., K]`, by u and v."""
        if self.packed:
            return self.high(self.low(x), bias)
        return self.run("xuv", x, self.u, self.v, bias, self.u_scale, self.v_scale, self.compute)

    def low(self, x: Tensor) -> Tensor:
        """Return `x @ u` `[..., r]` for x `[..., K]`, or this rank's part of the sum."""
        if self.packed:
            return self.packed["u"](x)
        return self.run("xw", x, self.u, None, self.u_scale, self.compute)

    def high(self, low: Tensor, bias: Tensor | None) -> Tensor:
        """Return `low @ v + bias` for low `[..., r]`."""
        if self.packed:
            return _added(self.packed["v"](low), bias)
        return self.run("xw", low, self.v, bias, self.v_scale, self.compute)

    def _without_padding(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert self.u_scale is not None
        assert self.v_scale is not None
        kind, divide, rank, tp = self.place
        whole_rank = self.shapes["u"][1]
        r = columns = slice(None)
        if self.place.gathers:
            r = slice(_length(part(whole_rank, rank, tp, "r", padded=True)))
        if kind == "row" and divide == "both":
            columns = slice(_length(part(self.width, rank, tp, "N", padded=True)))
        v = self.v[:whole_rank, columns]
        return self.u[:, r], v, self.u_scale[r], self.v_scale[columns]


def member_of(
    layer: LayerReport,
    place: Shard,
    sections: Sequence[ColumnSection],
    dtype: torch.dtype,
    pack: Pack | None = None,
) -> Member:
    """Return the member for a layer of the record."""
    kind = DenseMember if layer.r is None else Pair
    return kind(layer, place, sections, dtype, pack)


def unpacked(product: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Return the weight `[N, K]` that was packed, of which the argument has shape and dtype.

    Products with rows of the identity are exact in every dtype.
    """
    dense = torch.empty_like(weight, device="cpu")
    for start in range(0, weight.shape[1], ROWS_AT_A_TIME):
        columns = dense[:, start : start + ROWS_AT_A_TIME]
        rows = dense.new_zeros(columns.shape[1], weight.shape[1])
        rows.diagonal(start).fill_(1)
        columns.copy_(product(rows).t())
    return dense


def _is_grouped(storage: str | None) -> bool:
    return storage is not None and STORAGES[storage].group is not None


def _added(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


def _length(part: slice) -> int:
    return part.stop - part.start
