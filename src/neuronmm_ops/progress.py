"""The progress of long work, on stderr: bars on a terminal, lines of text elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS_BETWEEN_LINES = 5.0


class Update(Protocol):
    """Takes a stage, its units done, its units in all, and a note such as a loss."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...  # noqa: D102


def named(
    progress: Callable[[str, int, int], None] | None, name: str
) -> Callable[[str, int, int], None] | None:
    """Return a function that tells `progress`, where there is one, of stages `STAGE NAME`."""
    if progress is None:
        return None
    return lambda stage, done, total: progress(f"{stage} {name}", done, total)


@contextlib.contextmanager
def progress_bars() -> Generator[Update, None, None]:
    """Yield a function that shows how far each stage has come.

    On a terminal every stage is a bar. Elsewhere (a pipe, a log) lines are printed instead, at
    least `SECONDS_BETWEEN_LINES` apart: `train 40/320, loss 5.12, 30 s, 210 s left`. The times
    are the stage's, without what other stages took meanwhile. What takes less time prints nothing.
    A stage whose units fall begins anew. In a notebook a line below the cell is replaced.
    """
    if in_notebook():
        yield _Cell()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

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


def in_notebook() -> bool:
    """Whether the process is a notebook's kernel, which shows what it is given to display."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class _Cell:
    """A line of text in a notebook, replaced at every call; needs no widgets."""

    _handle: Any = None

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        from IPython.display import display  # pyright: ignore[reportUnknownVariableType]

        shown = {"text/plain": f"{stage} {done}/{total} {note}".rstrip()}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


class _Bars:
    def __init__(self, bars: "Progress") -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, note=note)
        elif done < self._bars.tasks[self._tasks[stage]].completed:
            self._bars.reset(self._tasks[stage], note=note)
        self._bars.update(self._tasks[stage], completed=done, total=total, note=note)


@dataclass
class _Stage:
    """A stage's units done and its seconds, now and when it was first told of."""

    done: int
    seconds: float
    first_done: int
    first_seconds: float
    is_shown: bool = False

    @classmethod
    def begin(cls, done: int, seconds: float) -> "_Stage":
        """Begin with the units of the first call, and the time since the call before it."""
        seconds = seconds if done else 0.0
        return cls(done, seconds, done, seconds)

    def seconds_left(self, total: int) -> float | None:
        """Return the seconds to come at the pace since the first call; None where it is unknown."""
        # The first call of a resumed run counts units that took none of these seconds.
        units = self.done - self.first_done
        if not units or self.done >= total:
            return None
        return (self.seconds - self.first_seconds) / units * (total - self.done)


class _Lines:
    def __init__(self) -> None:
        self._stages: dict[str, _Stage] = {}
        self._called = self._printed = monotonic()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        now = monotonic()
        # A call comes after the work: the time since the last one, of whichever stage, is its.
        seconds, self._called = now - self._called, now
        known = self._stages.get(stage)
        if known is None or done < known.done:
            known = self._stages[stage] = _Stage.begin(done, seconds)
        else:
            known.done, known.seconds = done, known.seconds + seconds
        is_end = done == total and known.is_shown
        if not is_end and now - self._printed < SECONDS_BETWEEN_LINES:
            return
        self._printed, known.is_shown = now, True
        left = known.seconds_left(total)
        parts = [f"{stage} {done}/{total}", note, f"{known.seconds:.0f} s"]
        if left is not None:
            parts.append(f"{left:.0f} s left")
        print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)
