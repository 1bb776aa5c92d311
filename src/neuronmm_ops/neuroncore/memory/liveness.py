"""Which tensors are live, and whether they fit: first write to last use, in program order."""

from __future__ import annotations

from dataclasses import dataclass

from neuronmm_ops.hardware import PSUM_BANK_BYTES, PSUM_BANKS, Machine
from neuronmm_ops.neuroncore.checks.base import NkiValidationError
from neuronmm_ops.neuroncore.memory.storage import MemoryRegion, Storage
from neuronmm_ops.neuroncore.timing.trace import Trace


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a memory: SBUF in bytes per partition, PSUM in banks."""

    used: int
    limit: int
    live: tuple[Storage, ...]
    """Largest first."""


def limit_of(memory: MemoryRegion, machine: Machine) -> int:
    """What there is of it, in the same unit."""
    return PSUM_BANKS if memory is MemoryRegion.psum else machine.usable_sbuf_bytes


def peak(trace: Trace, memory: MemoryRegion, machine: Machine) -> Peak:
    """The largest live set of a memory in program order."""
    tensors = [s for s in trace.storages if s.memory is memory and s.first >= 0]
    placed = [s for s in tensors if s.address is not None]
    events = [(s.first, 0, s.layout.size, s) for s in tensors if s.address is None]
    events += [(s.last, 1, -s.layout.size, s) for s in tensors if s.address is None]
    # tensors with an address hold their place for the whole kernel: nothing else is put there
    reserved = covered(placed)
    used = most = reserved
    at = -1
    for instruction, _, size, _ in sorted(events, key=lambda e: e[:2]):
        used += size
        if used > most:
            most, at = used, instruction
    live = [s for s in tensors if s.first <= at <= s.last] if at >= 0 else placed
    live.sort(key=lambda s: s.layout.size, reverse=True)
    return Peak(most, limit_of(memory, machine), tuple(live))


def check_fits(trace: Trace, machine: Machine) -> None:
    """Refuse a kernel whose live tensors exceed SBUF or PSUM, or overlap by address."""
    for memory in (MemoryRegion.sbuf, MemoryRegion.psum):
        found = peak(trace, memory, machine)
        if found.used > found.limit:
            unit = "banks" if memory is MemoryRegion.psum else "bytes per partition"
            live = "; ".join([f"{s.layout.size} {s.describe()}" for s in found.live[:8]])
            more = f"; and {len(found.live) - 8} more" if len(found.live) > 8 else ""
            raise NkiValidationError(
                f"{memory.value} does not fit: {found.used} {unit} are live at once, "
                f"{machine.target} has {found.limit}; free or shrink the largest: {live}{more}"
            )
        _check_addresses([s for s in trace.storages if s.address and s.memory is memory])


def overlap(a: Storage, b: Storage) -> bool:
    """Whether two tensors with addresses share bytes of a partition."""
    p, byte = a.address or (0, 0)
    q, other = b.address or (0, 0)
    partitions = p < q + b.layout.shape[0] and q < p + a.layout.shape[0]
    return partitions and byte < other + b.bytes and other < byte + a.bytes


def _check_addresses(placed: list[Storage]) -> None:
    live = [s for s in placed if s.first >= 0]
    for i, a in enumerate(live):
        for b in live[i + 1 :]:
            if a.first <= b.last and b.first <= a.last and overlap(a, b):
                raise NkiValidationError(
                    f"addresses of live tensors overlap: {a.describe()} at {a.address} and "
                    f"{b.describe()} at {b.address}; move one, or end its use before the other's"
                )


def covered(placed: list[Storage]) -> int:
    """Bytes per partition (SBUF) or banks (PSUM) that tensors with addresses cover together."""
    total = end = 0
    for s in sorted(placed, key=lambda s: s.address[1] if s.address else 0):
        start = s.address[1] if s.address else 0
        if s.memory is MemoryRegion.psum:
            start //= PSUM_BANK_BYTES
        stop = start + s.layout.size
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
