"""Whether a regular expression may take for ever: records and files of others bring theirs."""

from collections.abc import Iterator
from re import _constants, _parser  # pyright: ignore  (Python has no public parser)
from typing import Any

MOST_REPEATS = 4
_LOOPS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


def takes_for_ever(pattern: str) -> bool:
    """Say whether a valid pattern has too many repetitions of no fixed length, or nests them.

    Matching a name of n characters takes at most n**MOST_REPEATS steps otherwise.
    """
    depths = list(_choices(_parser.parse(pattern), depth=0))
    return len(depths) > MOST_REPEATS or any(depth > 0 for depth in depths)


def _choices(items: Any, depth: int) -> Iterator[int]:
    """Yield for each repetition, and each set of alternatives in one, how many are around it."""
    for kind, value in items:
        inner = depth
        if kind in _LOOPS:
            low, high, _ = value
            if low != high:
                yield depth
            inner += high > 1
        elif kind is _constants.BRANCH and depth:
            yield depth
        for part in _parts(value):
            yield from _choices(part, inner)


def _parts(value: Any) -> Iterator[Any]:
    """Yield the sub-patterns of an item's value."""
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _parts(part)
