"""What commands print: tables, warnings, and one line for an error."""

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

MAX_LINE = 1200


class KernelError(Exception):
    """A kernel of the user's breaks a rule or raises; the message says where."""


class Terminated(BaseException):
    """SIGTERM as an exception, so that context managers clean up."""


# What a terminal obeys or cannot encode: control characters but line break and tab, marks that turn
# the direction of text, and bytes of file names that are no text.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(value: Any) -> Any:
    """Return a text, or the document's texts, with what a terminal would obey written out."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub(lambda m: m[0].encode("unicode_escape").decode(), value)
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return list(map(printable, value)) if isinstance(value, list) else value


class _Console:
    """A console of rich's, which is imported when something is shown."""

    def __init__(self, is_error: bool) -> None:
        self._is_error = is_error

    @cached_property
    def _console(self) -> "Console":
        from rich.console import Console

        class Piped(Console):
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError  # rich would exit with 1

        # markup=False: names and messages hold square brackets of their own.
        return Piped(stderr=self._is_error, markup=False, highlight=False)

    def print(self, shown: object, is_whole: bool = False) -> None:
        """Print what is printable of a text, and other objects as rich does.

        A text's lines are broken between words where people read them, unless they are to be copied
        (`is_whole`); those of errors and of what is piped are left whole.
        """
        is_read = self._console.is_terminal and not (self._is_error or is_whole)
        self._console.print(printable(shown), soft_wrap=isinstance(shown, str) and not is_read)

    def status(self, line: str) -> "Status":
        """Show what is printable of a text while a block runs."""
        return self._console.status(printable(line))


stdout = _Console(is_error=False)
stderr = _Console(is_error=True)


def show_fields(document: dict[str, Any]) -> None:
    """Print a document, a field a line."""
    width = max(map(len, document), default=0)
    for key, value in document.items():
        print(f"{key:{width}} {value}")


def show_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object] | None],
    left: Sequence[str] = (),
    title: str | None = None,
) -> None:
    """Print a table, as narrow as its cells allow; None among the rows is a line between two.

    Columns named in `left` are aligned to the left, and fold where the terminal is too narrow.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, box=SIMPLE, collapse_padding=True, pad_edge=False)
    for column in columns:
        if column in left:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=bool(left))
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*["" if cell is None else str(cell) for cell in row])
    stdout.print(table)


def show_rows(rows: list[dict[str, Any]]) -> None:
    """Print what all rows share in one line, the rest as a table."""
    shared = {key for key in rows[0] if len({str(row[key]) for row in rows}) == 1}
    if len(rows) > 1:
        stdout.print(", ".join(f"{key} {rows[0][key]}" for key in rows[0] if key in shared))
    columns = [key for key in rows[0] if key not in shared or len(rows) == 1]
    cells = [[row[column] for column in columns] for row in rows]
    show_table(
        [column.replace("_", " ") for column in columns],
        [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in cells],
    )


def check_output(path: Path) -> None:
    """Raise ValueError where a file cannot be written, before the work that it is for."""
    if not path.resolve().parent.is_dir():
        raise ValueError(f"cannot write {path}: {path.parent} is no directory")
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a directory")
    if not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"cannot write {path}: no permission in {path.parent}")


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning, as `warnings.showwarning` does, on one line of stderr."""
    stderr.print(f"warning: {one_line(message)}")


@contextlib.contextmanager
def terminable() -> Generator[None, None, None]:
    """Raise Terminated in a block when the process gets SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not stop the clean-up
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def flushed(program: str, show: Callable[[], None]) -> int:
    """Print to stdout and flush it; return the exit code."""
    if isinstance(sys.stdout, TextIOWrapper):  # in LANG=C it cannot write every text
        with contextlib.suppress(OSError, ValueError):  # closed, which printing finds, too
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        show()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # as after `| head -1`
        _discard_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _discard_stdout()
        return fail(program, f"cannot write to stdout: {error.strerror}", 2)
    except ValueError:
        if sys.stdout is None or not sys.stdout.closed:  # as a kernel may have done
            raise
        return fail(program, "cannot write to stdout: it was closed", 2)
    return 0


def _discard_stdout() -> None:
    """Discard what the interpreter flushes to stdout at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(program: str, message: str, code: int) -> int:
    """Print one line on stderr and return the exit code."""
    with contextlib.suppress(OSError):
        print(f"{program}: {printable(message)}", file=sys.stderr)
    return code


def explain(error: BaseException) -> tuple[str, int]:
    """Return one line for the user and the exit code."""
    if isinstance(error, KernelError):
        return one_line(error), 1
    if isinstance(error, OSError) and error.strerror:
        return one_line(f"{error.filename or 'a file'}: {error.strerror}"), 2
    if isinstance(error, (ValueError, TypeError, OSError, ImportError)):
        return one_line(error), 2
    if isinstance(error, MemoryError):
        return "out of memory; use smaller tensors, or a machine with more memory", 2
    return f"internal error: {type(error).__name__}: {one_line(error)}; see it with --debug", 1


def one_line(message: object) -> str:
    """The message without line breaks, and no longer than a screen."""
    line = printable(re.sub(r"\s+", " ", str(message)).strip())
    return (
        line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"
    )
