"""The command `neuronmm` and what comes out of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from neuronmm_ops import demo

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 200
COMPRESS = ("--block", "8", "--seqlen", "64", "--samples", "32")
SCRIPT = (sys.executable, "-m", "neuronmm_ops_command")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    def page(self) -> str:
        """What a command that succeeded prints."""
        assert self.code == 0, self.err
        return self.out

    def document(self, code: int = 0) -> Any:
        """The one JSON document that a command prints, strictly read."""
        assert self.code == code, self.err
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(name))

    def interrupted(self) -> None:
        """Assert that Ctrl-C ended it with one line."""
        assert (self.code, self.out) == (130, ""), self.err
        assert self.err.splitlines()[-1] == "neuronmm: interrupted"
        assert "Traceback" not in self.err


Run = Callable[..., Outcome]


def caller(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls a command in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call


def process(*arguments: object, stdout: int | IO[str] = subprocess.PIPE) -> Outcome:
    """Run a program to its end."""
    result = subprocess.run(
        [str(argument) for argument in arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return Outcome(result.returncode, result.stdout or "", result.stderr)


def failed(outcome: Outcome, code: int, *words: str) -> None:
    """Nothing on stdout, one line on stderr that holds the words."""
    assert (outcome.code, outcome.out) == (code, ""), outcome
    (line,) = outcome.err.strip().splitlines()
    assert line.startswith(("neuron", "python benchmarks"))
    for word in words:
        assert word in line, line


def refused(outcome: Outcome, *words: str) -> None:
    """The input was wrong."""
    failed(outcome, 2, *words)


def interrupt(*_: object, **__: object) -> None:
    """Stands for a function during which the user presses Ctrl-C."""
    raise KeyboardInterrupt


def shorten_held_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `neuronmm demo` take its perplexities on a tenth of the text, to save time."""
    path = folder / demo.HELD_OUT.name
    folder.mkdir()
    path.write_text(demo.HELD_OUT.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    monkeypatch.setattr(demo, "HELD_OUT", path)
