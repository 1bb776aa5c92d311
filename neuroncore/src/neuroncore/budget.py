"""What a simulated kernel may use of this machine: a loop without an end ends here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuroncore.checks.base import PACKAGE, NkiValidationError, placed

if TYPE_CHECKING:
    from neuroncore.core import KernelRun

_LOOK_S = 0.05
_INSIST_S = 1.0


@dataclass(frozen=True)
class Budget:
    """Bounds of one run of a kernel, for all of its cores; one that is met refuses the kernel.

    Attributes:
        instructions: that the kernel issues, and as many tensors that it makes. The default is
            where the Neuron compiler gives up (aws-neuron-sdk issue 987, NCC_EBVF030).
        seconds: of wall time in the kernel's code; scheduling comes after.
        bytes: of values that its tensors hold here, in mode "execute"; None is this machine's
            memory.
    """

    instructions: int = 5_000_000
    seconds: float = 600.0
    bytes: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a bound that nothing meets."""
        for name in ("instructions", "seconds", "bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"budget: {name} must be positive; got {value}")

    @property
    def memory_bytes(self) -> int:
        """The bound of `bytes`."""
        if self.bytes is not None:
            return self.bytes
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _OverBudgetError(BaseException):
    """Stops the kernel's thread; a kernel that catches `Exception` does not catch it."""


@contextlib.contextmanager
def within(budget: Budget, launch: KernelRun) -> Generator[None]:
    """Run a block, in which the launch runs, within its budget.

    Raises NkiValidationError, with the kernel's line where one core runs, when it is exceeded.
    """
    watch = _Watch(budget, launch)
    watch.start()
    try:
        try:
            yield
        finally:
            watch.stop()
    except (_OverBudgetError, KeyboardInterrupt) as stopped:
        watch.stop()  # the exception may have come inside the first call
        if not watch.problem:  # Ctrl-C
            raise
        raise _placed(watch.problem, stopped) from None


class _Watch(threading.Thread):
    """Looks at a launch again and again, and raises in the thread that started it.

    A check an instruction would cost every kernel time; a thread costs none.
    """

    def __init__(self, budget: Budget, launch: KernelRun) -> None:
        super().__init__(daemon=True, name="neuroncore budget")
        self.budget, self.launch = budget, launch
        self.problem = ""
        self._is_woken = False
        self._kernel = ctypes.c_ulong(threading.get_ident())
        self._end = time.monotonic() + budget.seconds
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self) -> None:
        """Look until the block is over; insist where the kernel goes on."""
        pause = _LOOK_S
        while not self._over.wait(pause):
            is_late = bool(self.problem)
            self.problem = self.problem or self._exceeded()
            if self.problem:
                pause = _INSIST_S
                with self._lock:
                    if not self._over.is_set():
                        self._interrupt(is_late)

    def _interrupt(self, is_late: bool) -> None:
        if is_late and self._kernel.value == threading.main_thread().ident:
            # It may sleep, and only a signal ends a system call.
            _raise_in(self._kernel, None)
            self._is_woken = True
            signal.pthread_kill(self._kernel.value, signal.SIGINT)
        else:
            _raise_in(self._kernel, _OverBudgetError)

    def stop(self) -> None:
        """End the thread, and take back what it raised and has not arrived."""
        with self._lock:
            self._over.set()
        self.join()
        if self.problem:
            # One that is waited for has arrived, and took the place of one that had not. Taken back
            # by NULL, it would leave the interpreter's flag set: slow, and under a tracer or
            # profiler of Python 3.11 a loop without an end.
            with contextlib.suppress(_OverBudgetError):
                _raise_in(self._kernel, _OverBudgetError)
                while True:
                    time.sleep(0)
        if self._is_woken:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0)  # where a signal on its way arrives

    def _exceeded(self) -> str:
        """Which bound is exceeded, in words."""
        budget = self.budget
        traces = [core.trace for core in self.launch.cores]
        for what, count in (
            ("instructions", sum(len(trace.records) for trace in traces)),
            ("tensors", sum(len(trace.storages) for trace in traces)),
        ):
            if count > budget.instructions:
                return (
                    f"the kernel has more than {budget.instructions:,} {what} and was stopped; the "
                    "compiler would refuse it: use a loop of the device, smaller inputs, or a "
                    "larger budget (--max-instructions)"
                )
        if time.monotonic() > self._end:
            return (
                f"the kernel ran for more than {budget.seconds:g} s and was stopped; look for a "
                "loop without an end, or set a larger budget (--max-seconds)"
            )
        return ""


def _raise_in(thread: ctypes.c_ulong, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, kind and ctypes.py_object(kind))


def _placed(problem: str, stopped: BaseException) -> NkiValidationError:
    """The problem at the kernel's innermost line on the way to an exception, if there is one."""
    import numpy as np  # not above: `neuroncore simulate --help` reads the bounds

    libraries = (PACKAGE, threading.__file__, *map(str, np.__path__))
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(stopped.__traceback__)
        if not frame.f_code.co_filename.startswith(libraries)
    ]
    return placed(problem, *frames[-1]) if frames else NkiValidationError(problem)
