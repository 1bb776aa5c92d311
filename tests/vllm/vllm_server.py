"""`vllm serve` in processes of its own: bounded waits, and nothing left behind."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import psutil

START_S = 600  # a server imports torch and vLLM in three processes, one after the other
STOP_S = 60
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM would keep a core free and bind each rank to others, of which there may be none.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until the condition holds; fail with `what` where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s: {what}"
        time.sleep(0.1)


def free_port() -> int:
    """One below those that the system hands out: it takes a server half a minute to bind it."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports are taken")


class Server:
    """One `vllm serve`, started at once; `wait_until_ready` before the first request."""

    def __init__(self, directory: Path, log: Path, *options: str) -> None:
        port = free_port()
        self.model = directory.name
        self.address = f"http://127.0.0.1:{port}"
        self.log = log
        command = [
            *(Path(sys.executable).with_name("vllm"), "serve", directory),
            *("--host", "127.0.0.1", "--port", port, "--served-model-name", self.model),
            *options,
        ]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | SETTINGS,
                start_new_session=True,
            )
        self.known: set[psutil.Process] = set()
        self.client = openai.OpenAI(
            base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120
        )

    def text(self) -> str:
        """What the server has printed."""
        return self.log.read_text(errors="replace")

    def is_healthy(self) -> bool:
        """Whether it answers; fails where it has ended."""
        assert self.process.poll() is None, self.text()[-5000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.address}/health", timeout=5).status_code == 200
        return False

    def wait_until_ready(self) -> "Server":
        wait_for(self.is_healthy, START_S, f"not ready: {self.text()[-5000:]}")
        self.processes()
        return self

    def wait_for_exit(self, seconds: float) -> int:
        """The exit status; fails where it does not end in time, or leaves a process behind."""
        status = self.process.wait(seconds)
        wait_for(lambda: not self.alive(), STOP_S, f"left behind: {self.alive()}")
        return status

    def processes(self) -> list[psutil.Process]:
        """The server's children and theirs, remembered so that orphans are found later."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.known |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.alive()

    def alive(self) -> list[psutil.Process]:
        """Those of them that still run."""
        alive = []
        for process in self.known:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def named(self, title: str) -> list[psutil.Process]:
        """The processes that call themselves so, `VLLM::EngineCore` or `VLLM::Worker`."""
        return [p for p in self.processes() if any(title in part for part in p.cmdline())]

    def stop(self) -> None:
        """End it as Ctrl-C does, and fail where it does not end clean; kill what is left."""
        try:
            if self.process.poll() is None:
                self.processes()
                self.process.send_signal(signal.SIGINT)
                assert self.wait_for_exit(STOP_S) == 0, self.text()[-5000:]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for process in self.alive():
                process.kill()
