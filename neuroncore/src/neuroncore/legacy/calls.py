"""Functions of the Beta dialect, which return their results, by instructions that take `dst`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore import isa, language
from neuroncore.checks.base import refuse
from neuroncore.dtypes import DType, from_numpy
from neuroncore.hardware import Engine
from neuroncore.isa.values import raw
from neuroncore.legacy.indices import Box, Index, Mask
from neuroncore.legacy.names import ON_DATA, SYNONYMS
from neuroncore.legacy.tiles import PSUM, ParDim, Pending, Tile, TileBlocks
from neuroncore.memory.storage import MemoryRegion
from neuroncore.memory.tensor import NkiTensor

SBUF = MemoryRegion.sbuf
_MOST = 5
"""Dimensions of an engine's access pattern, with the partition."""


def dtype_of(dtype: Any) -> Any:
    """A dtype of `nl`, also of what NumPy calls it; None stays None."""
    return dtype if dtype is None or isinstance(dtype, DType) else from_numpy(dtype)


def plain(value: Any) -> Any:
    """A scalar of NumPy's as Python's: the dialect took both."""
    return value.item() if isinstance(value, np.generic) else value


def op_of(op: Any) -> Any:
    """An operator of `nl`, also of NumPy's function of that name."""
    if not callable(op):
        return op
    name: str = getattr(op, "__name__", "")
    return getattr(language, SYNONYMS.get(name, name))


def tile(shape: Any, dtype: Any, memory: MemoryRegion = SBUF) -> Tile:
    """A fresh tile; of a result with one dimension, that is the partition."""
    shape = tuple(map(int, shape))
    shape = shape if len(shape) > 1 or not memory.on_chip else (*shape, 1)
    return Tile(language.ndarray(shape, dtype, memory))


def ndarray(
    shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", value: Any = None, **_: Any
) -> Any:
    """`nl.ndarray`, and with a value `nl.full`: tiles, blocks of them, or a tensor in HBM."""
    memory = SBUF if buffer is None else buffer
    shape, dtype = tuple(shape), dtype_of(dtype)
    place = next((i for i, n in enumerate(shape) if isinstance(n, ParDim)), 0)
    core = running.active("nl.ndarray")
    if memory is MemoryRegion.shared_hbm and (launch := core.state.get("legacy")):
        return launch.shared(lambda: tile(shape, dtype, memory))
    blocks = shape[:place] if memory.on_chip else ()
    made = [tile(shape[len(blocks) :], dtype, memory) for _ in range(prod(blocks))]
    if value is not None:
        for each in made:
            _filled(each.view(), plain(value))
    return TileBlocks(blocks, made) if blocks else made[0]


def _filled(view: NkiTensor, value: Any) -> None:
    """Fill a fresh tensor by an instruction, but for the zeros that a sum in PSUM begins with."""
    if view.buffer is not PSUM or value != 0:
        isa.memset(view, value, isa.vector_engine if view.buffer is PSUM else isa.gpsimd_engine)
        return
    view.storage.initialised = True
    if running.active("nl.zeros").execute:
        raw(view)[...] = 0


def pieces(views: list[Any]) -> list[list[Any]]:
    """The operands in parts that engines can address; those of fewer dimensions stay whole."""
    most = max(v.ndim for v in views if isinstance(v, NkiTensor))
    if most <= _MOST:
        return [views]
    count = max(v.shape[1] for v in views if isinstance(v, NkiTensor) and v.ndim == most)
    parts = []
    for i in range(count):
        row = [v.select(1, i) if isinstance(v, NkiTensor) and v.ndim == most else v for v in views]
        parts += pieces(row)
    return parts


def issue(call: Callable[..., Any], dst: Tile, operands: list[Any], box: Box) -> Tile:
    """call(dst, *operands) within the box."""
    Pending.before_write(dst.base.storage)
    if all(high > low for low, high in box.values()):
        views = [o.view(box) if isinstance(o, Tile) else o for o in (dst, *operands)]
        for piece in pieces(views):
            call(*piece)
    return dst


def deferred(call: Callable[..., Any], result: Tile, operands: list[Any], box: Box) -> Tile:
    """The result of call(dst, *operands), whose destination its use decides; not within a box."""
    if box:
        return issue(call, result, operands, box)
    return Pending(lambda dst: issue(call, dst, operands, box), result, operands)


def assign(target: Tile, value: Any) -> None:
    """`target[...] = value`."""
    if isinstance(value, LoopSum):
        value = binary(value.op, target, value.data)
    if (waits := Pending.taken(value)) is not None and waits.writes(target):
        return
    if not isinstance(value, Tile):
        issue(lambda dst: isa.memset(dst, value), target, [], {})
        return
    shape = target.shape
    if value.shape != shape and prod(value.shape) != prod(shape):
        value = value.broadcast_to(shape)
    issue(isa.tensor_copy, target, [value], {})


def _near(x: Any) -> Any:
    """A tile that the DMA and a second operand can read: not in PSUM."""
    return _copied(x) if isinstance(x, Tile) and x.buffer is PSUM else x


def _copied(x: Tile, dtype: Any = None) -> Tile:
    return issue(isa.tensor_copy, tile(x.shape, dtype or x.dtype), [x], {})


def _common(x: Any, y: Any) -> Any:
    """The dtype of a result: the wider one, and floats before integers."""
    of = [v.dtype for v in (x, y) if isinstance(v, Tile)]
    return max(of, key=lambda d: (d.is_float, d.itemsize))


def binary(op: Any, x: Any, y: Any, dtype: Any = None, mask: Mask | None = None) -> Tile:
    """x op y of tiles that broadcast, or of a tile and a number."""
    op, box = op_of(op), mask.box() if mask else {}
    x, y = plain(x), plain(y)
    dtype = dtype_of(dtype) or _common(x, y)
    if op is language.divide:
        op = language.multiply
        y = unary(language.reciprocal, y, language.float32) if isinstance(y, Tile) else 1 / y
    if not isinstance(x, Tile) or not isinstance(y, Tile):
        data, number, swap = (x, y, False) if isinstance(x, Tile) else (y, x, True)

        def scalar(dst: Any, data: Any) -> None:
            isa.tensor_scalar(dst, data, op, number, reverse0=swap)

        return deferred(scalar, tile(data.shape, dtype), [data], box)
    x, y = _near(x) if y.buffer is PSUM else x, y
    for swap, (a, b) in enumerate(((x, y), (y, x))):
        if b.shape[0] == a.shape[0] and prod(b.shape[1:]) == 1 < prod(a.shape[1:]):
            b = b if b.dtype == language.float32 else _copied(b, language.float32)

            def columns(dst: Any, data: Any, number: Any) -> None:
                isa.tensor_scalar(dst, data, op, number, reverse0=bool(swap))  # noqa: B023

            flat = Tile(b.view().reshape((a.shape[0], 1)))
            return deferred(columns, tile(a.shape, dtype), [a, flat], box)
    shape = np.broadcast_shapes(x.shape, y.shape)
    wide = [v if v.shape == shape else v.broadcast_to(shape) for v in (x, y)]

    def elements(dst: Any, a: Any, b: Any) -> None:
        isa.tensor_tensor(dst, a, b, op)

    return deferred(elements, tile(shape, dtype), wide, box)


def unary(function: Any, x: Any, dtype: Any = None, mask: Mask | None = None) -> Tile:
    """A function of `nl` of one tile, such as `nl.exp`."""
    if not mask and x.ndim <= _MOST:
        return Tile(function(x.view(), dtype_of(dtype) or x.dtype))
    result = tile(x.shape, dtype_of(dtype) or x.dtype)

    def run(dst: Any, data: Any) -> None:
        isa.tensor_copy(dst, function(data, dst.dtype))

    return issue(run, result, [x], mask.box() if mask else {})


def reduced(
    op: Any,
    x: Tile,
    axis: Any,
    dtype: Any = None,
    mask: Mask | None = None,
    negate: bool = False,
    keepdims: bool = False,
) -> Tile:
    """`nl.max` and `nisa.tensor_reduce`: any free axes, which an access pattern puts last."""
    axes = sorted(a % x.ndim for a in ([axis] if isinstance(axis, int) else axis))
    kept = [d for d in range(x.ndim) if d not in axes]
    box = mask.box() if mask else {}
    ones = [1] * (len(axes) if keepdims else int(len(kept) == 1))
    dst = tile([*[x.shape[d] for d in kept], *ones], dtype_of(dtype) or x.dtype)
    cut = {i - dst.ndim: box[d - x.ndim] for i, d in enumerate(kept) if d - x.ndim in box}
    last = tuple(range(len(kept), x.ndim))

    def issued(dst: Tile) -> None:
        Pending.before_write(dst.base.storage)
        view = x.view(box).permute((*kept, *axes))
        isa.tensor_reduce(dst.view(cut), op_of(op), view, last, negate=negate, keepdims=keepdims)

    if not mask:
        return Pending(issued, dst, [x])
    issued(dst)
    return dst


def load(src: Tile, *, mask: Mask | None = None, dtype: Any = None, **_: Any) -> Tile:
    """`nl.load`."""
    result = tile(src.shape, dtype_of(dtype) or src.dtype)
    return deferred(isa.dma_copy, result, [src], mask.box() if mask else {})


def store(dst: Tile, value: Any, *, mask: Mask | None = None, **_: Any) -> None:
    """`nl.store`; what lies in PSUM goes through SBUF."""
    value = _near(value)
    if not isinstance(value, Tile):
        value = ndarray(dst.shape, dst.dtype, value=value)
    if value.shape != dst.shape and prod(value.shape) == prod(dst.shape):
        value = value.reshape((value.shape[0], *dst.shape[1:]) if dst.ndim > 1 else dst.shape)
    issue(isa.dma_copy, dst, [value], mask.box() if mask else {})


def matmul(x: Tile, y: Tile, *, transpose_x: bool = False, **_: Any) -> Tile:
    """`nl.matmul`, which transposes x itself."""
    x = x if transpose_x else _near(transpose(x))
    return call("nc_matmul", _near(x), _near(y))


def transpose(x: Tile, *, dtype: Any = None, **_: Any) -> Tile:
    """`nl.transpose` of a tile."""
    moved = call("nc_transpose", _near(x))
    return moved if dtype is None else _copied(moved, dtype_of(dtype))


def where(condition: Tile, x: Any, y: Any, *, dtype: Any = None, **_: Any) -> Tile:
    """`nl.where`."""
    x, y = (v.view() if isinstance(v, Tile) else v for v in (x, y))
    return Tile(language.where(condition.view(), x, y, dtype_of(dtype)))


class LoopSum:
    """`nl.loop_reduce(data, op, loop_indices)`: what each iteration adds to the target."""

    def __init__(self, data: Tile, op: Any, *_: Any, **__: Any) -> None:
        self.data, self.op = data, op_of(op)


def affine_select(pred: Mask, on_true_tile: Tile, on_false_value: float, **options: Any) -> Tile:
    """`nisa.affine_select` of a comparison of indices."""
    (part,) = pred.parts
    axes = range(min(part.terms), 0)
    (channel, _), *free = [part.terms.get(a, (0, on_true_tile.shape[a])) for a in axes]
    dst = tile(on_true_tile.shape, dtype_of(options.pop("dtype", None)) or on_true_tile.dtype)
    isa.affine_select(
        dst.view(), [list(f) for f in free], channel, on_true_tile.view(), on_false_value,
        cmp_op=language.greater_equal, offset=part.offset,
    )  # fmt: skip
    return dst


def iota(expr: Index, dtype: Any, **_: Any) -> Tile:
    """`nisa.iota` of an index."""
    axes = range(min(expr.terms), 0)
    (channel, partitions), *free = [expr.terms.get(a, (0, 1)) for a in axes]
    dst = tile((partitions, *[size for _, size in free]), dtype_of(dtype))
    isa.iota(dst.view(), [list(f) for f in free], expr.offset, channel)
    return dst


def _result(name: str, arguments: dict[str, Any], dtype: Any) -> Tile:
    """A tile for what an instruction returned: its shape and, unless said, its dtype."""
    if name in ON_DATA:
        data = arguments[ON_DATA[name]]
        both = [data, arguments.get("data2", data)] if name == "tensor_tensor" else [data, data]
        return tile(data.shape, dtype or _common(*both))
    if name == "nc_matmul":
        a, b = arguments["stationary"], arguments["moving"]
        dtype = (
            a.dtype if arguments.get("is_transpose") and _transposes_bits() else language.float32
        )
        return tile((prod(a.shape[1:]), *b.shape[1:]), dtype, PSUM)
    data = arguments.get("data", arguments.get("src"))
    if name == "nc_transpose" and data is not None:
        shape = prod(data.shape[1:]), data.shape[0]
        if arguments.get("engine") is isa.vector_engine:
            return tile(shape, data.dtype)
        return tile(shape, data.dtype if _transposes_bits() else language.float32, PSUM)
    fixed = {"bn_stats": 6, "bn_aggr": 2, "max8": 8}
    if name in fixed and data is not None:
        return tile((data.shape[0], fixed[name]), dtype or data.dtype)
    if name == "tensor_partition_reduce" and data is not None:
        return tile((1, *data.shape[1:]), dtype or data.dtype)
    return refuse(
        f"nisa.{name}: its result in the Beta dialect is not known here; migrate it by hand"
    )


def _copy(dst: NkiTensor, src: NkiTensor) -> None:
    engine = _less_busy()
    if engine is isa.scalar_engine and not running.active("nl.copy").machine.has("scalar_copies"):
        isa.activation(dst, language.copy, src)
    else:
        isa.tensor_copy(dst, src, engine=engine)


def _less_busy() -> Any:
    """The engine for a copy, VectorE or ScalarE: its compiler has both share them."""
    core = running.active("nisa.tensor_copy")
    busy, counted = core.state.setdefault("legacy busy", ({}, [0]))
    for template, *_ in core.trace.records[counted[0] :]:
        if (engine := template.engine) in (Engine.VECTOR, Engine.SCALAR):
            busy[engine] = busy.get(engine, 0.0) + core.machine.ns(engine, template.cycles)
    counted[0] = len(core.trace.records)
    scalar_less = busy.get(Engine.SCALAR, 0.0) < busy.get(Engine.VECTOR, 0.0)
    return isa.scalar_engine if scalar_less else isa.vector_engine


def _elements(x: Tile) -> int:
    """Of each partition."""
    return prod(x.shape[1:])


def call(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """An instruction of the Beta dialect: `dst` is returned, unless it was named."""
    function = getattr(isa, name)
    kwargs.pop("name", None)
    dtype, mask = dtype_of(kwargs.pop("dtype", None)), kwargs.pop("mask", None)
    names = [n for n in inspect.signature(function).parameters if n != "dst"]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    arguments = {n: op_of(v) if callable(v) else plain(v) for n, v in arguments.items()}
    if name == "tensor_reduce":
        data, op, axis = arguments.pop("data"), arguments.pop("op"), arguments.pop("axis")
        flags = {n: arguments[n] for n in ("negate", "keepdims") if n in arguments}
        return reduced(op, data, axis, dtype, mask, **flags)
    arguments = {n: v for n, v in arguments.items() if v is not None}
    if name == "tensor_tensor" and _elements(arguments["data1"]) != _elements(arguments["data2"]):
        done = binary(arguments["op"], arguments["data1"], arguments["data2"], dtype, mask)
        return done if "dst" not in arguments else assign(arguments["dst"], done)
    box = mask.box() if mask else {}
    if name == "nc_matmul" and mask:
        refuse("nc_matmul: mask= has axes of three kinds; slice its operands")
    has_dst = isinstance(arguments.get("dst"), Tile)
    dst = arguments.pop("dst") if has_dst else _result(name, arguments, dtype)
    operands = list(arguments.values())

    def issued(dst: Tile, **options: Any) -> None:
        def run(dst: Any, *operands: Any) -> None:
            if name == "tensor_copy" and "engine" not in arguments:
                _copy(dst, *operands)
            else:
                function(dst=dst, **dict(zip(arguments, operands, strict=True)), **options)

        issue(run, dst, operands, box)

    if not has_dst and not mask:
        return Pending(issued, dst, operands, name == "nc_matmul")
    issued(dst)
    return None if has_dst else dst


@functools.cache
def instruction(name: str) -> Callable[..., Any]:
    """An instruction by its name."""
    return functools.partial(call, name)


def _transposes_bits() -> bool:
    """Say whether TensorE transposes as it is, in the operand's dtype; else it multiplies."""
    return running.active("nisa.nc_transpose").machine.has("native_transposes")
