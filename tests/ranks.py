"""Runs a function on several ranks of this machine, in a process each, joined by gloo."""

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0
# Ranks are forked from a process that has imported these, which takes seconds. Tests may add others
# before the first ranks start.
PRELOADED = [
    "pytest",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "neuronmm_ops.parallel",
]


def run(
    function: Callable[..., Any], tp: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Return `function(rank, *args)` of each rank, called in the default process group of tp ranks.

    Args:
        function: of a module's top level, as pickle asks.
        tp: ranks.
        args: tensors are copied.
        timeout_s: after which every rank is killed.

    Raises:
        AssertionError: ranks raised, with their tracebacks, or ended without a result.
        TimeoutError: not every rank was done in time.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        readers: dict[Any, int] = {}
        processes: list[Any] = []
        try:
            for rank in range(tp):
                reader, writer = context.Pipe(duplex=False)
                given = (function, rank, tp, Path(directory) / "store", timeout_s, args, writer)
                process = context.Process(target=_rank, args=given, daemon=True)
                process.start()
                writer.close()
                processes.append(process)
                readers[reader] = rank
            return _results(readers, processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for reader in readers:
                reader.close()


def _results(readers: dict[Any, int], processes: list[Any], timeout_s: float) -> list[Any]:
    """Each rank's result, or the errors of the ranks that failed."""
    found: dict[int, Any] = {}
    errors: list[str] = []
    pending, end = set(readers), time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = readers[reader]
            pending.discard(reader)
            error, found[rank] = _received(reader, processes[rank])
            if error is not None:
                errors.append(f"rank {rank} {error}")
                # The others fail because of it, or it because of one that is about to say so.
                end = min(end, time.monotonic() + 1)
    if errors:
        raise AssertionError("\n".join(errors))
    if pending:
        missing = sorted(readers[reader] for reader in pending)
        raise TimeoutError(f"ranks {missing} were not done in {timeout_s:g} s")
    return [found[rank] for rank in sorted(found)]


def _received(reader: Any, process: Any) -> tuple[str | None, Any]:
    try:
        error, result = pickle.loads(reader.recv_bytes())  # noqa: S301
    except EOFError:
        process.join()
        return f"ended with exit code {process.exitcode}", None
    return None if error is None else f"raised {error}", result


def _rank(
    function: Callable[..., Any],
    rank: int,
    tp: int,
    store: Path,
    timeout_s: float,
    args: tuple[Any, ...],
    writer: Connection,
) -> None:
    """What a rank's process does."""
    torch.set_num_threads(1)
    # As torchrun starts its workers.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tp)}
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), tp),
            rank=rank,
            world_size=tp,
            timeout=timedelta(seconds=timeout_s),
        )
        document = pickle.dumps((None, function(rank, *args)))
        if dist.is_initialized():  # a function may have ended the group
            dist.barrier()
    except BaseException:
        document = pickle.dumps((traceback.format_exc(), None))
    writer.send_bytes(document)
    writer.close()
    if dist.is_initialized():
        dist.destroy_process_group()
