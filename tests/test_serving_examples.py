"""The load test of a server, and the model that speeds are measured with."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest
from commands import run
from serving import load_test

from neuronmm_ops import hf
from neuronmm_ops.compress.record import low_rank_layers

SERVING = Path(__file__).parents[1] / "examples" / "serving"
QUICK = ("--seconds", "0.2", "--rounds", "2", "--threads", "3", "--prompts", "4", "--tokens", "5")


class Handler(BaseHTTPRequestHandler):
    """Completes a prompt with its reverse; the answer to `wrong_at` is another one."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "reverse"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0
        is_wrong = next(self.server.numbers) == self.server.wrong_at  # pyright: ignore
        text = "wrong" if is_wrong else body["prompt"][::-1]
        usage = {"completion_tokens": body["max_tokens"]}
        self.answer({"choices": [{"text": text}], "usage": usage})

    def answer(self, document: dict) -> None:
        data = json.dumps(document).encode()
        self.send_response(self.server.status)  # pyright: ignore
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.numbers, server.wrong_at, server.status = count(), None, 200  # pyright: ignore
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_every_answer_is_counted_and_checked(server, capsys):
    assert load_test.main([address(server), address(server), *QUICK, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["servers"]
    asked = next(server.numbers) - 2 * 4  # less those asked alone
    assert first["answers"] + second["answers"] == asked
    assert min(first["answers"], second["answers"]) >= 2 * 3
    assert first["wrong"] == second["wrong"] == 0
    assert first["ratios"] == [1, 1]
    assert [b / a for a, b in zip(first["tokens_per_s"], second["tokens_per_s"], strict=True)] == (
        second["ratios"]
    )


def test_one_wrong_answer_fails(server, capsys):
    server.wrong_at = 4 + 3  # after the prompts alone
    assert load_test.main([address(server), *QUICK]) == 1
    assert capsys.readouterr().out.endswith("| 1 |\n")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("ftp://127.0.0.1", "an address must begin with http:// or https://, got ftp://127.0.0.1"),
        ("http://127.0.0.1:9", "Connection refused"),
    ],
)
def test_a_server_that_cannot_be_asked_is_one_line(place, said, capsys):
    assert load_test.main([place, *QUICK]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_servers_own_error_is_told(server, capsys):
    server.status = 503
    assert load_test.main([address(server), *QUICK]) == 2
    assert "503 Service Unavailable" in capsys.readouterr().err


def test_options_must_be_positive(capsys):
    with pytest.raises(SystemExit):
        load_test.main(["http://127.0.0.1:9", "--threads", "0"])
    assert "--threads must be greater than 0, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_random_models_load_with_their_words(tmp_path):
    sizes = ("--hidden", "32", "--intermediate", "64", "--layers", "1", "--heads", "2")
    run(sys.executable, SERVING / "random_models.py", tmp_path, *sizes, "--block", "8")
    dense, low_rank = (hf.load(tmp_path / name) for name in ("dense", "low_rank"))
    assert hf.load_tokenizer(tmp_path / "dense")("w3 w10")["input_ids"] == [3, 10]
    assert len(low_rank_layers(low_rank)) == 7
    assert dense.config.vocab_size == low_rank.config.vocab_size > 10
