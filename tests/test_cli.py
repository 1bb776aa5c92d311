"""The console script `neuronmm`, as a user types it: results, and one line for every mistake.

The main road runs in processes of its own; the many mistakes run the same entry point in this one.
"""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_directory, tiny_model, tiny_tokenizer

from neuronmm_ops import CheckpointError

SCRIPT = Path(sys.executable).with_name("neuronmm")
TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 200
COMPRESS = ("--block", "8", "--seqlen", "64", "--samples", "32")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model") / "dense")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the installed entry point in this process."""
    (entry_point,) = importlib.metadata.entry_points(group="console_scripts", name="neuronmm")
    main = entry_point.load()

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return Outcome(code, *capsys.readouterr())

    return call


def _process(*arguments: object, **environment: str) -> Outcome:
    result = subprocess.run(
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )
    return Outcome(result.returncode, result.stdout, result.stderr)


def _refused(outcome: Outcome, *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds the words."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("neuronmm")
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in lines[0]


def test_the_whole_road_through_the_console_script(dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    arguments = ("--ratio", "0.3", "--calibration", text, *COMPRESS, "--json")

    compressed = _process(SCRIPT, "compress", dense, "-o", out, *arguments)
    assert compressed.code == 0, compressed.err
    document = json.loads(compressed.out)
    assert document["output"] == str(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]

    inspected = _process(SCRIPT, "inspect", out, "--json")
    assert inspected.code == 0, inspected.err
    summary = json.loads(inspected.out)
    assert summary == {key: value for key, value in document.items() if key != "output"}
    assert list(summary) == ["ratio", "effective_ratio", "bytes", "dense_bytes", "layers"]
    assert list(summary["layers"][0]) == ["name", "K", "N", "r", "dense", "loss", "bytes"]
    assert len(summary["layers"]) == 6
    parameters = sum(layer["r"] * (layer["K"] + layer["N"]) for layer in summary["layers"])
    assert summary["bytes"] == 4 * parameters
    assert summary["effective_ratio"] == pytest.approx(1 - parameters / (6 * 64 * 176))

    evaluated = _process(SCRIPT, "eval", out, "--text", text, "--seqlen", "64", "--json")
    assert evaluated.code == 0, evaluated.err
    result = json.loads(evaluated.out)
    assert list(result) == ["model", "text", "ppl_token", "tokens", "seqlen", "dtype"]
    blocks = -(-len(TEXT) // 64)
    assert (result["tokens"], result["seqlen"]) == (len(TEXT) - blocks, 64)
    assert result["dtype"] == "float32"
    assert 1 < result["ppl_token"] < 1000

    generated = _process(
        SCRIPT, "generate", out, "--prompt", "The quick", "--max-new-tokens", "5", "--json"
    )
    assert generated.code == 0, generated.err
    assert 1 <= json.loads(generated.out)["new_tokens"] <= 5


def test_tables_for_people(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    outcome = run("compress", dense, "-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    assert outcome.code == 0, outcome.err
    assert "nominal ratio 0.200, effective" in outcome.out
    assert "model.layers.0.mlp.gate" in outcome.out
    shown = run("eval", tmp_path / "o", "--text", text)
    assert "ppl_token" in shown.out
    assert run("generate", tmp_path / "o", "--prompt", "The").out.startswith("The")


def test_a_compressed_model_is_not_compressed_again(run: Run, dense: Path, tmp_path: Path) -> None:
    arguments = ("--method", "plain", "--block", "8")
    assert run("compress", dense, "-o", tmp_path / "a", *arguments).code == 0
    outcome = run("compress", tmp_path / "a", "-o", tmp_path / "b", *arguments)
    _refused(outcome, "compressed or quantized already")


def test_doctor(run: Run) -> None:
    document = json.loads(run("doctor", "--json").out)
    assert document["versions"]["torch"] == torch.__version__
    backends = {backend["name"]: backend for backend in document["backends"]}
    assert backends["cpu"]["usable"]
    assert list(backends) == ["cpu", "cuda", "xla", "neuron"]
    for backend in backends.values():
        assert backend["reason"]
    assert "neuronmm-ops[xla]" in run("doctor").out


def test_plain_needs_no_calibration(run: Run, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    outcome = run("compress", dense, "-o", out, "--method", "plain", "--block", "8", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["effective_ratio"] > 0


def test_few_calibration_tokens_warn_in_one_line(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    arguments = ("--calibration", text, "--block", "8", "--seqlen", "64", "--samples", "2")
    outcome = run("compress", dense, "-o", tmp_path / "o", *arguments, "--json")
    assert outcome.code == 0
    assert "warning: calibration has 128 tokens, fewer than 10*K = 1760" in outcome.err
    json.loads(outcome.out)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ratio", "0"), "ratio must be in (0, 1)"),
        (("--ratio", "1"), "ratio must be in (0, 1)"),
        (("--ratio", "nan"), "ratio must be in (0, 1)"),
        (("--ratio", "much"), "invalid float value"),
        (("--block", "12"), "multiple of 8, got 12"),
        (("--block", "0"), "multiple of 8, got 0"),
        (("--method", "magic"), "plain, whiten, swift; got 'magic'"),
        (("--targets", "no_such_proj"), "match no nn.Linear"),
        (("--targets", "lm_head"), "shares its weight with model.embed_tokens"),
        (("--targets", "("), "no regular expression"),
        (("--samples", "0"), "at least 1"),
        (("--seqlen", "-3"), "at least 1"),
        (("--seqlen", "100000"), "at least one block of 100000 tokens"),
        (("--calibration", "/no/such/file"), "/no/such/file"),
        (("--frobnicate",), "unrecognized arguments"),
    ],
)
def test_bad_arguments_of_compress(
    run: Run, dense: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], word: str
) -> None:
    out = tmp_path / "o"
    outcome = run("compress", dense, "-o", out, "--calibration", text, *COMPRESS, *arguments)
    _refused(outcome, word)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "word"),
    [(b"", "empty"), (b"\x00\x01\x02", "binary"), (b"\xff\xfe", "UTF-8"), (b"short", "one block")],
)
def test_bad_calibration_text(
    run: Run, dense: Path, tmp_path: Path, data: bytes, word: str
) -> None:
    file = tmp_path / "bad"
    file.write_bytes(data)
    _refused(run("compress", dense, "-o", tmp_path / "o", "--calibration", file, *COMPRESS), word)


def test_calibration_is_required(run: Run, dense: Path, tmp_path: Path) -> None:
    _refused(run("compress", dense, "-o", tmp_path / "o"), "needs --calibration", "plain")


def test_output_exists(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.mkdir()
    arguments = ("compress", dense, "-o", out, "--calibration", text, *COMPRESS)
    _refused(run(*arguments), "exists", "--force")
    assert list(out.iterdir()) == []
    assert run(*arguments, "--force").code == 0
    assert (out / "config.json").exists()


def test_model_directories_that_cannot_be_loaded(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    def broken(name: str, change: Callable[[Path], Any]) -> Path:
        copy = Path(shutil.copytree(dense, tmp_path / name))
        change(copy)
        return copy

    weights = "model.safetensors"
    cases = {
        "no directory": tmp_path / "missing",
        "config.json is missing": broken("a", lambda d: (d / "config.json").unlink()),
        "has no weights": broken("b", lambda d: (d / weights).unlink()),
        "damaged or truncated": broken("c", lambda d: os.truncate(d / weights, 1000)),
        "no usable tokenizer": broken("d", lambda d: [f.unlink() for f in d.glob("tok*")]),
        "cannot be loaded": broken("e", lambda d: (d / "config.json").write_text("{}")),
    }
    for word, directory in cases.items():
        _refused(run("eval", directory, "--text", text), word)


def test_non_finite_weights_name_the_layer(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(dense, tmp_path / "nan"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    arguments = ("-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    _refused(run("compress", copy, *arguments), "model.layers.1.mlp.up_proj", "NaN")
    _refused(run("eval", copy, "--text", text), "logits of block 0", "NaN")


def test_non_finite_activations_name_the_layer(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(dense, tmp_path / "inf"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = float("inf")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    outcome = run("compress", copy, "-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    _refused(outcome, "model.layers.0.mlp.gate_proj", "activations must be finite")


def test_unknown_architecture_without_a_matching_module(
    run: Run, text: Path, tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    directory = tmp_path / "gpt2"
    # Its projections are Conv1D modules: there is no nn.Linear but the head.
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 260, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    outcome = run("compress", directory, "-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    _refused(outcome, "targets mlp match no nn.Linear", "lm_head")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        CheckpointError("d cannot be loaded: DefaultCPUAllocator: can't allocate memory: you ..."),
    ],
)
def test_out_of_memory_hint(
    run: Run, dense: Path, text: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("neuronmm_ops.eval.token_perplexity", fail)
    _refused(run("eval", dense, "--text", text), "out of memory", "--samples")


def test_defects_exit_with_1_and_debug_shows_them(
    run: Run, dense: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_missing_transformers_names_the_extra(
    run: Run, dense: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    _refused(run("eval", dense, "--text", text), "pip install 'neuronmm-ops[hf]'")


def test_no_command_and_version(run: Run) -> None:
    _refused(run(), "COMMAND")
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"neuronmm-ops {_version()}\n")


def test_a_full_disk_leaves_nothing(dense: Path, text: Path, tmp_path: Path) -> None:
    """A real write that fails: the process may not make a file larger than 100 KiB."""
    out = tmp_path / "o"
    arguments = (SCRIPT, "compress", dense, "-o", out, "--calibration", text, *COMPRESS)
    outcome = _process("bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *arguments)
    assert outcome.code == 2, outcome.err
    assert "Traceback" not in outcome.err
    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith("neuronmm: ")
    assert "GB free" in last
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from transformers import PreTrainedModel
from neuronmm_ops.cli import main

def half(self, directory, **_):
    (directory / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

PreTrainedModel.save_pretrained = half
main(sys.argv[1:])
"""


def test_a_killed_run_leaves_no_half_checkpoint(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    arguments = ("compress", dense, "-o", out, "--calibration", text, *COMPRESS)
    outcome = _process(sys.executable, "-c", KILLED, *arguments)
    assert outcome.code == -signal.SIGKILL
    assert not out.exists()
    assert run(*arguments).code == 0
    assert load_file(out / "model.safetensors")


def test_interrupted(
    run: Run, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("neuronmm_ops.compress.compress_", interrupt)
    out = tmp_path / "o"
    outcome = run("compress", dense, "-o", out, "--calibration", text, *COMPRESS)
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err == "neuronmm: interrupted; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def _version() -> str:
    return importlib.metadata.version("neuronmm-ops")


def test_json_is_the_only_thing_on_stdout_and_is_strict(run: Run, dense: Path, text: Path) -> None:
    outcome = run("eval", dense, "--text", text, "--json")
    assert json.loads(outcome.out, parse_constant=lambda name: pytest.fail(name))["tokens"] > 0


def test_bfloat16_checkpoints_stay_bfloat16(run: Run, text: Path, tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    tiny_tokenizer().save_pretrained(tmp_path / "bf16")
    out = tmp_path / "o"
    assert run("compress", tmp_path / "bf16", "-o", out, "--calibration", text, *COMPRESS).code == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {
        torch.bfloat16
    }


def test_bench_overhead_of_xla_needs_torch_xla(run: Run) -> None:
    _refused(run("bench", "overhead", "--xla"), "torch_xla is not installed", "neuronmm-ops[xla]")


def test_bench_methods(run: Run, dense: Path, text: Path) -> None:
    outcome = run("bench", "methods", dense, "--text", text, "--calibration", text, "--json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)
    assert [row["method"] for row in rows[:4]] == ["dense", "plain", "whiten", "swift"]
    assert len(rows) == 1 + 3 * 5


def test_bench_tables_and_mistakes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"op": "xuv", "M": 1, "op_ms": 0.123456}, {"op": "xuv", "M": 8, "op_ms": 12.0}]
    monkeypatch.setattr("neuronmm_ops.bench.cpu.run", lambda *_, **__: rows)
    outcome = run("bench", "cpu")
    assert outcome.out.startswith("op xuv\n")
    assert "0.1235" in outcome.out
    monkeypatch.undo()
    _refused(run("bench", "cpu", "--shape", "GPT-9"), "GPT-9", "Llama-3.2-1B")
    _refused(run("bench", "cpu", "--tokens", "0"), "at least 1")
    _refused(run("bench"), "BENCHMARK")
