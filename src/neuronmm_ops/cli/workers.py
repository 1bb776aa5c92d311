"""One command on the many workers that `torchrun` starts: they meet, and one of them speaks.

What ended first ends all: its line is printed once, and every worker has its exit code.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuroncore.cli.console import fail
from neuronmm_ops.errors import WorkerLostError
from neuronmm_ops.processes import is_running

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# Commands whose workers divide the model among them.
DIVIDING = ("generate", "eval")
# A worker that has lost another waits so long for those that are left to say that they are there.
GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class _Job:
    store: Store
    index: int
    count: int


_job: _Job | None = None


def launched() -> int:
    """Return how many workers a launcher has started; 1 where there is none."""
    try:
        return max(1, int(os.environ["WORLD_SIZE"])) if "RANK" in os.environ else 1
    except (KeyError, ValueError):
        return 1


@contextmanager
def quiet() -> Generator[None]:
    """Let no worker but the first print anything in a block."""
    rank = os.environ.get("RANK", "")
    if not rank.isdecimal() or int(rank) not in range(1, launched()):
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def joined(options: argparse.Namespace) -> Generator[None]:
    """Let a command's workers meet and share the work of a block, each on a device of its own.

    `compress` shares the matrices, `generate` and `eval` the model. After an error the group is
    left open: ending it could wait for a worker that is gone.

    Raises:
        ValueError: the command is one for a single process, or all workers were given one device.
        WorkerLostError: another worker has ended.
    """
    global _job
    if launched() == 1:
        yield
        return
    if options.command not in ("compress", *DIVIDING):
        raise ValueError(f"{options.command} runs in one process; start it without torchrun")
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from neuronmm_ops.compress import workers

    _check_launcher()
    store, index, count = next(rendezvous("env://"))
    _job = _Job(PrefixStore("neuronmm", store), index, count)
    _job.store.set(f"process {index}", json.dumps([socket.gethostname(), os.getpid()]))
    options.device = _own_device(options.device or "cpu")
    dist.init_process_group(_backend(options.device), store=store, rank=index, world_size=count)
    with _divided() if options.command in DIVIDING else workers.together():
        yield
    dist.destroy_process_group()
    _job = None


def _check_launcher() -> None:
    """Refuse what no launcher sets, for which workers would wait for ever."""
    rank, port = (os.environ.get(name, "") for name in ("RANK", "MASTER_PORT"))
    if not rank.isdecimal() or int(rank) >= launched():
        raise ValueError(
            f"RANK must be a number below WORLD_SIZE, {launched()}, got {rank!r}; start by torchrun"
        )
    if not port.isdecimal() or not 0 < int(port) < 2**16 or not os.environ.get("MASTER_ADDR"):
        raise ValueError(
            f"MASTER_ADDR and MASTER_PORT must say where workers meet, got {port!r}; "
            "start with torchrun"
        )


@contextmanager
def _divided() -> Generator[None]:
    """Say that a worker is gone where an exchange inside the model fails."""
    try:
        yield
    except RuntimeError as error:
        import torch.distributed as dist

        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        raise WorkerLostError("a worker has lost another, which has ended") from error


def fail_once(message: str, code: int, is_echo: bool = False) -> int:
    """Print the line of what ended the job, once for all workers, and return the exit code.

    Args:
        message: what ended this worker.
        code: its exit code.
        is_echo: whether another's end may have been the cause, which is then what all say.
    """
    if _job is None:
        return fail("neuronmm", message, code)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):  # the launcher stops whom others outlive
            signal.signal(number, signal.SIG_IGN)
    if code in (1, 2) and not is_echo:
        message = f"worker {_job.index} of {_job.count}: {message}"
    try:
        gone, missing = _roll_call(_job) if is_echo else ([], [])
        # A connection is lost where somebody has ended; one who is told to end may be the first.
        silent = gone or (missing if code == 1 else [])
        if silent:
            names = ", ".join(map(str, silent))
            message, code = f"worker {names} of {_job.count} was killed, or does not answer", 1
        cause_here = json.dumps([_job.index, code, message])
        cause = _job.store.compare_set("cause", "", cause_here).decode()
        if cause != cause_here:
            return json.loads(cause)[1]
    except RuntimeError:
        pass  # the store was in a process that is gone: each says what it knows
    with redirect_stderr(sys.__stderr__):
        return fail("neuronmm", message, code)


def _roll_call(job: _Job) -> tuple[list[int], list[int]]:
    """Return who is gone, and who does not answer; nobody where one has said why it ended."""
    job.store.set(f"here {job.index}", "")
    end = time.monotonic() + GRACE_SECONDS
    missing = list(range(job.count))
    while missing and time.monotonic() < end:
        if job.store.check(["cause"]):
            return [], []
        missing = [index for index in missing if not job.store.check([f"here {index}"])]
        time.sleep(0.05)
    # One that computes does not answer at once either.
    return [index for index in missing if not _may_be_running(job, index)], missing


def _may_be_running(job: _Job, index: int) -> bool:
    if not job.store.check([f"process {index}"]):
        return False
    host, pid = json.loads(job.store.get(f"process {index}"))
    return host != socket.gethostname() or is_running(pid)


def _own_device(device: str) -> str:
    """Return `cuda:LOCAL_RANK` for `cuda`, and `cpu` for itself."""
    if device == "cpu":
        return device
    import torch

    if device != "cuda":
        raise ValueError(f"--device of many workers must be cpu or cuda, one each; got {device}")
    devices, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if devices < needed:
        raise ValueError(
            f"--device cuda needs a CUDA device for each of {needed} workers here, there are "
            f"{devices}; start fewer, or use cpu"
        )
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def _backend(device: str) -> str:
    """Make the device the current one; return the backend for it and for the CPU."""
    if device == "cpu":
        return "gloo"
    import torch

    torch.cuda.set_device(device)
    return "cpu:gloo,cuda:nccl"
