"""All faults, in the order of the table."""

from collections.abc import Iterator
from pathlib import Path

import kinds_of_files
import kinds_of_machines
import kinds_of_requests
from harness import Fault

SOURCES = (kinds_of_files, kinds_of_requests, kinds_of_machines)


def all_faults(place: Path) -> list[Fault]:
    """Return every fault, each with a name of its own within its kind."""

    def each() -> Iterator[Fault]:
        for source in SOURCES:
            yield from source.faults(place)

    found = list(each())
    assert len({(fault.kind, fault.name) for fault in found}) == len(found)
    return found
