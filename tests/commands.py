"""Programs that must succeed."""

import os
import subprocess


def run(*command: object, **environment: object) -> str:
    """Return what a command prints, and fail the test with all of it if the command fails."""
    parts = [str(part) for part in command]
    env = os.environ | {name: str(value) for name, value in environment.items()}
    result = subprocess.run(parts, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
