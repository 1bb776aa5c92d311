"""The progress of long work, on stderr: bars on a terminal, lines of text elsewhere."""

import contextlib
import sys
from collections.abc import Generator
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 5.0


class Update(Protocol):
    """Takes a stage, its units done, its units in all, and a note such as a loss."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...  # noqa: D102


@contextlib.contextmanager
def progress_bars() -> Generator[Update, None, None]:
    """Yield a function that shows how far each stage has come.

    On a terminal every stage is a bar. Elsewhere (a pipe, a log) lines are printed instead, at
    least `SECONDS_BETWEEN_LINES` apart: `train 40/320, loss 5.12, 30 s, 210 s left`. The times
    are the stage's. What takes less time prints nothing.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, note=note)
        self._bars.update(self._tasks[stage], completed=done, total=total, note=note)


class _Lines:
    def __init__(self) -> None:
        self._stage: str | None = None
        self._started = self._called = self._printed = monotonic()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        now = monotonic()
        if stage != self._stage:
            # The first call comes after a stage's first units: the stage began at the call before.
            self._stage, self._started = stage, self._called
        self._called = now
        elapsed = now - self._started
        is_end = done == total and self._printed > self._started
        if not is_end and now - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        parts = [f"{stage} {done}/{total}", note, f"{elapsed:.0f} s"]
        if 0 < done < total:
            parts.append(f"{elapsed / done * (total - done):.0f} s left")
        print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)
