"""Load OpenAI-compatible servers from several threads, and check every answer.

`python examples/serving/load_test.py http://127.0.0.1:8000 http://127.0.0.1:8001` first asks each
server every prompt alone. Then the servers are loaded in turn, in rounds, and every answer must be
the one that was given alone. With several servers, the ratio of their tokens/s to the first one's
is of the same round. Exit status: 0, 1 for a wrong answer, 2 for a server that cannot be asked.
"""

import argparse
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

TIMEOUT_S = 300


class Answer(NamedTuple):
    """What a server completed a prompt with."""

    text: str
    tokens: int


@dataclass
class Server:
    """A server, the answers it gives alone, and what it did under load."""

    address: str
    model: str
    alone: dict[str, Answer]
    answers: int = 0
    wrong: int = 0
    tokens_per_s: list[float] = field(default_factory=list[float])
    """Of each round."""

    def load(self, threads: int, tokens: int, seconds: float) -> None:
        """Ask from all threads until the time is over, and wait for the last answers."""
        prompts = list(self.alone)
        started = time.monotonic()

        def ask(thread: int) -> list[tuple[str, Answer]]:
            answers: list[tuple[str, Answer]] = []
            while time.monotonic() < started + seconds:
                prompt = prompts[(thread + len(answers)) % len(prompts)]
                answers.append((prompt, complete(self.address, self.model, prompt, tokens)))
            return answers

        with ThreadPoolExecutor(max_workers=threads) as pool:
            pairs = [pair for each in pool.map(ask, range(threads)) for pair in each]
        taken = time.monotonic() - started
        self.answers += len(pairs)
        self.wrong += sum(answer != self.alone[prompt] for prompt, answer in pairs)
        self.tokens_per_s.append(sum(answer.tokens for _, answer in pairs) / taken)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    prompts = [
        f"w{number} w{3 * number + 1} w{7 * number + 2}" for number in range(options.prompts)
    ]
    try:
        servers = [connect(address, prompts, options.tokens) for address in options.address]
        slot = options.seconds / options.rounds / len(servers)
        for number in range(options.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                server.load(options.threads, options.tokens, slot)
    except (OSError, ValueError, KeyError) as error:
        print(f"load_test: {error}", file=sys.stderr)
        return 2
    summaries = [summary(server, servers[0]) for server in servers]
    document = json.dumps({"options": vars(options), "servers": summaries}, indent=2)
    print(document if options.json else table(summaries))
    return int(any(server.wrong for server in servers))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="load servers, and check every answer")
    parser.add_argument("address", nargs="+", help="such as http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=60, help="of load, all servers together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=4, help="clients at a time")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most")
    parser.add_argument("--prompts", type=int, default=16, help="different ones")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for name in ("seconds", "rounds", "threads", "tokens", "prompts"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be greater than 0, got {getattr(options, name)}")
    return options


def connect(address: str, prompts: Sequence[str], tokens: int) -> Server:
    """Ask a server for its model, and for its answer to each prompt alone."""
    model = request(f"{address}/v1/models")["data"][0]["id"]
    alone = {prompt: complete(address, model, prompt, tokens) for prompt in prompts}
    return Server(address, model, alone)


def complete(address: str, model: str, prompt: str, tokens: int) -> Answer:
    """Ask for the greedy completion of a prompt."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    response = request(f"{address}/v1/completions", body)
    return Answer(response["choices"][0]["text"], response["usage"]["completion_tokens"])


def request(address: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Get or post JSON; raise OSError with the server's own message where it refuses."""
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"an address must begin with http:// or https://, got {address}")
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(address, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as response:  # noqa: S310
            return json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise OSError(f"{address}: {error.code} {error.reason}: {said}") from None
    except OSError as error:
        raise OSError(f"{address}: {error}") from None


def summary(server: Server, first: Server) -> dict[str, Any]:
    """Return a server's figures, and its ratios to the first server's in the same rounds."""
    ratios = [
        own / other for own, other in zip(server.tokens_per_s, first.tokens_per_s, strict=True)
    ]
    figures = {name: value for name, value in asdict(server).items() if name != "alone"}
    return {**figures, "ratios": ratios}


def table(servers: Sequence[dict[str, Any]]) -> str:
    """Return a table in Markdown: medians over the rounds, with their ranges."""
    lines = ["| model | tokens/s | over the first | answers | wrong |", "| --- " * 5 + "|"]
    for server in servers:
        speed, ratio = (spread(server[name]) for name in ("tokens_per_s", "ratios"))
        lines.append(
            f"| {server['model']} | {speed} | {ratio} | {server['answers']} | {server['wrong']} |"
        )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Return a median with its range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
