"""Processes of their own, for what must not share memory or a crash with the command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")


def in_own_process(what: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function of a module in a fresh process, which ends with the call.

    Args:
        what: the process, for the error where it is lost.
        function: called with the arguments; they, its result and its error are pickled.
        arguments: of the function.

    Raises:
        ChildProcessError: the process was ended from outside, such as for want of memory.
        Exception: what the function raises.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()  # or its end would not be seen here
    try:
        is_done, result = receiver.recv()
        process.join()
    except EOFError:
        process.join()
        raise ChildProcessError(
            f"{what} was lost, exit code {process.exitcode}; -9 is most often too little memory"
        ) from None
    finally:
        process.kill()  # the call was interrupted: nobody waits for the result
        receiver.close()
    if not is_done:
        raise result
    return result


def _send(sender: Connection, function: Callable[..., object], arguments: Sequence[object]) -> None:
    follow_parent()
    try:
        sender.send((True, function(*arguments)))
    except Exception as error:
        error.add_note(traceback.format_exc())  # which does not travel otherwise
        sender.send((False, error))


def follow_parent() -> None:
    """Ignore SIGINT, which the parent handles by ending its workers; exit when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
