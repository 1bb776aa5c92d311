"""Rules of tensors: shapes, sizes and addresses.

Source: NKI 0.6 documentation, `nki.language.ndarray`; architecture guides.
"""

from __future__ import annotations

from math import prod
from typing import Any

from neuroncore import hardware as facts
from neuroncore.checks.base import refuse
from neuroncore.dtypes import DType
from neuroncore.hardware import Machine
from neuroncore.memory.storage import MemoryRegion, Storage


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
