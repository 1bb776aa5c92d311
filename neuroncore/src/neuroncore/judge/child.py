"""The process that a submission runs in: limits first, then its code; programs come out.

`python -I child.py` reads a request from stdin, and writes one line of JSON for each of its cases.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

_REFUSED = (
    *("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system"),
    *(
        "os.kill",
        "os.ch",
        "os.link",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.symlink",
    ),
    *("os.truncate", "os.utime", "os.setxattr", "shutil.", "tempfile.", "signal.", "resource."),
    *("gc.get_", "ctypes.", "mmap.", "fcntl.", "pty.", "sqlite3.", "sys.addaudithook"),
    "cpython.PyInterpreterState_New",
)
"""Beginnings of the names of audit events (PEP 578) that a kernel has no use for."""
_MODULES = ("_posixsubprocess", "posix", "_posixshmem", "_multiprocessing", "_dbm", "_gdbm")
_SILENT = ("fork_exec", "_fork_exec", "mkfifo", "mknod")
"""Modules that can do what no event names, and what imported ones can."""
_READS = {"open", "os.listdir", "os.scandir", "ctypes.dlopen"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MORE_THREADS = 64


class RefusedError(Exception):
    """A submission uses more of the machine than its core."""


def audit(readable: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that refuses network, processes, and files but for reading below some folders.

    What it needs is in its cells: a traceback shows the submission the names of this module.
    """
    beginnings, reads, writes, problem = _REFUSED, _READS, _WRITES, RefusedError
    modules, missing, text, number = _MODULES, ImportError, str, int
    code = ("object.__setattr__", ("__code__",))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in reads:
            path, flags = args[0], args[-1] if event == "open" else 0
            if path.__class__ is number and event == "open":  # open already
                return
            known = (
                path.__class__ is text and "/../" not in path and f"{path}/".startswith(readable)
            )
            if flags & writes or not known:
                raise problem(f"opens {path!r:.200}: it may read its libraries and write nothing")
        elif event == "import" and args[0] in modules:
            raise missing(f"{args[0]} is not for kernels: they use nothing but their core")
        elif event.startswith(beginnings) or (event, args[1:2]) == code:
            raise problem(f"does {event}: it may use nothing of this machine but its core")

    return hook


def limit(seconds: float, memory: int) -> None:
    """Bound this process: CPU time, address space, the size of files; threads where that works."""
    cpu = int(seconds) + 1
    bounds = {"CPU": (cpu, cpu + 1), "AS": (memory, memory), "FSIZE": (0, 0), "CORE": (0, 0)}
    for name, both in bounds.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), both)
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (_threads() + _MORE_THREADS, before[1]))
    try:
        threading.Thread(target=int).start()
    except RuntimeError:  # the user has others, which this container does not show
        resource.setrlimit(resource.RLIMIT_NPROC, before)


def _threads() -> int:
    """How many the user runs, which RLIMIT_NPROC counts."""
    count = 0
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{process}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{process}/task"))
    return count


def main() -> None:
    """Answer the request on stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    request = json.loads(sys.stdin.buffer.read())
    limit(request["seconds"], request["bytes"])
    sys.path[:] = request["path"]
    answer = _answerer(request)
    for case in request["cases"]:
        answers.write(json.dumps(answer(case)) + "\n")
        answers.flush()
    os._exit(0)  # without what the submission asked to run at exit


def _answerer(request: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load the submission; returns what traces its kernel for one case."""
    import _posixsubprocess
    import ctypes
    import linecache
    import posix
    import subprocess
    import types
    import warnings

    from neuroncore import Budget, NkiWarning, TensorSpec, install
    from neuroncore import kernel as kernels
    from neuroncore.boundary import PerRank
    from neuroncore.cli.files import FunctionPath, Path, kernel_of, reported
    from neuroncore.dtypes import dtype_of
    from neuroncore.judge.program import Recorder

    install()
    recorder, launched = Recorder(request["instructions"]), []
    kernels.observers[:] = [launched.append]
    source, place = request["source"], FunctionPath(Path(request["file"]), request["name"])
    budget = Budget(seconds=request["seconds"], bytes=request["bytes"])
    settings = kernels.RunSettings(
        request["target"], "trace", ranks=request["ranks"], budget=budget
    )
    module = types.ModuleType(place.path.stem)
    vars(module)["__file__"] = str(place.path)
    sys.modules.setdefault(module.__name__, module)
    linecache.cache[str(place.path)] = len(source), None, source.splitlines(True), str(place.path)
    # Functions of C libraries that the simulator looks up late, and the hook refuses.
    _ = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for each in (os, posix, subprocess, _posixsubprocess):
        for name in _SILENT:
            each.__dict__.pop(name, None)
    blas = kernels._blas()  # pyright: ignore[reportPrivateUsage]
    kernels._blas_of = lambda modules: blas  # pyright: ignore
    kernels.run(kernels.Kernel(lambda: None), (), {}, settings)
    launched.clear()
    folders = [*request["folders"], *map(os.path.realpath, request["folders"])]
    sys.addaudithook(audit(tuple({f"{folder.rstrip('/')}/" for folder in folders})))

    def attempt(step: Callable[[], Any]) -> Any:
        try:
            with reported(place.path), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", NkiWarning)
                done = step() or {}
            told = [f"{w.message} [{os.path.basename(w.filename)}:{w.lineno}]" for w in caught]
            return {**done, "warnings": sorted(set(told))}
        except BaseException as error:
            return {"refused": str(error) or type(error).__name__}

    def spec(dtype: str, shapes: list[Any]) -> Any:
        specs = [TensorSpec(tuple(shape), dtype_of(dtype)) for shape in shapes]
        return specs[0] if request["ranks"] is None else PerRank(specs)

    def trace(case: dict[str, Any]) -> dict[str, Any]:
        kernel = recorder.recorded(kernel_of(module, place), request["lnc"])
        arguments = [spec(*value) for value in case.values()]
        try:
            inspect.signature(kernel.func).bind(*arguments)
        except TypeError as error:
            raise TypeError(f"the kernel must take ({', '.join(case)}): {error}") from None
        kernels.run(kernel, tuple(arguments), {}, settings)
        return recorder.document(launched.pop().launch.cores)

    def load() -> None:
        exec(compile(source, str(place.path), "exec", dont_inherit=True), vars(module))  # noqa: S102

    loaded = attempt(load)
    return lambda case: loaded if "refused" in loaded else attempt(lambda: trace(case))


if __name__ == "__main__":
    main()
