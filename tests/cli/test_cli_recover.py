"""`neuronmm recover`: the document, and one line for every mistake, with nothing lost."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from outcomes import COMPRESS, Run, process, refused
from safetensors.torch import load_file, save_file
from tiny import tiny_directory

from neuronmm_ops.cli.inspect import show_recovery
from neuronmm_ops.recover import Training
from neuronmm_ops.recover.state import STATE_FILE

SEQLEN = ("--seqlen", "32")
TIME = (*SEQLEN, "--minutes", "0.05")


@pytest.fixture(scope="module")
def small(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from neuronmm_ops.cli import main

    path = tmp_path_factory.mktemp("small") / "small"
    arguments = ("compress", dense, "-o", path, "--ratio", "0.7", "--calibration", text, *COMPRESS)
    assert main([str(argument) for argument in arguments]) == 0
    return path


@pytest.mark.parametrize("method", ["distill", "lora"])
def test_the_document(method: str, run: Run, small: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--data", text, "--method", method, "-o", out, "--json", *TIME)
    outcome = run("recover", small, *arguments)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert list(document) == [
        *("output", "config", "data_sha256", "steps", "best_step", "improved", "tokens"),
        *("minutes", "held_out_tokens", "held_out_ppl_before", "held_out_ppl_after"),
        *("rate", "compute_dtype"),
    ]
    assert document["output"] == str(out)
    assert document["config"]["method"] == method
    assert document["steps"] >= 1
    assert document["minutes"] <= 0.05 + 0.05  # a step may end late on a busy machine
    assert document["held_out_ppl_after"] <= document["held_out_ppl_before"]
    inspected = json.loads(run("inspect", out, "--json").out)
    assert inspected["recovery"] == [{k: document[k] for k in document if k != "output"}]
    shown = run("inspect", out).out
    assert (
        f"recovered by {method}: held-out perplexity {document['held_out_ppl_before']:.4f}" in shown
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    again = run("recover", small, *arguments)
    refused(again, "exists; use --force")
    forced = run("recover", small, "--force", *arguments)
    assert forced.code == 0, forced.err


def test_steps_instead_of_minutes(run: Run, small: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("--data", text, "-o", tmp_path / "out", "--json", *SEQLEN, "--steps", "2")
    document = json.loads(run("recover", small, *arguments).out)
    assert document["steps"] == document["config"]["steps"] == 2


def test_a_start_that_stays_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"held_out_ppl_before": 9.0, "held_out_ppl_after": 9.0, "improved": False}
    shown = {"config": {"method": "lora"}, "steps": 3, "tokens": 96, "minutes": 0.05, **numbers}
    show_recovery(shown)
    assert "perplexity 9.0000, not improved: the factors are the start's" in capsys.readouterr().out


def test_mistakes_are_one_line(
    run: Run, small: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    def mistake(*words: str, model: Path = small, data: Path = text, options: Any = TIME) -> None:
        refused(run("recover", model, "--data", data, "-o", tmp_path / "out", *options), *words)
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.recovery").exists()

    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    mistake("the text must hold at least 4 blocks of 32 tokens, got 10", data=short)
    mistake("cannot read text", data=tmp_path / "missing.txt")
    mistake("is not compressed", "neuronmm compress", model=dense)
    mistake("is no directory", model=tmp_path / "missing")
    mistake("method must be one of distill, lora; got 'magic'", options=("--method", "magic"))
    mistake("steps must be at least 1, got 0", options=("--steps", "0"))
    mistake("--minutes and --steps", "give one", options=(*TIME, "--steps", "2"))
    mistake("minutes must be a positive number, got -1.0", options=("--minutes", "-1"))
    mistake("learning_rate must be a positive", options=("--learning-rate", "nan"))
    mistake("minutes must leave time to train", options=(*SEQLEN, "--minutes", "1e-6"))
    mistake("--dense", "is not here", options=(*TIME, "--dense", str(tmp_path / "no")))
    other = tiny_directory(tmp_path / "other", num_hidden_layers=1)
    mistake("is not the model that was compressed", options=(*TIME, "--dense", str(other)))

    broken = tmp_path / "broken"
    shutil.copytree(small, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.u"].view(-1)[3] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    mistake("model.layers.1.mlp.up_proj.u must be finite", model=broken)


def test_a_read_only_parent(
    run: Run, small: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronmm_ops.output.os.access", lambda *_: False)  # root may write
    refused(run("recover", small, "--data", text, "-o", tmp_path / "out", *TIME), "no permission")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_state(
    run: Run, small: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.recovery").write_text("mine")
    outcome = run("recover", small, "--data", text, "-o", tmp_path / "out", *TIME)
    refused(outcome, "out.recovery is to hold the run's state, and is a file")
    assert (tmp_path / "out.recovery").read_text() == "mine"


def test_an_output_below_a_file(run: Run, small: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    refused(run("recover", small, "--data", text, "-o", out, *TIME), "needs a directory")


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("method", ["distill", "lora"])
def test_a_stopped_run_goes_on(
    stop: signal.Signals,
    code: int,
    method: str,
    run: Run,
    small: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ("recover", small, "--data", text, "-o", tmp_path / "o", "--method", method)
    evaluate = Training._evaluate_and_write

    def stopped(self: Training) -> Any:
        found = evaluate(self)
        os.kill(os.getpid(), stop)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_evaluate_and_write", stopped)
        outcome = run(*arguments, *TIME)
    word = {130: "interrupted", 143: "terminated"}[code]
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.splitlines()[-1] == f"neuronmm: {word}"
    assert "Traceback" not in outcome.err
    assert [path.name for path in (tmp_path / "o.recovery").iterdir()] == [STATE_FILE]
    assert not (tmp_path / "o").exists()

    refused(run(*arguments, *TIME, "--seed", "1"), "another model, text or option", "o.recovery")
    outcome = run(*arguments, *TIME, "--json")
    assert outcome.code == 0, outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


KILLED = """
import os, signal, sys
from neuronmm_ops.cli import main
from neuronmm_ops.recover import state

save, calls = state.save_file, []

def half(tensors, path, metadata):
    calls.append(path)
    if len(calls) == 2:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    save(tensors, path, metadata)

state.save_file = half
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_kill_while_the_state_is_written(
    run: Run, small: Path, text: Path, tmp_path: Path
) -> None:
    arguments = ("recover", small, "--data", text, "-o", tmp_path / "o", *SEQLEN, "--steps", "4")
    outcome = process(sys.executable, "-c", KILLED, *arguments)
    assert outcome.code == -signal.SIGKILL, outcome.err
    assert (tmp_path / "o.recovery" / STATE_FILE).exists()
    outcome = run(*arguments, "--json")
    assert outcome.code == 0, outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
