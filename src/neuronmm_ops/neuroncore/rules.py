"""Rules of the hardware and the ISA, one function and one error text each.

Sources: NKI 0.6 documentation (`nki.isa`, architecture guides). Every error names the
instruction, the operand, the rule, the values seen and the remedy, on one line.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from neuronmm_ops.neuroncore import machine as facts
from neuronmm_ops.neuroncore.dtypes import DType
from neuronmm_ops.neuroncore.machine import Engine, Machine
from neuronmm_ops.neuroncore.memory import MemoryRegion, Storage
from neuronmm_ops.neuroncore.view_rules import NkiValidationError, refuse

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore.tensor import NkiTensor

__all__ = ["NkiValidationError"]

FLOAT8 = ("float8_e4m3", "float8_e5m2", "float8_e4m3fn")
MATMUL_DTYPES = (*FLOAT8, "bfloat16", "float16", "tfloat32", "float32")


# tensors


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape: at least one dimension, sizes of at least 1."""
    sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    if not sizes or not all(isinstance(s, int) and s >= 1 for s in sizes):
        refuse(f"nl.ndarray: a shape is a tuple of sizes of at least 1; got {shape!r}")
    return sizes


def tensor_fits(
    machine: Machine, shape: tuple[int, ...], dtype: DType, memory: MemoryRegion, name: str
) -> None:
    """On chip: two dimensions at least, 128 partitions at most, no more bytes than there are."""
    if not memory.on_chip:
        return
    what = f"nl.ndarray{f' {name}' if name else ''} {list(shape)} {dtype} in {memory.value}"
    if len(shape) < 2:
        refuse(f"{what}: a tensor on chip is [partition, free, ...]; give it two dimensions")
    if shape[0] > facts.PARTITIONS:
        refuse(f"{what}: {shape[0]} partitions exceed 128; tile the first dimension by 128")
    size = prod(shape[1:]) * dtype.itemsize
    limit = machine.usable_sbuf_bytes
    if memory is MemoryRegion.psum:
        limit = facts.PSUM_BANKS * facts.PSUM_BANK_BYTES
    if size > limit:
        refuse(
            f"{what}: {size} bytes per partition exceed the {limit} of {machine.target}; "
            "use smaller tiles"
        )


def same_shared_tensor(storage: Storage, shape: tuple[int, ...], dtype: DType) -> None:
    """Both cores of a launch allocate the same shared HBM tensors in the same order."""
    layout = storage.layout
    if (layout.shape, layout.dtype) != (shape, dtype):
        refuse(
            f"nl.ndarray: core 1 allocates {list(shape)} {dtype} in shared_hbm where core 0 has "
            f"{storage.describe()}; both cores must allocate the same"
        )


def address_of(machine: Machine, storage: Storage, address: tuple[int, int]) -> tuple[int, int]:
    """An explicit (partition, byte) address lies inside the memory; PSUM on a bank boundary."""
    partition, byte = address
    psum = storage.memory is MemoryRegion.psum
    limit = facts.PSUM_BANKS * facts.PSUM_BANK_BYTES if psum else machine.usable_sbuf_bytes
    if not storage.memory.on_chip:
        refuse(f"{storage.describe()}: an address is for sbuf and psum; leave it out")
    if partition < 0 or partition + storage.layout.shape[0] > facts.PARTITIONS:
        refuse(f"{storage.describe()}: address {address} runs over the 128 partitions")
    if byte < 0 or byte + storage.bytes > limit:
        refuse(
            f"{storage.describe()}: address {address} plus {storage.bytes} bytes runs over the "
            f"{limit} bytes per partition of {machine.target}"
        )
    if psum and byte % facts.PSUM_BANK_BYTES:
        refuse(f"{storage.describe()}: a PSUM address starts on a bank, a multiple of 2048 bytes")
    return partition, byte


def unwritten(opcode: str, t: NkiTensor, destination: bool) -> None:
    """An instruction reads only what was written."""
    how = "adds to" if destination else "reads"
    refuse(
        f"{opcode}: {how} {t}, at line {t.storage.line}, of which some elements were never "
        "written; write the tile, or slice to what was written"
    )


def meeting(program_id: int, number: int, other_ended: bool) -> None:
    """Both cores come to every barrier and exchange."""
    if other_ended:
        refuse(
            f"core_barrier/sendrecv {number}: core {program_id} waits but the other core has "
            "ended; both cores must take the same branches"
        )


# operands


def memory(opcode: str, operand: str, t: NkiTensor, *allowed: MemoryRegion) -> None:
    """The memory of an operand is one that the engine reaches."""
    if t.geometry.memory not in allowed:
        names = " or ".join([m.value for m in allowed])
        refuse(f"{opcode}: {operand} must be in {names}; {t} is not. {_memory_remedy(opcode)}")


def _memory_remedy(opcode: str) -> str:
    if opcode.startswith("dma"):
        return "DMA does not reach PSUM: copy to SBUF with tensor_copy or activation first"
    if opcode in ("nc_matmul", "nc_matmul_mx"):
        return "TensorE reads SBUF and writes PSUM"
    return "Load from HBM with dma_copy first"


def engine_reaches(opcode: str, engine: Engine, operands: dict[str, NkiTensor]) -> None:
    """GpSimdE does not reach PSUM."""
    if engine is not Engine.GPSIMD:
        return
    for name, t in operands.items():
        if t.geometry.memory is MemoryRegion.psum:
            refuse(f"{opcode}: GpSimdE does not reach PSUM, {name} is {t}; use engine.vector")


def engine_runs(opcode: str, engine: Engine, *allowed: Engine) -> None:
    """The instruction exists on that engine."""
    if engine not in allowed:
        names = " or ".join([f"engine.{e.name.lower()}" for e in allowed])
        refuse(f"{opcode}: engine.{engine.name.lower()} does not run it; use {names}")


def start_partition(opcode: str, operand: str, t: NkiTensor) -> None:
    """Engines address partitions in quadrants.

    65 to 128 partitions start at 0, 33 to 64 at 0 or 64, up to 32 at 0, 32, 64 or 96
    (architecture guide).
    """
    g = t.geometry
    legal = (0,) if g.partitions > 64 else (0, 64) if g.partitions > 32 else (0, 32, 64, 96)
    if g.start not in legal:
        refuse(
            f"{opcode}: {operand} {t} starts at partition {g.start}; {g.partitions} partitions "
            f"start at {' or '.join(map(str, legal))}; move it by DMA or lay it out so"
        )


def same_partitions(opcode: str, operands: dict[str, NkiTensor]) -> None:
    """Operands of an element-wise instruction have the same number of partitions."""
    counts = {name: t.geometry.partitions for name, t in operands.items()}
    if len(set(counts.values())) > 1:
        refuse(f"{opcode}: partition counts differ: {_listed(counts)}; slice them alike")


def same_elements(opcode: str, operands: dict[str, NkiTensor]) -> None:
    """They have the same number of elements per partition: nothing is broadcast."""
    counts = {name: t.geometry.elements for name, t in operands.items()}
    if len(set(counts.values())) > 1:
        refuse(
            f"{opcode}: elements per partition differ: {_listed(counts)}; nothing is broadcast, "
            "use view.broadcast(dim, size)"
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join([f"{name} has {count}" for name, count in counts.items()])


def scalar_operand(opcode: str, operand: str, t: NkiTensor, partitions: int) -> None:
    """A scalar per partition is a tile [P, 1]."""
    if t.geometry.elements != 1 or t.geometry.partitions != partitions:
        refuse(f"{opcode}: {operand} must be a number or a tile [{partitions}, 1]; got {t}")
    memory(opcode, operand, t, MemoryRegion.sbuf, MemoryRegion.psum)


def one_psum_input(opcode: str, first: NkiTensor, second: NkiTensor) -> None:
    """VectorE reads at most one of two tensors from PSUM."""
    if first.geometry.memory is second.geometry.memory is MemoryRegion.psum:
        refuse(
            f"{opcode}: both inputs are in PSUM, {first} and {second}; copy one to SBUF first "
            "(an activation on the way costs the same)"
        )


def dtype_in(opcode: str, operand: str, t: NkiTensor, *allowed: str) -> None:
    """The dtype is one that the instruction takes."""
    if t.dtype not in allowed:
        refuse(f"{opcode}: {operand} must be {', '.join(allowed)}; {t} is {t.dtype}")


def same_dtype(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Source and destination have one dtype."""
    if dst.dtype != src.dtype:
        refuse(f"{opcode}: dst and source must have one dtype; got {dst.dtype} and {src.dtype}")


def generation(opcode: str, machine: Machine, least: int, what: str, remedy: str) -> None:
    """A feature exists from some generation on."""
    if machine.generation < least:
        refuse(
            f"{opcode}: {what} needs NeuronCore-v{least}; {machine.target} is "
            f"v{machine.generation}; {remedy}"
        )


# TensorE


def matmul_shapes(machine: Machine, dst: NkiTensor, a: NkiTensor, b: NkiTensor, rows: int) -> None:
    """K <= 128 on partitions of both, M <= 128, N within the machine's limit, dst [M, N].

    `rows` is how many contraction rows a partition holds: 2 with double_row, else 1.
    """
    k, k2 = a.geometry.partitions, b.geometry.partitions
    m, n = a.geometry.elements // rows, b.geometry.elements // rows
    if k != k2:
        refuse(
            f"nc_matmul: contraction is on partitions; stationary has {k} and moving {k2}; "
            "slice both to the same"
        )
    if m > 128:
        refuse(f"nc_matmul: stationary free size {m} exceeds 128; tile it by 128")
    limit = machine.moving_max * (2 if dst.dtype == "bfloat16" and machine.bf16_psum else 1)
    if n > limit:
        refuse(
            f"nc_matmul: moving free size {n} exceeds {limit} on {machine.target}; tile it by "
            f"{limit}"
        )
    if (dst.geometry.partitions, dst.geometry.elements) != (m, n):
        refuse(
            f"nc_matmul: dst must be [{m}, {n}], the free sizes of stationary and moving; got {dst}"
        )


def matmul_dtypes(machine: Machine, dst: NkiTensor, a: NkiTensor, b: NkiTensor) -> None:
    """Legal operand dtypes and pairs, and the dtype of the result."""
    for name, t in (("stationary", a), ("moving", b)):
        dtype_in("nc_matmul", name, t, *MATMUL_DTYPES)
        if t.dtype == "float8_e4m3fn":
            generation("nc_matmul", machine, 4, f"{name} float8_e4m3fn", "use float8_e4m3")
    wide = [t.dtype in ("float32", "tfloat32") for t in (a, b)]
    if wide[0] != wide[1]:
        refuse(
            f"nc_matmul: float32 pairs only with float32 or tfloat32; got {a.dtype} and {b.dtype}; "
            "cast one"
        )
    if {a.dtype, b.dtype} >= {"float8_e4m3", "float8_e4m3fn"}:
        refuse("nc_matmul: float8_e4m3 and float8_e4m3fn cannot be mixed; cast one")
    if machine.bf16_psum:
        dtype_in("nc_matmul", "dst", dst, "float32", "bfloat16")
    elif dst.dtype != "float32":
        refuse(f"nc_matmul: dst must be float32 on {machine.target}; {dst} is {dst.dtype}")


def psum_bank(opcode: str, machine: Machine, dst: NkiTensor) -> None:
    """A TensorE result stays within one 2 KiB bank before NeuronCore-v4."""
    if machine.generation >= 4:
        return
    box = dst.geometry.layout.boxes[dst.geometry.region]
    first, last = box.byte // facts.PSUM_BANK_BYTES, (box.byte_end - 1) // facts.PSUM_BANK_BYTES
    if first != last:
        refuse(
            f"{opcode}: dst {dst} covers bytes {box.byte} to {box.byte_end} per partition and "
            "crosses a 2048-byte PSUM bank; start tiles on multiples of 512 fp32"
        )


def accumulates(dst: NkiTensor) -> None:
    """accumulate=True needs a matmul result to add to."""
    storage, layout = dst.storage, dst.geometry.layout
    if any(r in storage.summed for r in layout.containers[dst.geometry.region]):
        return
    parts = {r for r in layout.overlaps[dst.geometry.region] if r in storage.summed}
    if not parts or not _covers(storage, dst, parts):
        refuse(
            f"nc_matmul: accumulate=True on {dst}, which no matmul wrote; start with "
            "accumulate=False (memset does not count), for example accumulate=(k > 0)"
        )


def _covers(storage: Storage, dst: NkiTensor, parts: set[int]) -> bool:
    kept, storage.written = storage.written, parts
    initialised, storage.initialised = storage.initialised, False
    found = storage.covered(dst.geometry)
    storage.written, storage.initialised = kept, initialised
    return found


def pe_tiling(
    machine: Machine, position: tuple[int, int], size: tuple[int, int], k: int, m: int
) -> None:
    """Row and column tiles of 32, 64 or 128 that the stationary tile fits; positions in line."""
    least = 32 if machine.generation >= 3 else 64
    sizes = [s for s in (32, 64, 128) if s >= least]
    if any(s not in sizes for s in size):
        refuse(f"nc_matmul: tile_size {size} must be of {sizes} on {machine.target}")
    if any(p % s or p + s > 128 for p, s in zip(position, size, strict=True)):
        refuse(
            f"nc_matmul: tile_position {position} must be multiples of tile_size {size}, below 128"
        )
    if k > size[0] or m > size[1]:
        refuse(f"nc_matmul: stationary [{k}, {m}] exceeds tile_size {size}")


def double_row(machine: Machine, a: NkiTensor, b: NkiTensor, tiled: bool) -> None:
    """fp8 only, [K, 2, free] on both sides, no column tiling, NeuronCore-v3 on."""
    generation("nc_matmul", machine, 3, "perf_mode.double_row", "leave it out")
    for name, t in (("stationary", a), ("moving", b)):
        dtype_in("nc_matmul", f"double_row {name}", t, *FLOAT8)
        if t.ndim < 3 or t.shape[1] != 2:
            refuse(f"nc_matmul: double_row {name} must be [K, 2, free]; got {t}")
    if tiled:
        refuse("nc_matmul: double_row cannot be combined with tile_position/tile_size; drop one")


def transpose_tile(opcode: str, engine: Engine, data: NkiTensor, dst: NkiTensor) -> None:
    """TensorE transposes up to 128 x 128, VectorE up to 32 x 32; dst is [free, partitions]."""
    p, f = data.geometry.partitions, data.geometry.elements
    limit = 128 if engine is Engine.TENSOR else 32
    if max(p, f) > limit:
        refuse(f"{opcode}: {engine.name} transposes up to {limit} x {limit}; data is [{p}, {f}]")
    if (dst.geometry.partitions, dst.geometry.elements) != (f, p):
        refuse(f"{opcode}: dst must be [{f}, {p}]; got {dst}")


# DMA


def dma_sizes(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Source and destination have the same number of elements."""
    if dst.size != src.size:
        refuse(f"{opcode}: dst has {dst.size} elements and src {src.size}; slice them alike")


def dma_generation(
    opcode: str, machine: Machine, mode: str, engine: Engine, dst: NkiTensor, src: NkiTensor
) -> None:
    """hwdge: NeuronCore-v3 on, no cast, triggered by sync or scalar engine."""
    if mode == "hwdge":
        generation(opcode, machine, 3, "dge_mode.hwdge", "use dge_mode.unknown")
        if dst.dtype != src.dtype:
            refuse(
                f"{opcode}: dge_mode.hwdge does not cast; dst is {dst.dtype} and src {src.dtype}; "
                "use dge_mode.unknown or cast on an engine"
            )
    elif engine is not Engine.DMA:
        refuse(f"{opcode}: engine is for dge_mode.hwdge only; leave it engine.unknown")


def dma_priority(opcode: str, machine: Machine, priority: int | None) -> None:
    """Priority 0 to 3, NeuronCore-v4."""
    if priority is not None:
        generation(opcode, machine, 4, "priority", "leave it out")
        if priority not in (0, 1, 2, 3):
            refuse(f"{opcode}: priority must be 0 to 3; got {priority}")


# kernels


def outputs(tensors: list[Any]) -> None:
    """A kernel returns tensors in shared_hbm."""
    for t in tensors:
        buffer = getattr(t, "buffer", None)
        if buffer is not MemoryRegion.shared_hbm:
            refuse(
                f"kernel output {t!r} must be a tensor in nl.shared_hbm; "
                "allocate it with buffer=nl.shared_hbm and dma_copy the result into it"
            )


# element-wise instructions


def pe_pair(position: tuple[int, ...], size: tuple[int, ...]) -> None:
    """tile_position and tile_size come together."""
    if bool(position) != bool(size):
        refuse(f"nc_matmul: set tile_position and tile_size both; got {position} and {size}")


def constant_kind(dst: NkiTensor, value: Any) -> None:
    """memset: an int for integer tiles, a number otherwise."""
    if not isinstance(value, int | float):
        refuse(f"memset: value must be a number; got {value!r}")
    if not dst.dtype.is_float and isinstance(value, float) and not value.is_integer():
        refuse(f"memset: {dst} takes an int; got {value!r}")
    if dst.dtype.kind == "packed" and value != 0:
        refuse(f"memset: {dst} packs four values and takes 0 only; got {value!r}")


def operator_arity(opcode: str, alu: Any, arity: int) -> None:
    """The operator takes that many inputs."""
    if alu.arity != arity:
        refuse(
            f"{opcode}: op nl.{alu.name} takes {alu.arity} input; use tensor_scalar or activation"
        )


def operator_generation(opcode: str, machine: Machine, alu: Any) -> None:
    """abs_max and abs_min exist from NeuronCore-v4 on."""
    if alu.name in ("abs_max", "abs_min"):
        generation(opcode, machine, 4, f"nl.{alu.name}", "use nl.abs, then nl.maximum or minimum")


def same_kind(engine: Engine, first: Any, second: Any) -> None:
    """tensor_scalar: both operators arithmetic or both on bits; bits on VectorE, GpSimdE: rsqrt."""
    if second is not None and first.kind != second.kind:
        refuse(
            f"tensor_scalar: nl.{first.name} and nl.{second.name} are of different kinds; both "
            "must be bit operators or both arithmetic"
        )
    if first.kind == "bitvec" and engine is not Engine.VECTOR:
        refuse(f"tensor_scalar: nl.{first.name} is a bit operator and runs on engine.vector only")
    if engine is Engine.GPSIMD and "rsqrt" not in (first.name, getattr(second, "name", "")):
        refuse("tensor_scalar: engine.gpsimd runs nl.rsqrt only; use engine.vector")


def power_engine(opcode: str, op: str, engine: Engine) -> None:
    """power runs on GpSimdE only."""
    if op == "power" and engine is not Engine.GPSIMD:
        refuse(f"{opcode}: nl.power runs on GpSimdE only; leave engine out or use engine.gpsimd")


def arithmetic(opcode: str, alu: Any) -> None:
    """The instruction takes arithmetic operators only."""
    if alu.kind != "arithmetic":
        refuse(f"{opcode}: nl.{alu.name} is a bit operator; only arithmetic ones are taken")


def bitvec_dtypes(opcode: str, alu: Any, *tensors: NkiTensor) -> None:
    """Bit operators work on integers."""
    if alu.kind == "bitvec" and any(t.dtype.is_float for t in tensors):
        seen = ", ".join([t.dtype for t in tensors])
        refuse(f"{opcode}: nl.{alu.name} takes integer tiles; got {seen}; view them as integers")


def scalar_engine_ops(machine: Machine, engine: Engine, op0: str, op1: str | None) -> None:
    """tensor_scalar on ScalarE: multiply then add, multiply, or add; NeuronCore-v3 on."""
    if engine is not Engine.SCALAR:
        return
    generation("tensor_scalar", machine, 3, "engine.scalar", "use engine.vector or activation")
    if (op0, op1) not in {("multiply", "add"), ("multiply", None), ("add", None)}:
        refuse(f"tensor_scalar: ScalarE runs multiply+add, multiply or add; got {op0}, {op1}")


def second_operand(opcode: str, op1: Any, mark: Any, given: int) -> None:
    """op1 and operand1 come together; `mark` is (value,) of a number."""
    absent = mark is not None and mark[0] is None
    if (op1 is None) != absent:
        refuse(f"{opcode}: op1 and operand1 come together; set both or neither")


def activation_bias(machine: Machine, mark: Any, op: str) -> None:
    """Before NeuronCore-v3 a bias is a tile, and reciprocal takes none."""
    given = mark is None or mark[0] is not None
    if machine.generation < 3 and given and mark is not None:
        refuse(f"activation: bias must be a tile [P, 1] on {machine.target}; got {mark[0]!r}")
    if machine.generation < 3 and given and op == "reciprocal":
        refuse(f"activation: nl.reciprocal takes no bias on {machine.target}; leave it out")


def activation_operand(operand: str, t: NkiTensor) -> None:
    """scale is float32; bias anything but tfloat32."""
    if operand == "scale":
        dtype_in("activation", operand, t, "float32")
    elif t.dtype == "tfloat32":
        refuse(f"activation: bias must not be tfloat32; got {t}; use float32")


def activation_reduce(op: Any, command: str) -> None:
    """Only sums, and not half asked for."""
    if op is not None and op.__name__ != "add":
        refuse(f"activation: reduce_op must be nl.add; got {op.__name__}")
    if command in ("reduce", "reset_reduce") and op is None:
        refuse(f"activation: reduce_cmd.{command} needs reduce_op=nl.add")
    if command == "load_reduce":
        refuse("activation: reduce_cmd.load_reduce is not one of ScalarE's; use reset_reduce")


# dynamic addresses and DMA variants


def indirect_sides(dst: NkiTensor, src: NkiTensor) -> None:
    """One side of a copy is indirect, not both."""
    if dst.index is not None and src.index is not None:
        refuse("dma_copy: dst and src are both indirect; copy through SBUF in two steps")


def dynamic_bounds(t: NkiTensor, fine: bool) -> None:
    """A dynamic index within bounds, unless oob_mode.skip."""
    if not fine:
        refuse(f"dma_copy: a dynamic index runs out of {t}; check it or use oob_mode.skip")


def dma_transpose_axes(
    src: NkiTensor, dst: NkiTensor, axes: tuple[int, ...], legal: Any, gathers: bool
) -> None:
    """Axes (1,0), (2,1,0) or (3,1,2,0); dst has exactly the transposed shape."""
    if legal is None or axes != legal:
        refuse(f"dma_transpose: axes must be (1,0), (2,1,0) or (3,1,2,0) by rank; got {axes}")
    shape = tuple([src.shape[a] for a in axes])
    if dst.shape != shape:
        refuse(f"dma_transpose: dst must be {list(shape)}; got {dst}")


def hwdge_transpose(src: NkiTensor) -> None:
    """Shapes that the hardware transposes: 2 bytes, 16 rows, 128 columns at most."""
    rows = src.shape[0] if src.ndim == 2 else src.shape[0] * src.shape[-2]
    legal_rows = (
        rows == 16 if src.ndim == 2 else src.shape[0] in (1, 2, 4, 8, 16) and rows % 16 == 0
    )
    if src.dtype.itemsize != 2 or src.shape[-1] > 128 or not legal_rows:
        refuse(
            f"dma_transpose: dge_mode.hwdge takes 2-byte src [16, <=128], or [1|2|4|8|16, .., n, "
            f"<=128] with a multiple of 16 rows; got {src}; use dge_mode.unknown"
        )


def indirect_transpose(machine: Machine, src: NkiTensor, index: NkiTensor) -> None:
    """A gathering transpose: 2-byte HBM rows, a multiple of 16 of them, uint32 indices in SBUF."""
    generation("dma_transpose", machine, 3, "an indirect transpose", "gather with dma_copy first")
    memory("dma_transpose", "index", index, MemoryRegion.sbuf)
    dtype_in("dma_transpose", "index", index, "uint32")
    p, columns = index.shape[0], index.size // index.shape[0]
    if src.dtype.itemsize != 2 or src.shape[-1] > 128 or src.geometry.on_chip or src.shape[0] % 16:
        refuse(f"dma_transpose: indirect src must be 2-byte HBM [16n, .., <=128]; got {src}")
    if p % 16 or p > 128 or (columns > 1 and p != 128) or p * columns < src.shape[0]:
        refuse(f"dma_transpose: indices {index} must be [16n <= 128, 1] or [128, n]")


def dma_compute(dst: NkiTensor, srcs: list[NkiTensor], alu: Any, scales: Any) -> None:
    """Sums of at most 16 sources, scales of 1."""
    if alu.name != "add":
        refuse(f"dma_compute: reduce_op nl.{alu.name} is not supported; use nl.add")
    if not 1 <= len(srcs) <= 16:
        refuse(f"dma_compute: takes 1 to 16 sources; got {len(srcs)}")
    if scales is not None and (len(scales) != len(srcs) or any(s != 1.0 for s in scales)):
        refuse(f"dma_compute: scales must be 1.0 for each of {len(srcs)} sources; got {scales}")


def read_modify_write(dst: NkiTensor, srcs: list[NkiTensor], unique: bool) -> None:
    """dma_compute with an index: two sources, one of them where `dst` is, indices unique."""
    if len(srcs) != 2 or not unique:
        refuse(
            "dma_compute: with a dynamic index it takes two sources and unique_indices=True; got "
            f"{len(srcs)} and {unique}"
        )
    if not any(s.storage is dst.storage and s.geometry is dst.geometry for s in srcs):
        refuse(f"dma_compute: with a dynamic index one source must be dst itself, {dst}")


def repeated_indices(unique: bool) -> None:
    """A scatter that adds needs indices without repetition."""
    if not unique:
        refuse(
            "dma_compute: an index occurs twice; the sum would depend on timing; merge rows first"
        )


def index_operand(opcode: str, t: NkiTensor, index: NkiTensor) -> None:
    """An index tile: integers in SBUF, one per row of a vector-indexed view."""
    memory(opcode, "index", index, MemoryRegion.sbuf)
    if not index.dtype.is_integer:
        refuse(f"{opcode}: index must be integers; got {index}")
    indirect = t.geometry.indirect
    if indirect is not None and indirect[0] == "vector" and index.size != t.shape[0]:
        refuse(f"{opcode}: {t} needs {t.shape[0]} indices, one a row; got {index}")


def transpose_mode(mode: str, indirect: bool) -> None:
    """dma_transpose takes dge_mode.unknown, hwdge if direct, swdge if it gathers."""
    if mode not in ("unknown", "swdge" if indirect else "hwdge"):
        refuse(
            f"dma_transpose: dge_mode.{mode} does not {'gather' if indirect else 'transpose'}; "
            "use dge_mode.unknown"
        )


# registers and modes


def writable_register(register: Any) -> None:
    """A loop's own register is read-only."""
    if getattr(register, "frozen", False):
        refuse("register_move/load: the loop variable is read-only; use another register")


def executes(execute: bool, opcode: str) -> None:
    """Values exist in execute mode only."""
    if not execute:
        refuse(f'{opcode}: the value is data, which mode="trace" does not compute; use "execute"')


def one_element(opcode: str, t: NkiTensor) -> None:
    """A tile [1, 1]."""
    if t.size != 1:
        refuse(f"{opcode}: the tile must be [1, 1]; got {t}")


# the language


def one_tile(name: str, x: Any) -> None:
    """An element-wise function of `nl` gets at least one tile."""
    if not hasattr(x, "geometry"):
        refuse(f"nl.{name}: one input must be a tile; got {x!r}")


def matrix(name: str, x: NkiTensor) -> None:
    """A 2D transpose gets a matrix."""
    if x.ndim != 2:
        refuse(f"nl.{name}: takes two dimensions; got {x}; reshape it")


def transposed_matmul(transpose_x: bool) -> None:
    """nl.matmul takes x with the contraction on partitions."""
    if not transpose_x:
        refuse("nl.matmul: needs transpose_x=True; give x transposed, contraction on partitions")


def broadcast_shape(x: NkiTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same rank, and other sizes only where x has 1."""
    if len(shape) != x.ndim or any(a not in (1, b) for a, b in zip(x.shape, shape, strict=True)):
        refuse(f"nl.broadcast_to: {x} does not broadcast to {list(shape)}; only size 1 repeats")
    return shape


def trailing_axes(x: NkiTensor, axes: tuple[int, ...]) -> None:
    """Reductions run over the last free dimensions."""
    if not axes or axes[0] == 0 or axes != tuple(range(x.ndim - len(axes), x.ndim)):
        refuse(f"reduction of {x} over axes {list(axes)}: only the last free dimensions reduce")


def gather_axis(axis: int) -> None:
    """gather_flattened has one axis: all free dimensions, flattened."""
    if axis != 0:
        refuse(f"nl.gather_flattened: axis must be 0; got {axis}")


def buffer(value: Any) -> None:
    """`buffer=` is an object of nl, not a string."""
    if not isinstance(value, MemoryRegion):
        refuse(
            f"nl.ndarray: buffer must be nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm; got {value!r}"
        )


def loop_step(step: Any) -> None:
    """A dynamic loop's step is a positive compile-time integer."""
    if not isinstance(step, int) or step < 1:
        refuse(f"nl.fori_loop: step must be a positive int; got {step!r}")


def loop_condition(register: Any) -> None:
    """A while body returns its next condition."""
    if not hasattr(register, "value"):
        refuse(f"nl.while_loop: the body must return the condition register; got {register!r}")


def program_axis(axis: int) -> None:
    """The launch grid has one axis."""
    if axis != 0:
        refuse(f"nl.program_id/num_programs: the only axis is 0; got {axis}")


def launch_cores(count: Any) -> None:
    """A kernel runs on one or two physical cores."""
    if count not in (1, 2):
        refuse(f"kernel[{count}]: a launch takes 1 or 2 cores (LNC)")
