"""`neuronmm compress --from compression.json`: the run again, or one line that says why not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from outcomes import COMPRESS, TEXT, Outcome, Run, refused
from safetensors.torch import load_file
from tiny import tiny_directory


@pytest.fixture
def places(run: Run, dense: Path, tmp_path: Path) -> Path:
    """A directory with `dense`, `text.txt`, and `small`, compressed by them."""
    shutil.copytree(dense, tmp_path / "dense")
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = ("--ratio", "0.3", "--calibration", tmp_path / "text.txt", *COMPRESS)
    outcome = run("compress", tmp_path / "dense", "-o", tmp_path / "small", *arguments)
    assert outcome.code == 0, outcome.err
    return tmp_path


def again(run: Run, places: Path, *arguments: object) -> Outcome:
    recorded = places / "small" / "compression.json"
    return run("compress", "--from", recorded, "-o", places / "again", *arguments)


def test_it_gives_the_same_weights(run: Run, places: Path) -> None:
    outcome = again(run, places, "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["same_weights"] is True
    assert document["ratio"] == 0.3
    files = [places / name / "model.safetensors" for name in ("small", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    shown = again(run, places, "--force").out
    assert "weights are bit for bit those of the recorded run" in " ".join(shown.split())


def test_options_override_what_is_recorded(run: Run, places: Path) -> None:
    arguments = ("--ratio", "0.5", "--targets", "up_proj", "--samples", "4", "--json")
    outcome = again(run, places, *arguments)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["same_weights"] is False
    assert document["ratio"] == 0.5
    assert document["config"]["block"] == 8
    assert {layer["name"].rpartition(".")[2] for layer in document["layers"]} == {"up_proj"}
    written = json.loads((places / "again" / "compression.json").read_text())
    assert (written["calibration"]["samples"], written["calibration"]["seqlen"]) == (4, 64)


def test_a_changed_text_is_refused_unless_it_is_given(run: Run, places: Path) -> None:
    text = places / "text.txt"
    recorded = json.loads((places / "small" / "compression.json").read_text())["calibration"]
    text.write_text(TEXT.replace("fox", "cat"))
    outcome = again(run, places)
    refused(outcome, str(text), recorded["sha256"], "give --calibration")
    assert not (places / "again").exists()
    assert again(run, places, "--calibration", text).code == 0
    text.unlink()
    refused(again(run, places), "cannot read text", str(text), "give --calibration")
    assert again(run, places, "--method", "plain", "--force").code == 0


def test_a_changed_model_is_refused_unless_it_is_given(run: Run, places: Path) -> None:
    shutil.rmtree(places / "dense")
    refused(again(run, places), str(places / "dense"), "is no directory", "give MODEL")
    tiny_directory(places / "dense", hidden_size=32)
    recorded = json.loads((places / "small" / "compression.json").read_text())["model"]
    refused(again(run, places), str(places / "dense"), recorded["sha256"], "give MODEL")
    assert again(run, places, places / "dense").code == 0


def test_a_method_that_needs_a_text_which_is_not_recorded(run: Run, places: Path) -> None:
    plain = ("--method", "plain", "--block", "8", "--force")
    assert run("compress", places / "dense", "-o", places / "small", *plain).code == 0
    refused(again(run, places, "--method", "swift"), "method swift needs --calibration")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"config": {"version": 2, "ratio": 7}}, "ratio must be in (0, 1)"),
        ({"device": "toaster"}, "device must be cpu, cuda"),
        ({"max_shard_size": "much"}, "a size such as 5GB"),
        ({"format_version": 9}, "format_version must be 1, got 9"),
        ({"model": {"path": "/no/such", "sha256": "0" * 64}}, "/no/such is no directory"),
    ],
)
def test_a_bad_record_is_one_line(
    run: Run, places: Path, change: dict[str, Any], word: str
) -> None:
    path = places / "small" / "compression.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refused(again(run, places), word)
    assert not (places / "again").exists()


def test_paths_that_are_no_record(run: Run, places: Path) -> None:
    for path in (places / "missing.json", places / "small", places / "small" / "model.safetensors"):
        refused(run("compress", "--from", path, "-o", places / "o"), str(path))


def test_a_model_is_needed(run: Run, tmp_path: Path) -> None:
    refused(run("compress", "-o", tmp_path / "o", "--method", "plain"), "MODEL is needed", "--from")


def test_records_do_not_depend_on_where_the_command_ran(
    run: Run, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places)
    arguments = ("--calibration", "text.txt", *COMPRESS, "--force")
    assert run("compress", "dense", "-o", "small", *arguments).code == 0
    monkeypatch.chdir("/")
    outcome = again(run, places)
    assert outcome.code == 0, outcome.err
    assert load_file(places / "again" / "model.safetensors")


def test_a_checkpoint_may_be_replaced_by_its_own_run(run: Run, places: Path) -> None:
    recorded = places / "small" / "compression.json"
    before = (places / "small" / "model.safetensors").read_bytes()
    arguments = ("compress", "--from", recorded, "-o", places / "small")
    refused(run(*arguments), "exists; use --force")
    outcome = run(*arguments, "--force", "--json")
    assert json.loads(outcome.out)["same_weights"] is True
    assert (places / "small" / "model.safetensors").read_bytes() == before


def test_an_unwritable_record_is_an_error_and_leaves_nothing(
    run: Run, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("neuronmm_ops.hf.saving.write_run", fail)
    outcome = again(run, places)
    assert outcome.code == 2
    assert "No space left on device" in outcome.err.splitlines()[-1]
    assert sorted(path.name for path in places.iterdir()) == ["dense", "small", "text.txt"]
