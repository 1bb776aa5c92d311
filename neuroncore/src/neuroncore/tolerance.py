"""Running on after a refused instruction, so that one run finds more than one mistake."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator
from operator import index as as_int
from typing import Any

from neuroncore import isa
from neuroncore.checks import views
from neuroncore.checks.base import NkiValidationError
from neuroncore.core import active
from neuroncore.memory.tensor import NkiTensor
from neuroncore.timing.trace import NkiInstruction

_ENDS = ("core_barrier", "sendrecv", "nonzero_with_count", "sequence_bounds")
"""After which nothing is plain: what waits for another core, and what makes sizes."""

_OF_A_LINE = 8


@contextlib.contextmanager
def running_on(refused: list[NkiValidationError]) -> Generator[None]:
    """In the block, collect what instructions and indices refuse, and run on.

    A refused instruction is left out, and all of its tensors count as written; an index out of
    bounds takes as many elements as it names, at the end of its dimension. What comes after may
    follow from that. Functions of `nki.language` and collectives still end the run.
    """
    with contextlib.ExitStack() as stack:
        for name in isa.__all__:
            issue = getattr(isa, name)
            if inspect.isfunction(issue) and name not in _ENDS and "dst" in _names(issue):
                _replace(stack, isa, name, _left_out(issue, refused))
        for name, inside in (("slice_of", _last_slice), ("index_of", _last_index)):
            _replace(stack, views, name, _moved_in(getattr(views, name), inside, refused))
        yield


def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _replace(stack: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    stack.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _keep(error: NkiValidationError, refused: list[NkiValidationError]) -> None:
    """Add an error without its frames, which hold tensors; of a loop's the first few."""
    if sum(known.place == error.place for known in refused) < _OF_A_LINE:
        refused.append(error.with_traceback(None))


def _left_out(issue: Callable[..., Any], refused: list[NkiValidationError]) -> Callable[..., Any]:
    @functools.wraps(issue)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        try:
            return issue(*args, **kwargs)
        except NkiValidationError as error:
            _keep(error, refused)
        for value in (*args, *kwargs.values()):
            if isinstance(value, NkiTensor):
                value.storage.initialised = True
        trace = active().trace
        return NkiInstruction(trace, max(0, len(trace.records) - 1))

    return attempt


def _moved_in(
    check: Callable[..., Any], inside: Callable[[int, Any], Any], refused: list[NkiValidationError]
) -> Callable[..., Any]:
    @functools.wraps(check)
    def attempt(t: NkiTensor, dim: int, k: Any) -> Any:
        try:
            return check(t, dim, k)
        except NkiValidationError as error:
            moved = inside(t.shape[dim], k)
            if moved is None:
                raise
            _keep(error, refused)
            return moved

    return attempt


def _last_slice(size: int, k: slice) -> tuple[int, int, int] | None:
    """Start, stop and step of as many elements at the end; None where so many there are not."""
    start, stop = (as_int(k.start or 0), size if k.stop is None else as_int(k.stop))
    count = stop - start
    return (size - count, size, k.step or 1) if start >= 0 and 0 < count <= size else None


def _last_index(size: int, k: Any) -> int | None:
    return size - 1 if isinstance(k, int) else None
