"""Cores that take turns, each in a thread: one runs until it must wait for others at a meeting."""

from __future__ import annotations

import ctypes
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from neuroncore.checks.base import refuse

Posts = dict[int, Any]

# An interrupt is raised this often in a core's thread, which may catch it, and so many seconds
# apart: before the watch of the budget insists, which takes a second.
_INTERRUPTS, _INTERRUPT_S = 3, 0.25


class Meeting:
    """A point that some cores reach before any of them goes on.

    Args:
        members: numbers of the cores.
    """

    __slots__ = ("members", "met", "ns", "posts")

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.posts: Posts = {}
        self.met = False
        self.ns = 0.0
        """Modelled time from when the last core comes until all go on."""


class Turns:
    """Runs one function per core, one at a time, in the order of their numbers.

    Args:
        count: how many cores.
        taken: called with a core's number, in its thread, whenever its turn begins.
        draw: chooses who is next, also before each instruction; None for the order of numbers.
    """

    def __init__(
        self, count: int, taken: Callable[[int], None], draw: random.Random | None = None
    ) -> None:
        self._taken = taken
        self.draw = draw if count > 1 else None
        self._condition = threading.Condition()
        self._running = -1  # nobody before all have started
        self._ended = [False] * count
        self._waits: list[Meeting | None] = [None] * count
        self._open: dict[tuple[int, ...], Meeting] = {}
        self._failure: BaseException | None = None

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """`body(number)` of every core, and their results; raises what the first of them raised.

        An interrupt, which comes to the caller's thread, is handed to the running core's. One that
        sleeps in a system call cannot be woken: its thread is left behind.
        """
        results: list[Any] = [None] * len(self._ended)

        def thread(me: int) -> None:
            try:
                self._await_turn(me)
                with np.errstate(all="ignore"):  # a thread has its own
                    results[me] = body(me)
            except BaseException as error:  # handed to the caller's thread
                self._failure = self._failure or error
            finally:
                self._ended[me] = True
                self._pass_turn(me)

        threads = [
            threading.Thread(target=thread, args=(i,), daemon=True) for i in range(len(results))
        ]
        try:
            for t in threads:
                t.start()
            self._begin()
            self._await_all(threads)
        except BaseException as interrupt:
            self._interrupt(threads, interrupt)
        for t, ended in zip(threads, self._ended, strict=True):
            if ended:
                t.join()
        if self._failure is not None:
            raise self._failure
        return results

    def meet(
        self, me: int, members: tuple[int, ...], post: Any, act: Callable[[Posts], float]
    ) -> Meeting:
        """Bring `post` and wait until all members are there.

        The last one to come calls `act` with the posts of all, by number; it returns the modelled
        time of what the members do together, in ns.
        """
        meeting = self._open.get(members)
        if meeting is None:
            meeting = self._open[members] = Meeting(members)
        meeting.posts[me] = post
        if len(meeting.posts) == len(members):
            del self._open[members]
            meeting.met = True
            meeting.ns = act(meeting.posts)
            meeting.posts = {}
            return meeting
        self._waits[me] = meeting
        self._pass_turn(me)
        self._await_turn(me)
        self._waits[me] = None
        if not meeting.met:
            absent = ", ".join([str(m) for m in members if m not in meeting.posts])
            ended = any(self._ended[m] for m in members)
            refuse(
                f"{post[0]}: core {me} waits but core {absent} "
                f"{'has ended' if ended else 'waits elsewhere'}; all cores that meet must take "
                "the same branches"
            )
        return meeting

    def step(self, me: int) -> None:
        """Before an instruction, where the order is drawn: any core that can go on is next."""
        self._pass_turn(me)
        self._await_turn(me)

    def _begin(self) -> None:
        with self._condition:
            self._running = 0
            self._condition.notify_all()

    def _interrupt(self, threads: list[threading.Thread], interrupt: BaseException) -> None:
        """Raise the interrupt in the running core, some times; the others end with it."""
        kind = ctypes.py_object(type(interrupt))
        for _ in range(_INTERRUPTS):
            if self._running >= 0 and self._failure is None:
                ident = ctypes.c_ulong(threads[self._running].ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)
            self._await_all(threads, _INTERRUPT_S)
        self._failure = self._failure or interrupt
        self._await_all(threads, _INTERRUPT_S)

    def _await_all(self, threads: list[threading.Thread], seconds: float = math.inf) -> None:
        """Until no core runs. (An interrupted Thread.join takes its thread for ended.)"""
        end = time.monotonic() + seconds
        with self._condition:
            self._condition.notify_all()
            while any(t.is_alive() and not self._ended[i] for i, t in enumerate(threads)):
                if time.monotonic() > end:
                    return
                self._condition.wait(0.1)

    def _pass_turn(self, me: int) -> None:
        """To the next core that can go on; where none can, to one that waits, which says so."""
        count = len(self._ended)
        left = [i % count for i in range(me + 1, me + 1 + count) if not self._ended[i % count]]
        able = [i for i in left if (wait := self._waits[i]) is None or wait.met]
        choices = able or left
        with self._condition:
            if choices:
                self._running = self.draw.choice(choices) if self.draw else choices[0]
            self._condition.notify_all()

    def _await_turn(self, me: int) -> None:
        with self._condition:
            while self._running != me and self._failure is None:
                self._condition.wait()
        if self._failure is not None:
            raise self._failure
        self._taken(me)
