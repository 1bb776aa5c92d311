"""A process that holds the device, so that what hangs or crashes there ends it alone."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from neuroncore.cli.console import one_line
from neuronmm_ops.device.runners import Runner
from neuronmm_ops.measure.runner import follow_parent

END_S = 5.0
"""Seconds for a process to be gone after it was killed: one that waits for a driver may not go."""


class Worker:
    """Calls functions with a runner, in a process that is started anew after it was lost."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._lnc = 0
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def call(self, lnc: int, limit_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `function(runner, *arguments)` does, in a process for kernels on `lnc` cores.

        Raises:
            RuntimeError: what the function raised, as its first line.
            TimeoutError: it did not answer in time; its process is ended.
            ChildProcessError: its process ended by itself.
        """
        if self._process is None or lnc != self._lnc:
            self._start(lnc)
        assert self._connection is not None
        assert self._process is not None
        try:
            self._connection.send((function, arguments))
            if not self._connection.poll(limit_s):
                self.end()
                raise TimeoutError(f"no answer in {limit_s:.0f} s")
            is_done, result = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(END_S)
            code = self._process.exitcode
            self.end()
            raise ChildProcessError(f"its process ended with exit code {code}") from None
        if not is_done:
            raise RuntimeError(result)
        return result

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.join(END_S)
            self._connection.close()
        self._process = self._connection = None

    def _start(self, lnc: int) -> None:
        self.end()
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        arguments = (other, self._runner, lnc)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()  # or its end would not be seen here
        self._lnc = lnc


def _serve(connection: Connection, runner: Runner, lnc: int) -> None:
    follow_parent()
    runner.prepare(lnc)
    while True:
        function, arguments = connection.recv()
        try:
            connection.send((True, function(runner, *arguments)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {one_line(error)}"))
