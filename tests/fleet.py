"""Some processes that work together, forked from one that has imported everything.

`python fleet.py DIRECTORY COUNT CODE [ARGUMENT ...]` runs the code in each of them, with what
`torchrun` would put in the environment, and writes what worker i prints to `DIRECTORY/i.out` and
`i.err`. It prints the exit codes, that of a signal negative. As `torchrun` does, it keeps the
store in which workers meet; with AGENT=0 worker 0 does, as under other launchers.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

CLI = "import sys; from neuronmm_ops.cli import main; sys.exit(main(sys.argv[1:]))"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def run_fleet(
    directory: Path, count: int, code: str = CLI, *arguments: object, agent: bool = True
) -> list[Outcome]:
    """Return what came of each worker."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, __file__, directory, count, code, *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["AGENT"] = str(int(agent))
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=environment,
    )
    texts = [
        [(directory / f"{index}.{kind}").read_text() for kind in ("out", "err")]
        for index in range(count)
    ]
    codes = json.loads(done.stdout)
    return [Outcome(code, *text) for code, text in zip(codes, texts, strict=True)]


def _work(directory: str, index: int, count: int, port: int, code: str) -> None:
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{directory}/{index}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.environ |= {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if os.environ["AGENT"] == "1":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        exec(compile(code, "worker", "exec"), {"__name__": "__main__"})  # noqa: S102
        end = 0
    except SystemExit as stop:
        end = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        end = 70
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(end)


def _main() -> None:
    directory, count, code, *arguments = sys.argv[1:]
    sys.argv = ["worker", *arguments]
    import torch
    from torch.distributed import TCPStore  # pyright: ignore  (exported without being named)

    for name in ("neuronmm_ops.cli", "neuronmm_ops.hf"):
        importlib.import_module(name)

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids: list[int] = []
    for index in range(int(count)):
        pid = os.fork()
        if pid == 0:
            _work(directory, index, int(count), port, code)
        pids.append(pid)
    # After the forks, which take no threads along.
    store = os.environ["AGENT"] == "1" and TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False
    )
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
    print(json.dumps([codes[pid] for pid in pids]))
    del store


if __name__ == "__main__":
    _main()
