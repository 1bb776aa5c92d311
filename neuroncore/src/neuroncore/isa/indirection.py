"""Instructions on tensor indirections of trn3 (`NkiTensor.indirect`): gather, compute, scatter.

The instruction runs on dense tiles that stand for the views, so that its own rules and costs
hold; what is recorded is one instruction on the tiles behind the views and on their indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from neuroncore import core as running
from neuroncore.checks import operands as check
from neuroncore.checks.base import refuse
from neuroncore.core import SimulatedCore
from neuroncore.hardware import Engine
from neuroncore.isa.values import PSUM, SBUF, raw
from neuroncore.memory.geometry import whole
from neuroncore.memory.indirection import IndirectTile
from neuroncore.memory.storage import Storage
from neuroncore.memory.tensor import NkiTensor, view_of
from neuroncore.timing.trace import InstructionTemplate, NkiInstruction

_OPERANDS: dict[str, tuple[str, ...]] = {
    "nc_matmul": ("dst", "stationary", "moving"),
    "nc_matmul_mx": ("dst", "stationary", "moving", "stationary_scale", "moving_scale"),
    "tensor_copy": ("dst", "src"),
    "tensor_copy_predicated": ("dst", "predicate"),
    "tensor_tensor": ("dst", "data1"),
    "tensor_scalar": ("dst", "data"),
    "tensor_reduce": ("dst", "data"),
    "tensor_scalar_reduce": ("dst", "data"),
    "tensor_scalar_cumulative": ("dst", "src"),
    "activation": ("dst", "data"),
    "activate2": ("dst", "data"),
    "exponential": ("dst", "src"),
}
"""Which operands may be indirect; the second of each reads what decides where the others lie."""
_MATMULS = ("nc_matmul", "nc_matmul_mx")
_TENSOR_FLOATS = ("float16", "bfloat16", "float8_e4m3", "float8_e5m2", "float8_e4m3fn")


def issue(
    call: Callable[..., NkiInstruction], opcode: str, arguments: dict[str, Any]
) -> NkiInstruction:
    """Issue `call(**arguments)`, in which some operands are indirect."""
    core = running.active(opcode)
    name = arguments.pop("name", None)
    views = {n: v for n, v in arguments.items() if isinstance(v, IndirectTile)}
    _check_operands(opcode, arguments, views)
    if opcode in _MATMULS:
        _check_matmul(opcode, arguments, views)
    group = 32 if opcode in _MATMULS else 16
    offsets = {n: _offsets(core, opcode, v, group) for n, v in views.items()}
    dense = {n: _dense(core, v, offsets[n]) for n, v in views.items()}
    template, operands = _run(core, call, {**arguments, **dense})
    _check_engine(opcode, template, views)
    if core.execute and "dst" in views:
        _scatter(views["dst"], offsets["dst"], raw(dense["dst"]))
    # the tiles behind the views in the places of those that stood for them, then the indices
    behind = {dense[n].storage: v.base for n, v in views.items()}
    operands = [behind.get(t.storage, t) for t in operands] + [v.index for v in views.values()]
    key = (issue, template, *[t.geometry for t in operands])
    real = core.templates.get(key)
    if real is None:
        real = replace(template, run=lambda *operands: None, reads_dst=False)
        core.prepare(real, operands)
        core.templates[key] = real
    done = core.record(real, operands)
    if opcode in _MATMULS and "dst" in views:
        base = views["dst"].base
        base.storage.summed.add(base.geometry.region)
    return done.named(name)


def _run(
    core: SimulatedCore, call: Callable[..., NkiInstruction], operands_of_call: dict[str, Any]
) -> tuple[InstructionTemplate, Sequence[NkiTensor]]:
    """Run an instruction without recording it; returns its template and its operands."""
    issued: list[tuple[InstructionTemplate, Sequence[NkiTensor]]] = []

    def record(
        template: InstructionTemplate, operands: Sequence[NkiTensor], arguments: Any = None
    ) -> NkiInstruction:
        if core.execute:
            template.run(*(operands if arguments is None else arguments))
        issued.append((template, operands))
        return NkiInstruction(core.trace, -1)

    vars(core)["record"] = record
    try:
        call(**operands_of_call)
    finally:
        del vars(core)["record"]
    (one,) = issued
    return one


def _dense(core: SimulatedCore, view: IndirectTile, offsets: np.ndarray) -> NkiTensor:
    """A tile of the view's shape, memory and first partition, with the columns that it gathers."""
    start = view.geometry.start
    shape = (start + view.shape[0], view.shape[1])
    storage = Storage(core.launch.layout(shape, view.dtype, view.buffer), view.name)
    geometry = whole(storage.layout)
    if start:
        geometry = geometry.derive(view.shape, geometry.strides, start * view.shape[1])
    storage.initialised = True
    data = storage.hold(storage.fresh(core.launch.precise)) if core.execute else None
    tile = view_of(storage, geometry, None, data)
    base = view.base
    if base.geometry.layout.covers(base.geometry.region, base.storage.summed):
        storage.summed.add(geometry.region)
    if core.execute:
        values = raw(base)
        raw(tile)[...] = values.reshape(len(values), -1)[:, offsets]
    return tile


def _scatter(view: IndirectTile, offsets: np.ndarray, values: np.ndarray) -> None:
    target = raw(view.base)
    places = np.unravel_index(offsets, target.shape[1:])
    target[(slice(None), *places)] = values


def _offsets(core: SimulatedCore, opcode: str, view: IndirectTile, group: int) -> np.ndarray:
    """Offset i: index[i % group, i // group], in every group of partitions the same.

    The documentation gives the formula for one group. Whether each group has its own offsets it
    does not say, so indices that differ between groups are refused.
    """
    index, count = view.index, view.shape[1]
    rows = min(group, index.shape[0])
    if count > group * index.shape[1] or min(count, group) > rows:
        refuse(
            f"{opcode}: offset i is index[i % {group}, i // {group}], {rows * index.shape[1]} in "
            f"{index}; the view takes {count}, give num_elem"
        )
    if not core.execute:
        return np.zeros(count, np.int64)
    table = raw(index).astype(np.int64)
    i = np.arange(count)
    offsets = table[i % group, i // group]
    for first in range(group, len(table), group):
        part = table[first : first + group]
        known = i % group < len(part)
        if (part[(i % group)[known], (i // group)[known]] != offsets[known]).any():
            refuse(
                f"{opcode}: partitions {first} on of {index} hold other offsets than the first "
                f"{group}; the documentation defines one set, write it to each {group} partitions"
            )
    check.in_bounds(opcode, offsets, view.base.geometry.elements)
    return offsets


# rules


def _check_operands(opcode: str, arguments: dict[str, Any], views: dict[str, IndirectTile]) -> None:
    allowed = _OPERANDS.get(opcode, ("", ""))
    for operand, view in views.items():
        if operand not in allowed:
            legal = (
                f"only {' and '.join(allowed)} may be" if opcode in _OPERANDS else "it takes none"
            )
            refuse(
                f"{opcode}: {operand} {view} is a tensor indirection, {legal}; gather into a tile "
                "with tensor_copy first"
            )
        start = view.index.geometry.start
        if start % 32:
            refuse(f"{opcode}: the index of {operand} must start at 0, 32, 64 or 96; got {start}")
        if operand != "dst" and view.geometry.start != start:
            refuse(
                f"{opcode}: {operand} starts at partition {view.geometry.start} and its index at "
                f"{start}; they must start together"
            )
    if "dst" not in views:
        return
    source = arguments.get(allowed[1])
    if not isinstance(source, NkiTensor):
        return
    wanted = source.geometry.start
    if source.buffer is PSUM and opcode not in _MATMULS:
        if not isinstance(source, IndirectTile):
            return
        wanted = source.index.geometry.start
    start = views["dst"].index.geometry.start
    if start != wanted:
        refuse(
            f"{opcode}: the index of dst starts at partition {start} and {allowed[1]} at {wanted}; "
            "they must start together"
        )


def _check_matmul(opcode: str, arguments: dict[str, Any], views: dict[str, IndirectTile]) -> None:
    if any(arguments.get("tile_position") or ()):
        refuse(f"{opcode}: tensor indirection goes with tile_position (0, 0) only; leave it out")
    if arguments.get("is_transpose") and "moving" in views:
        refuse(f"{opcode}: moving cannot be indirect with is_transpose=True; copy it first")
    if "dst" in views and arguments.get("accumulate") is None:
        refuse(f"{opcode}: an indirect dst needs accumulate=True or False, to add or to overwrite")
    for operand in ("stationary", "moving"):
        if opcode == "nc_matmul" and operand in views:
            check.dtype_in(opcode, f"an indirect {operand}", views[operand], *_TENSOR_FLOATS)
        pair = (views.get(operand), views.get(f"{operand}_scale"))
        if opcode == "nc_matmul_mx" and any(pair) and not _one_index(*pair):
            refuse(f"{opcode}: {operand} and its scale must use one index, or neither any")


def _one_index(data: IndirectTile | None, scale: IndirectTile | None) -> bool:
    if data is None or scale is None:
        return False
    a, b = data.index, scale.index
    return a.storage is b.storage and a.geometry is b.geometry and data.shape[1] == scale.shape[1]


def _check_engine(
    opcode: str, template: InstructionTemplate, views: dict[str, IndirectTile]
) -> None:
    if opcode == "tensor_copy" and template.engine is Engine.GPSIMD:
        refuse("tensor_copy: tensor indirection needs engine.vector or engine.scalar")
    if template.engine is Engine.SCALAR and "dst" in views and views["dst"].buffer is not SBUF:
        refuse(f"{opcode}: ScalarE does not scatter to PSUM; scatter to SBUF, or use VectorE")
