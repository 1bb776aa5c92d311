"""What all commands have in common: exit codes, one line for every mistake, strict JSON."""

import importlib.metadata
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from outcomes import refused
from tiny import tiny_directory

from neuronmm_ops import CheckpointError, CompressionWarning


def test_doctor(run):
    document = run("doctor", "--json").document()
    assert document["versions"]["torch"] == importlib.metadata.version("torch")
    backends = {backend["name"]: backend for backend in document["backends"]}
    assert backends["cpu"]["usable"]
    assert "multiplies float32" in backends["cpu"]["reason"]
    assert list(backends) == ["cpu", "cuda", "xla", "neuron"]
    for backend in backends.values():
        assert backend["reason"]
    assert "neuronmm-ops[xla]" in run("doctor").out


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        CheckpointError("d cannot be loaded: DefaultCPUAllocator: can't allocate memory: you ..."),
    ],
)
def test_out_of_memory_hint(run, dense, text, monkeypatch, error):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("neuronmm_ops.eval.token_perplexity", fail)
    refused(run("eval", dense, "--text", text), "out of memory", "--samples")


def test_defects_exit_with_1_and_debug_shows_them(run, dense, text, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("neuronmm_ops.eval.token_perplexity", fail)
    outcome = run("eval", dense, "--text", text)
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].endswith(
        "internal error: ZeroDivisionError: oops; see it with --debug"
    )
    with pytest.raises(ZeroDivisionError):
        run("eval", dense, "--text", text, "--debug")


def test_a_model_that_cannot_run_is_no_defect_of_ours(run, tmp_path):
    """It saves and loads, but 4 heads share no 3 keys."""
    tiny_directory(tmp_path, num_attention_heads=4, num_key_value_heads=3)
    refused(
        run("generate", tmp_path, "--prompt", "x", "--new-tokens", 1),
        "the model's own code fails (RuntimeError: ",
        "check that its config.json",
    )


def test_a_panic_of_a_native_library_is_one_line(run, monkeypatch):
    """As tokenizers raise theirs, which is no Exception."""

    def panic() -> None:
        raise type("PanicException", (BaseException,), {})("called unwrap on\nnothing")

    monkeypatch.setattr("neuronmm_ops.doctor.diagnose", panic)
    refused(run("doctor"), "a native library gave up (called unwrap on nothing)")


def test_a_document_that_is_no_json_is_a_line(run, monkeypatch):
    document = {"versions": {"torch": float("nan")}, "backends": []}
    monkeypatch.setattr("neuronmm_ops.doctor.diagnose", lambda: document)
    refused(run("doctor", "--json"), "JSON")


def test_our_warnings_are_lines_and_others_are_hidden(run, monkeypatch):
    def warn() -> dict[str, object]:
        warnings.warn("nothing is\n compressed", CompressionWarning, stacklevel=1)
        warnings.warn("of another package", UserWarning, stacklevel=1)
        return {"versions": {}, "backends": []}

    monkeypatch.setattr("neuronmm_ops.doctor.diagnose", warn)
    assert run("doctor", "--json").err == "warning: nothing is compressed\n"


def test_missing_transformers_names_the_extra(run, dense, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", None)
    refused(run("eval", dense, "--text", text), "pip install 'neuronmm-ops[hf]'")


def test_a_broken_transformers_is_told_in_its_own_words(run, dense, text, monkeypatch):
    def broken(name: str) -> None:
        raise ImportError("libtorch.so:\n undefined symbol")  # has no name

    monkeypatch.setattr("neuronmm_ops.extras.import_module", broken)
    words = "neuronmm: libtorch.so: undefined symbol; run: pip install 'neuronmm-ops[hf]'"
    refused(run("eval", dense, "--text", text), words)


def test_version(run):
    outcome = run("--version")
    version = importlib.metadata.version("neuronmm-ops")
    assert (outcome.code, outcome.out) == (0, f"neuronmm-ops {version}\n")


def test_the_console_script_is_the_module_that_survives_an_early_interrupt():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"neuronmm": "neuronmm_ops_command:main"}
