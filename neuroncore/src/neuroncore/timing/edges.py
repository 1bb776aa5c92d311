"""`Kernel.with_schedule`: an order among named instructions (NKI 0.6, scheduling APIs)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from neuroncore.checks.base import NkiValidationError
from neuroncore.timing.trace import Trace

Edges = tuple[tuple[str, str], ...]
"""Names of a later and an earlier instruction each."""


def edges_of(schedule: Iterable[tuple[str, str | Sequence[str]]]) -> Edges:
    """One edge per pair of names; an earlier side that is a list stands for several pairs."""
    edges: list[tuple[str, str]] = []
    pair: Any
    for pair in schedule if isinstance(schedule, Iterable) else (schedule,):
        names = pair[1:] if isinstance(pair, list | tuple) and len(pair) == 2 else ()
        earlier = [n for side in names for n in ([side] if isinstance(side, str) else side)]
        if not names or not all(isinstance(n, str) for n in (pair[0], *earlier)):
            raise NkiValidationError(
                'with_schedule: each entry is ("later", "earlier") or ("later", ["earlier", ...]), '
                f"names of instructions; got {pair!r}"
            )
        edges += [(pair[0], name) for name in earlier]
    return tuple(edges)


def apply_edges(trace: Trace, edges: Edges) -> None:
    """Make each later instruction of a trace wait for the earlier one.

    Raises NkiValidationError where a name is that of no or of several instructions, or where the
    earlier one is issued after the later one: engines run in program order.
    """
    for later, earlier in edges:
        i, j = _index(trace, later), _index(trace, earlier)
        if j >= i:
            raise NkiValidationError(
                f"with_schedule: {later!r} cannot wait for {earlier!r}, which is issued "
                f"{'later' if j > i else 'as the same instruction'}; simulated engines run in "
                f"program order: issue {earlier!r} first"
            )
        trace.edges.setdefault(i, []).append(j)


def _index(trace: Trace, name: str) -> int:
    named = trace.names.get(name, [])
    if len(named) != 1:
        known = ", ".join(map(repr, list(trace.names)[:8])) or "none"
        raise NkiValidationError(
            f"with_schedule: {len(named)} instructions are named {name!r}, one must be; give each "
            f"its own name=; named are {known}"
        )
    return named[0]
