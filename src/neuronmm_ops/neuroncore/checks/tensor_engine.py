"""Rules of TensorE.

Source: NKI 0.6 documentation, `nki.isa.nc_matmul` and `nc_transpose`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuronmm_ops import hardware as facts
from neuronmm_ops.hardware import Engine, Machine
from neuronmm_ops.neuroncore.checks.base import refuse
from neuronmm_ops.neuroncore.checks.operands import dtype_in, generation, start_partition

if TYPE_CHECKING:
    from neuronmm_ops.neuroncore.memory.tensor import NkiTensor


FLOAT8 = ("float8_e4m3", "float8_e5m2", "float8_e4m3fn")
MATMUL_DTYPES = (*FLOAT8, "bfloat16", "float16", "tfloat32", "float32")


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


def pe_partitions(opcode: str, machine: Machine, **operands: NkiTensor) -> None:
    """Operands start on partitions of a PE tile: of 64 x 64 before NeuronCore-v3, then 32 x 32."""
    for operand, t in operands.items():
        start_partition(opcode, operand, t)
        if machine.generation < 3 and t.geometry.start not in (0, 64):
            refuse(
                f"{opcode}: {operand} {t} starts at partition {t.geometry.start}; TensorE of "
                f"{machine.target} addresses partitions from 0 or 64, tiles of 32 rows need "
                "NeuronCore-v3; lay it out so"
            )


def accumulates(dst: NkiTensor) -> None:
    """accumulate=True needs a matmul result to add to."""
    if not dst.geometry.layout.covers(dst.geometry.region, dst.storage.summed):
        refuse(
            f"nc_matmul: accumulate=True on {dst}, which no matmul wrote; start with "
            "accumulate=False (memset does not count), for example accumulate=(k > 0)"
        )


def pe_tiling(
    machine: Machine, position: tuple[int, int], size: tuple[int, int], k: int, m: int
) -> None:
    """Row and column tiles of 32, 64 or 128 that the stationary tile fits; positions in line."""
    if bool(position) != bool(size):
        refuse(f"nc_matmul: set tile_position and tile_size both; got {position} and {size}")
    if not size:
        return
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
