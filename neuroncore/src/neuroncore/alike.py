"""What launches of like kernels share: layouts with the views of them, and templates.

A search runs one kernel many times with other tile sizes. Most of what is new to each launch, views
and the instructions on them, was there in one before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuroncore.memory.storage import Layout
    from neuroncore.timing.trace import InstructionTemplate


class Shared:
    """Of launches that obey the same rules.

    Attributes:
        layouts: by shape, dtype and memory.
        templates: by number of a core: by operands and options, and by what differs in HBM only.
    """

    def __init__(self) -> None:
        self.layouts: dict[tuple[Any, ...], Layout] = {}
        self.templates: defaultdict[
            int, tuple[dict[tuple[Any, ...], Any], dict[tuple[Any, ...], InstructionTemplate]]
        ] = defaultdict(lambda: ({}, {}))


class _AlikeBlock:
    known: dict[Hashable, Shared] | None = None


_block = _AlikeBlock()


@contextmanager
def alike_launches() -> Generator[None]:
    """Let launches in the block share what follows from shapes, until its end, in trace mode only.

    A rule is checked, and a warning given, where the first of them does what it speaks of.
    """
    outer, _block.known = _block.known, {}
    try:
        yield
    finally:
        _block.known = outer


def shared_by(rules: Hashable) -> Shared:
    """What launches under these rules share: nothing outside of `alike_launches`."""
    return Shared() if _block.known is None else _block.known.setdefault(rules, Shared())
