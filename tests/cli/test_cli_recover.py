"""`neuronmm recover`: the document, and one line for every mistake, with nothing lost."""

import itertools
import os
import shutil
import signal

import pytest
from outcomes import refused
from safetensors.torch import load_file, save_file
from tiny import tiny_directory

from neuronmm_ops.cli.inspect import show_recovery
from neuronmm_ops.recover import Training
from neuronmm_ops.recover.state import STATE_FILE

SEQLEN = ("--seqlen", "32")


@pytest.fixture
def recover(run, text, tmp_path, monkeypatch):
    """Trains to `out` for three seconds, of which any look at the clock takes a fifth."""
    seconds = itertools.count(step=0.2)
    monkeypatch.setattr("neuronmm_ops.recover.training.monotonic", lambda: next(seconds))

    def call(model, *options, length=("--minutes", "0.05")):
        out = ("-o", tmp_path / "out", "--data", text)
        return run("recover", model, *out, *SEQLEN, *length, *options)

    return call


@pytest.mark.parametrize("method", ["distill", "lora"])
def test_the_document(method, run, recover, small, tmp_path):
    out = tmp_path / "out"
    document = recover(small, "--method", method, "--json").document()
    assert list(document) == [
        *("output", "config", "data_sha256", "steps", "best_step", "improved", "tokens"),
        *("minutes", "held_out_tokens", "held_out_ppl_before", "held_out_ppl_after"),
        *("rate", "compute_dtype"),
    ]
    assert document["output"] == str(out)
    assert document["config"]["method"] == method
    assert document["steps"] >= 1
    assert document["minutes"] <= 0.05 + 0.05  # a step ends late
    assert document["held_out_ppl_after"] <= document["held_out_ppl_before"]
    inspected = run("inspect", out, "--json").document()
    assert inspected["recovery"] == [{k: document[k] for k in document if k != "output"}]
    before = f"recovered by {method}: held-out perplexity {document['held_out_ppl_before']:.4f}"
    assert before in run("inspect", out).page()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    refused(recover(small), "exists; use --force")
    recover(small, "--force").page()


def test_steps_instead_of_minutes(recover, small):
    document = recover(small, "--json", length=("--steps", "2")).document()
    assert document["steps"] == document["config"]["steps"] == 2


def test_a_start_that_stays_is_said(capsys):
    numbers = {"held_out_ppl_before": 9.0, "held_out_ppl_after": 9.0, "improved": False}
    shown = {"config": {"method": "lora"}, "steps": 3, "tokens": 96, "minutes": 0.05, **numbers}
    show_recovery(shown)
    assert "perplexity 9.0000, not improved: the factors are the start's" in capsys.readouterr().out


def test_another_dense_model_and_broken_factors(recover, small, tmp_path):
    other = tiny_directory(tmp_path / "other", num_hidden_layers=1)
    refused(recover(small, "--dense", other), "is not the model that was compressed")
    broken = shutil.copytree(small, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".u"))
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    refused(recover(broken), f"{name} must be finite")
    assert {path.name for path in tmp_path.iterdir()} == {"broken", "other"}


def test_places_that_cannot_be_written(recover, small, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("neuronmm_ops.output.os.access", lambda *_: False)  # root may write
        refused(recover(small), "no permission")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.recovery").write_text("mine")
    refused(recover(small), "out.recovery is to hold the run's state, and is a file")
    assert (tmp_path / "out.recovery").read_text() == "mine"


@pytest.mark.parametrize(
    ("stop", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
@pytest.mark.parametrize("method", ["distill", "lora"])
def test_a_stopped_run_goes_on(stop, code, word, method, recover, small, tmp_path, monkeypatch):
    evaluate = Training._evaluate_and_write

    def stopped(self):
        found = evaluate(self)
        os.kill(os.getpid(), stop)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_evaluate_and_write", stopped)
        outcome = recover(small, "--method", method)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.splitlines()[-1] == f"neuronmm: {word}"
    assert "Traceback" not in outcome.err
    assert [path.name for path in (tmp_path / "out.recovery").iterdir()] == [STATE_FILE]
    assert not (tmp_path / "out").exists()

    other = recover(small, "--method", method, "--seed", "1")
    refused(other, "another model, text or option", "out.recovery")
    recover(small, "--method", method).page()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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
def test_a_kill_while_the_state_is_written(run, forked, small, text, tmp_path):
    arguments = ("recover", small, "--data", text, "-o", tmp_path / "o", *SEQLEN, "--steps", "4")
    outcome = forked(KILLED, *arguments)
    assert outcome.code == -signal.SIGKILL, outcome.err
    assert (tmp_path / "o.recovery" / STATE_FILE).exists()
    run(*arguments).page()
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
