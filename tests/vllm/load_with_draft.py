"""Load `vllm serve` of a dense model, whose own compression drafts, with clients that get killed.

Usage: PYTHONPATH=tests:tests/ops python tests/vllm/load_with_draft.py [CLIENTS [SECONDS]]

Each client is a process that asks for one greedy answer; another takes its place. Every fourth is
killed in the middle of its answer. Exit status: 0, or 1 where a token was not the dense model's.
"""

import http.client
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from lowrank import RANKS, greedy, low_rank
from vllm_server import Server

TOKENS, LENGTHS = 24, (1, 3, 17, 60, 240, 700)
TIMEOUT_S = 120
KILLED = 4
RANK = 112  # random weights need one so great for a draft that is sometimes right


def run(folder: Path, clients: int, seconds: float, least: int = 0) -> dict[str, int]:
    """Write both models, serve them, and load the server, as `loaded` does.

    Returns:
        Numbers of answers that were `right` and `wrong`, of `killed` clients, and of `drafted` and
        `accepted` tokens.
    """
    sizes: dict[str, Any] = {"max_position_embeddings": 2048}
    dense = low_rank(folder / "dense", ranks={}, **sizes)
    low_rank(folder / "draft", ranks=dict.fromkeys(RANKS, RANK), **sizes)
    chosen = random.Random(0)  # noqa: S311
    prompts = [[chosen.randrange(256) for _ in range(length)] for length in LENGTHS]
    expected = greedy(dense, prompts, TOKENS)
    speculative = {"method": "draft_model", "model": str(folder / "draft")}
    server = Server(
        *(folder / "dense", folder / "log.txt", "--dtype", "float32", "--enforce-eager"),
        *("--speculative-config", json.dumps({**speculative, "num_speculative_tokens": 3})),
    )
    try:
        address = server.wait_until_ready().address
        found = loaded(address, list(zip(prompts, expected, strict=True)), clients, seconds, least)
        assert server.is_healthy()
        return found | drafts(address)
    finally:
        server.stop()


def loaded(
    address: str,
    pairs: Sequence[tuple[list[int], list[int]]],
    clients: int,
    seconds: float,
    least: int,
) -> dict[str, int]:
    """Keep so many clients asking for prompts, whose answers are known; count how they end.

    For some seconds, and on until at least so many were answered, and so many killed.
    """
    found = {"right": 0, "wrong": 0, "killed": 0}
    running: set[int] = set()
    deadline, number = time.monotonic() + seconds, 0

    def goes_on() -> bool:
        has_too_few = min(found["right"], found["killed"]) < least and not found["wrong"]
        return time.monotonic() < deadline or has_too_few

    while running or goes_on():
        while len(running) < clients and goes_on():
            number += 1
            if not (child := os.fork()):
                os._exit(client(address, *pairs[number % len(pairs)], number))
            running.add(child)
        child, status = os.wait()
        running.remove(child)
        found["killed" if os.WIFSIGNALED(status) else ("wrong" if status else "right")] += 1
    return found


def client(address: str, prompt: list[int], expected: list[int], number: int) -> int:
    """Stream an answer; return 0 where it is the expected one. Every `KILLED`th dies within it."""
    tokens: list[int] = []
    try:
        for chunk in chunks(address, prompt):
            tokens += chunk["choices"][0]["token_ids"] or ()
            if number % KILLED == 0 and len(tokens) > number % TOKENS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
    except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
        print(repr(error), file=sys.stderr)
    return int(tokens != expected)


def chunks(address: str, prompt: list[int]) -> Any:
    """What a server sends of a greedy answer, as it comes."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=TIMEOUT_S)
    body = {"model": "dense", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"stream": True, "return_token_ids": True, "ignore_eos": True}
    header = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), header)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def drafts(address: str) -> dict[str, int]:
    """How many tokens were drafted, and accepted, since the server's start."""
    text = httpx.get(f"{address}/metrics").text
    counters = {"drafted": "draft_tokens", "accepted": "accepted_tokens"}
    values = {
        name: re.search(rf"^vllm:spec_decode_num_{metric}_total\S* (\S+)$", text, re.M)
        for name, metric in counters.items()
    }
    return {name: int(float(value[1])) for name, value in values.items() if value}


def main(clients: str = "40", seconds: str = "60") -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), int(clients), float(seconds))
    print(json.dumps({"clients": int(clients), "seconds": float(seconds), **found}))
    return int(found["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
