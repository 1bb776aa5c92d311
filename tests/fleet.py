"""Processes that work together, forked from one that has imported everything.

Run as a program it reads requests from stdin, one JSON object a line, and answers each with the
exit codes of the processes, that of a signal negative. What worker i prints is in `DIRECTORY/i.out`
and `i.err`. As `torchrun` does, the program keeps the store in which workers meet.
"""

import atexit
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

CLI = "import sys; from neuronmm_ops.cli import main; sys.exit(main(sys.argv[1:]))"
LIMIT_SECONDS = 300


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def run_fleet(
    directory: Path, count: int, code: str = CLI, *arguments: object, agent: bool = True
) -> list[Outcome]:
    """Run code in some workers and return what came of each.

    Args:
        directory: for what they print.
        count: of workers.
        code: Python source that each runs.
        arguments: its `sys.argv[1:]`.
        agent: whether the launcher keeps the store; else worker 0 does, as under other launchers.
    """
    directory.mkdir(exist_ok=True)
    request = {
        "directory": str(directory),
        "count": count,
        "code": code,
        "arguments": [str(argument) for argument in arguments],
        "agent": agent,
        "path": sys.path,
    }
    server = _server()
    assert server.stdin
    assert server.stdout
    print(json.dumps(request), file=server.stdin, flush=True)
    codes = json.loads(server.stdout.readline())
    texts = [
        [(directory / f"{index}.{kind}").read_text() for kind in ("out", "err")]
        for index in range(count)
    ]
    return [Outcome(code, *text) for code, text in zip(codes, texts, strict=True)]


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    command = [sys.executable, __file__]
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    atexit.register(server.communicate)  # ends it: there are no more requests
    return server


def _main() -> None:
    for name in ("torch.distributed", "neuronmm_ops.cli", "neuronmm_ops.hf"):
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(request: dict[str, Any]) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids: list[int] = []
    for index in range(request["count"]):
        pid = os.fork()
        if pid == 0:
            _work(request, index, port)
        pids.append(pid)
    # After the forks, which would take none of its threads along.
    store = request["agent"] and importlib.import_module("torch.distributed").TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False
    )
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
    del store
    return [codes[pid] for pid in pids]


def _work(request: dict[str, Any], index: int, port: int) -> NoReturn:
    signal.alarm(LIMIT_SECONDS)
    for number, kind in ((1, "out"), (2, "err")):
        path = f"{request['directory']}/{index}.{kind}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.path[:] = request["path"]
    sys.argv = ["worker", *request["arguments"]]
    os.environ |= {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(request["count"]),
        "LOCAL_WORLD_SIZE": str(request["count"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(request["agent"]),
    }
    try:
        exec(compile(request["code"], "worker", "exec"), {"__name__": "__main__"})  # noqa: S102
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 70
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
