"""What one rank holds of a vLLM linear layer, and how it gets there. Imports no vLLM.

A layer of vLLM stands for one or more layers of the checkpoint, its members: `qkv_proj` for
`q_proj`, `k_proj` and `v_proj`. A member is a low-rank pair, or has stayed dense: in a storage, or
in the model's dtype.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronmm_ops.compress.factorize import check_finite
from neuronmm_ops.compress.report import LayerReport
from neuronmm_ops.engines.vllm.places import ColumnSection, Shard
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.nn.factors import check_stored
from neuronmm_ops.ops import xuv, xw
from neuronmm_ops.ops.backends.cpu import name_of
from neuronmm_ops.ops.spec import FLOAT_DTYPES
from neuronmm_ops.parallel.sharding import pair_dims, part, part_width, shard
from neuronmm_ops.storages import FACTORS, SCALES, STORAGES, pair_shapes, tensor_dtype

Pack = Callable[[Tensor], Callable[[Tensor], Tensor]]
"""Makes the product with a weight `[N, K]`, which need not be kept."""
STORED = ("w", "w_scale")
"""A dense member's tensors in a storage."""
ROWS = 256
"""Of a packed weight, taken out at a time."""
MISMATCH = "config and weights are not of the same checkpoint"
REMEDY = "copy the checkpoint again or compress the model again"


class Member(nn.Module):
    """A rank's part of one layer of the checkpoint.

    Args:
        name: of the layer, as the checkpoint has it.
        shapes: of its tensors in the checkpoint, by the last part of their names.
        sections: that the columns of its result consist of.
        pack: makes the products with its tensors, none of which is in a storage; None leaves them
            to the ops.
        storage: of its matrices, or None.

    Attributes:
        width: columns of this rank's result.
        missing: tensors that have not been loaded.
        packed: products with tensors that `pack` has taken the place of, by their names. What is
            left of such a tensor, on the meta device, says its shape.
    """

    def __init__(
        self,
        name: str,
        shapes: dict[str, tuple[int, ...]],
        sections: Sequence[ColumnSection],
        pack: Pack | None = None,
        storage: str | None = None,
    ) -> None:
        super().__init__()
        self.name, self.shapes, self.sections = name, shapes, tuple(sections)
        self.width = sum(section.width for section in sections)
        self.missing = set(shapes)
        self.pack, self.storage = pack, storage
        self.packed: dict[str, Callable[[Tensor], Tensor]] = {}

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
        name = f"{self.name}.{key}"
        if key not in self.shapes:
            if key == "weight" and not whole.numel():
                return  # the placeholder beside factors
            raise CheckpointError(
                f"{name}: config.json says nothing of it, the file has {list(whole.shape)}; "
                f"{MISMATCH}"
            )
        if whole.shape != self.shapes[key]:
            raise CheckpointError(
                f"{name}: config.json asks for {list(self.shapes[key])}, the file has "
                f"{list(whole.shape)}; {MISMATCH}"
            )
        if whole.dtype not in self.dtypes(key):
            expected = " or ".join(map(name_of, self.dtypes(key)))
            raise CheckpointError(
                f"{name}: config.json asks for {expected}, the file has {name_of(whole.dtype)}; "
                f"{MISMATCH}"
            )
        part = self.cut(key, whole)
        own = getattr(self, key)
        if is_rehearsal:
            torch.empty_like(own, device="meta").copy_(part)
            return
        if own.is_meta:  # packed
            own = nn.Parameter(torch.empty_like(own, device=part.device), requires_grad=False)
            setattr(self, key, own)
        own.data.copy_(part)
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
        found: dict[str, Tensor] = {}
        for key in self.shapes:
            kept = getattr(self, key).detach()
            matrix = kept if key == "weight" else kept.t()
            found[key] = unpacked(self.packed[key], matrix) if kept.is_meta else matrix
        return found

    def dtypes(self, key: str) -> tuple[torch.dtype, ...]:
        """Return which dtypes a tensor may have in the checkpoint."""
        return FLOAT_DTYPES if self.storage is None else (getattr(self, key).dtype,)

    def cut(self, key: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the checkpoint."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's columns `[..., width]` for x `[..., K]`."""
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

    def _columns(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's output columns of a tensor that has those of all ranks in `dim`."""
        pieces = whole.split([section.size for section in self.sections], dim)
        return torch.cat(
            [
                shard(piece, dim, section.own, section.parts, f"the columns of {self.name}")
                for piece, section in zip(pieces, self.sections, strict=True)
            ],
            dim,
        )


class Dense(Member):
    """A member that has stayed dense, beside low-rank ones; every column is a section's.

    Args:
        name: of the layer in the checkpoint.
        K: input features.
        sections: that the columns of its result consist of.
        dtype: the model's.
        pack: as in `Member`.

    Attributes:
        weight: `[width, K]`.
    """

    def __init__(
        self,
        name: str,
        K: int,
        sections: Sequence[ColumnSection],
        dtype: torch.dtype,
        pack: Pack | None = None,
    ) -> None:
        N = sum(section.size for section in sections)
        super().__init__(name, {"weight": (N, K)}, sections, pack)
        self.weight = nn.Parameter(torch.empty(self.width, K, dtype=dtype), requires_grad=False)

    def cut(self, key: str, whole: Tensor) -> Tensor:
        """Return the rows of the weight `[N, K]` that make this rank's columns."""
        return self._columns(whole, 0)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's columns `[..., width]` for x `[..., K]`."""
        if self.packed:
            return _added(self.packed["weight"](x), bias)
        return F.linear(x, self.weight, bias)


class Stored(Member):
    """A rank's part of a member that has stayed dense, in a storage.

    Args:
        layer: what the record says of it.
        place: where it is cut.
        sections: that the columns of its result consist of.

    Attributes:
        w: `[K, N]` as the storage has it, or this rank's rows or columns.
        w_scale: `[N]` of its columns, or as the storage has them, in float32.
        compute: `x`, or `fp8` where activations may be rounded to that.
    """

    w: Tensor
    w_scale: Tensor

    def __init__(self, layer: LayerReport, place: Shard, sections: Sequence[ColumnSection]) -> None:
        assert layer.storage is not None
        if place.kind is not None:
            _check_undivided(layer)
        storage = STORAGES[layer.storage]
        shapes: dict[str, tuple[int, ...]] = {}
        shapes.update(zip(STORED, storage.shapes(layer.K, layer.N), strict=True))
        super().__init__(layer.name, shapes, sections, storage=layer.storage)
        self.place, self.compute = place, layer.compute
        for key, dtype in zip(STORED, (storage.torch_dtype, torch.float32), strict=True):
            shape = self.cut(key, torch.empty(shapes[key], device="meta")).shape
            setattr(self, key, _along_contraction(shape, dtype))

    def cut(self, key: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the weight or its scale."""
        kind, _, rank, tp = self.place
        if kind == "column":
            return self._columns(whole, whole.dim() - 1)
        if kind == "row" and key == "w":
            return shard(whole, 0, rank, tp, f"the rows of {self.name}")
        return whole

    def check(self) -> None:
        """Check that all values are possible."""
        try:
            check_stored(self.w, self.w_scale, f"{self.name}: w")
        except ValueError as error:
            raise CheckpointError(f"{error}; or {REMEDY}") from None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's columns `[..., width]` for x `[..., K]`, or its part of the sum."""
        return xw(x, self.w, bias, self.w_scale, self.compute)


class Pair(Member):
    """A rank's part of a low-rank pair.

    Args:
        layer: what the record says of it.
        place: where it is cut.
        sections: that the columns of its result consist of.
        dtype: the model's.
        pack: as in `Member`.

    Attributes:
        u: `[K, r]`, or this rank's rows or columns of it, stored along K. Columns are padded with
            zeros where tp does not divide r.
        v: `[r, N]`, or this rank's columns of it, stored along r.
        u_scale: `[r]` of u's columns, in float32, where the factors are in one byte; else None.
        v_scale: `[N]` of v's columns, likewise.
        compute: `x`, or `fp8` where activations may be rounded to that.
        low_width: columns of this rank's u.
    """

    u: Tensor
    v: Tensor
    u_scale: Tensor | None
    v_scale: Tensor | None

    def __init__(
        self,
        layer: LayerReport,
        place: Shard,
        sections: Sequence[ColumnSection],
        dtype: torch.dtype,
        pack: Pack | None = None,
    ) -> None:
        assert layer.r is not None
        if place.kind is not None:
            _check_undivided(layer)
        shapes = pair_shapes(layer.K, layer.N, layer.r, layer.storage)
        pack = pack if layer.storage is None else None
        super().__init__(layer.name, shapes, sections, pack, layer.storage)
        self.place, self.rank, self.compute = place, layer.r, layer.compute
        for key in (*FACTORS, *SCALES):
            if key not in shapes:
                setattr(self, key, None)
                continue
            shape = self.cut(key, torch.empty(shapes[key], device="meta")).shape
            stored = torch.float32 if key in SCALES else tensor_dtype(layer.storage, dtype)
            if key == "u":
                self.low_width = shape[1]
            setattr(self, key, _along_contraction(shape, stored))

    def cut(self, key: str, whole: Tensor) -> Tensor:
        """Return this rank's part of u, v or their scales."""
        kind, divide, rank, tp = self.place
        if kind is None:
            return whole
        if key == "v" and self.place.gathers:  # beside the zero columns of the ranks' u
            padded = whole.new_zeros(part_width(self.rank, tp) * tp, whole.shape[1])
            padded[: self.rank] = whole
            whole = padded
        dim = pair_dims(kind, divide)[key]
        if kind == "column" and dim is not None and key in ("v", "v_scale"):
            return self._columns(whole, dim)
        is_padded = not (kind == "row" and key == "u")
        what = f"the {'rank' if is_padded else 'rows'} of {self.name}"
        return shard(whole, dim, rank, tp, what, padded=is_padded)

    def check(self) -> None:
        """Check that all values are possible."""
        if self.storage is None:
            check_finite(self.name, self.u, self.v, REMEDY)
            return
        u, v, u_scale, v_scale = self._without_padding()
        try:
            check_stored(u, u_scale, f"{self.name}: u")
            check_stored(v, v_scale, f"{self.name}: v")
        except ValueError as error:
            raise CheckpointError(f"{error}; or {REMEDY}") from None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this rank's columns `[..., width]` for x `[..., K]`, by u and v."""
        if self.packed:
            return self.high(self.low(x), bias)
        return xuv(x, self.u, self.v, bias, self.u_scale, self.v_scale, self.compute)

    def low(self, x: Tensor) -> Tensor:
        """Return `x @ u` `[..., low_width]` for x `[..., K]`, or this rank's part of the sum."""
        if self.packed:
            return self.packed["u"](x)
        return xw(x, self.u, None, self.u_scale, self.compute)

    def high(self, low: Tensor, bias: Tensor | None) -> Tensor:
        """Return `low @ v + bias` for low `[..., r]`."""
        if self.packed:
            return _added(self.packed["v"](low), bias)
        return xw(low, self.v, bias, self.v_scale, self.compute)

    def _without_padding(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert self.u_scale is not None
        assert self.v_scale is not None
        kind, divide, rank, tp = self.place
        r = columns = slice(None)
        if self.place.gathers:
            r = slice(_length(part(self.rank, rank, tp, "r", padded=True)))
        if kind == "row" and divide == "both":
            columns = slice(_length(part(self.shapes["v"][1], rank, tp, "N", padded=True)))
        v = self.v[: self.rank, columns]
        return self.u[:, r], v, self.u_scale[r], self.v_scale[columns]


def _check_undivided(layer: LayerReport) -> None:
    """Refuse, with a ValueError, to divide a layer whose groups of rows share scales."""
    if layer.storage is not None and STORAGES[layer.storage].group is not None:
        raise ValueError(
            f"{layer.name}: factors in {layer.storage}, whose groups of rows share scales, are not "
            "divided between vLLM's ranks; use tp = 1 or another storage"
        )


def _along_contraction(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """An empty matrix `[K, N]` stored along K, as after `nn.relayout_`; or a scale `[N]`."""
    return nn.Parameter(torch.empty(tuple(reversed(shape)), dtype=dtype).t(), requires_grad=False)


def unpacked(product: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Return the weight `[N, K]` that was packed, of which the argument has shape and dtype.

    Products with rows of the identity are exact in every dtype.
    """
    found = torch.empty_like(weight, device="cpu")
    for start in range(0, weight.shape[1], ROWS):
        columns = found[:, start : start + ROWS]
        rows = found.new_zeros(columns.shape[1], weight.shape[1])
        rows.diagonal(start).fill_(1)
        columns.copy_(product(rows).t())
    return found


def _added(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


def _length(part: slice) -> int:
    return part.stop - part.start
