"""Programs that must succeed."""

import os
import socket
import subprocess


def run(*command: object, **environment: object) -> str:
    """Return what a command prints, and fail the test with all of it if the command fails."""
    parts = [str(part) for part in command]
    env = os.environ | {name: str(value) for name, value in environment.items()}
    result = subprocess.run(parts, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def one_worker() -> dict[str, str]:
    """The environment of a worker that torchrun starts alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
