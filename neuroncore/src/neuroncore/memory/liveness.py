"""Which tensors are live, and whether they fit: first write to last use, in program order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from neuroncore.checks.base import NkiValidationError, note
from neuroncore.hardware import PSUM_BANK_BYTES, PSUM_BANKS, Machine
from neuroncore.memory.storage import MemoryRegion, Storage
from neuroncore.timing.trace import Trace

CapacityPolicy = Literal["raise", "warn"]


class CapacityError(NkiValidationError):
    """More is live at once than SBUF or PSUM holds."""


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a memory: SBUF in bytes per partition, PSUM in banks."""

    used: int
    limit: int
    live: tuple[Storage, ...]
    """Largest first."""


def limit_of(memory: MemoryRegion, machine: Machine) -> int:
    """What there is of it, in the same unit."""
    if memory is MemoryRegion.psum:
        return PSUM_BANKS
    return max(machine.usable_sbuf_bytes, machine.planned_sbuf_bytes)  # without a reserve, all


def room_of(memory: MemoryRegion, machine: Machine) -> int:
    """What a schedule fills of it unless a kernel needs more: all but the plans' reserve."""
    return PSUM_BANKS if memory is MemoryRegion.psum else machine.planned_sbuf_bytes


def peak(trace: Trace, memory: MemoryRegion, machine: Machine) -> Peak:
    """The largest live set of a memory in program order."""
    tensors = [s for s in trace.storages if s.memory is memory and s.first >= 0]
    events = [(s.first, 0, s.layout.size, s) for s in tensors if s.address is None]
    events += [(s.last, 1, -s.layout.size, s) for s in tensors if s.address is None]
    for s, (taken, given_back) in shares_of(tensors).items():
        events += [(s.first, 0, taken, s), (s.last, 1, -given_back, s)]
    used = most = 0
    at = -1
    for instruction, _, size, _ in sorted(events, key=itemgetter(0, 1)):
        used += size
        if used > most:
            most, at = used, instruction
    live = [s for s in tensors if s.first <= at <= s.last]
    live.sort(key=lambda s: s.layout.size, reverse=True)
    return Peak(most, limit_of(memory, machine), tuple(live))


def check_fits(
    trace: Trace, machine: Machine, policy: CapacityPolicy | None
) -> dict[MemoryRegion, int]:
    """Refuse, or note, live tensors that exceed SBUF or PSUM; refuse overlapping addresses.

    Without a policy, they are refused where they exceed `room_of`: another order may need less.
    Returns what the schedule may fill of each memory: that, or as much as is live at once.
    """
    limits: dict[MemoryRegion, int] = {}
    for memory in (MemoryRegion.sbuf, MemoryRegion.psum):
        held = peak(trace, memory, machine)
        limits[memory] = max(held.used, room_of(memory, machine))
        if held.used > (held.limit if policy else room_of(memory, machine)):
            unit = "banks" if memory is MemoryRegion.psum else "bytes per partition"
            problem = (
                f"{memory.value} does not fit: {held.used} {unit} are live at once, "
                f"{machine.target} has {held.limit}; free or shrink the largest: "
                f"{_largest(held.live)}"
            )
            if policy != "warn":
                raise CapacityError(problem)
            made = held.live[0] if held.live else None
            place = (made.code.co_filename, made.line) if made and made.code else None
            note(f"{problem}; modelled as if it did", place)
        _check_addresses([s for s in trace.storages if s.address and s.memory is memory])
    return limits


def _largest(live: tuple[Storage, ...], most: int = 8) -> str:
    """The largest tensors of a live set, those of one line and shape together."""
    alike = Counter((s.layout, s.line, s.code) for s in live)
    sizes = sorted(alike.items(), key=lambda item: item[0][0].size * item[1], reverse=True)
    shown: list[str] = []
    for (layout, line, code), count in sizes[:most]:
        name = next(s.name for s in live if (s.layout, s.line, s.code) == (layout, line, code))
        times = f"{count} x {layout.size}" if count > 1 else str(layout.size)
        where = f" at line {line}" if line else ""
        shown.append(f"{times} {name} {list(layout.shape)} {layout.dtype}{where}")
    more = f"; and {len(sizes) - most} more" if len(sizes) > most else ""
    return "; ".join(shown) + more


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


def shares_of(tensors: Iterable[Storage]) -> dict[Storage, tuple[int, int]]:
    """What each tensor with an address takes with its first use, and gives back with its last.

    Bytes per partition (SBUF) or banks (PSUM) that no other live tensor with an address covers.
    """
    placed = [s for s in tensors if s.address is not None and s.first >= 0]
    events = [(s.first, 0, s) for s in placed] + [(s.last, 1, s) for s in placed]
    shares: dict[Storage, tuple[int, int]] = {}
    live: dict[MemoryRegion, list[Storage]] = defaultdict(list)
    for _, ends, s in sorted(events, key=itemgetter(0, 1)):
        others = live[s.memory]
        if ends:
            others.remove(s)
        share = covered([*others, s]) - covered(others)
        if ends:
            shares[s] = shares[s][0], share
        else:
            others.append(s)
            shares[s] = share, 0
    return shares


def covered(placed: list[Storage]) -> int:
    """Bytes per partition (SBUF) or banks (PSUM) that tensors with addresses cover together."""
    total = end = 0
    for s in sorted(placed, key=lambda s: s.address[1] if s.address else 0):
        start = s.address[1] if s.address else 0
        size = s.bytes
        if s.memory is MemoryRegion.psum:
            start, size = start // PSUM_BANK_BYTES, s.layout.size
        stop = start + size
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
