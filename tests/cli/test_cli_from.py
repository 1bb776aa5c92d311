"""`neuronmm compress --from compression.json`: the run again, or one line that says why not."""

import json
import shutil

import pytest
from outcomes import COMPRESS, TEXT, refused
from tiny import tiny_directory


@pytest.fixture
def places(run, dense, tmp_path):
    """A directory with `dense`, `text.txt`, and `small`, compressed by them."""
    shutil.copytree(dense, tmp_path / "dense")
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--ratio", "0.3", "--calibration", tmp_path / "text.txt", *COMPRESS)
    run("compress", tmp_path / "dense", "-o", tmp_path / "small", *options).page()
    return tmp_path


@pytest.fixture
def record(places):
    return places / "small" / "compression.json"


@pytest.fixture
def again(run, places, record):
    """Runs it again."""
    command = ("compress", "--from", record, "-o", places / "again")
    return lambda *arguments: run(*command, *arguments)


def test_it_gives_the_same_weights(again, places):
    document = again("--json").document()
    assert document["same_weights"] is True
    assert document["ratio"] == 0.3
    files = [places / name / "model.safetensors" for name in ("small", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    shown = again("--force").page()
    assert "weights are bit for bit those of the recorded run" in " ".join(shown.split())


def test_options_override_what_is_recorded(again, places):
    options = ("--ratio", "0.5", "--targets", "up_proj", "--samples", "4", "--json")
    document = again(*options).document()
    assert document["same_weights"] is False
    assert document["ratio"] == 0.5
    assert document["config"]["block"] == 8
    assert {layer["name"].rpartition(".")[2] for layer in document["layers"]} == {"up_proj"}
    written = json.loads((places / "again" / "compression.json").read_text())
    assert (written["calibration"]["samples"], written["calibration"]["seqlen"]) == (4, 64)


def test_a_changed_text_is_refused_unless_it_is_given(again, places, record):
    text = places / "text.txt"
    text.write_text(TEXT.replace("fox", "cat"))
    recorded = json.loads(record.read_text())["calibration"]
    refused(again(), str(text), recorded["sha256"], "give --calibration")
    assert not (places / "again").exists()
    again("--calibration", text).page()
    text.unlink()
    refused(again(), "cannot read text", str(text), "give --calibration")
    again("--method", "plain", "--force").page()


def test_a_changed_model_is_refused_unless_it_is_given(again, places, record):
    dense = places / "dense"
    shutil.rmtree(dense)
    refused(again(), str(dense), "is no directory", "give MODEL")
    tiny_directory(dense, hidden_size=32)
    recorded = json.loads(record.read_text())["model"]
    refused(again(), str(dense), recorded["sha256"], "give MODEL")
    again(dense).page()


def test_a_method_that_needs_a_text_which_is_not_recorded(run, again, places):
    plain = ("--method", "plain", "--block", "8", "--force")
    run("compress", places / "dense", "-o", places / "small", *plain).page()
    refused(again("--method", "swift"), "method swift needs --calibration")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"version": 2, "ratio": 7}}, "ratio must be in (0, 1)"),
        ({"device": "toaster"}, "device must be cpu, cuda"),
        ({"max_shard_size": "much"}, "a size such as 5GB"),
        ({"format_version": 9}, "format_version must be 1, got 9"),
        ({"model": {"path": "/no/such", "sha256": "0" * 64}}, "/no/such is no directory"),
    ],
)
def test_a_bad_record_is_one_line(again, places, record, change, words):
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    refused(again(), words)
    assert not (places / "again").exists()


def test_records_do_not_depend_on_where_the_command_ran(run, again, places, monkeypatch):
    monkeypatch.chdir(places)
    options = ("--calibration", "text.txt", *COMPRESS, "--force")
    run("compress", "dense", "-o", "small", *options).page()
    monkeypatch.chdir("/")
    assert again("--json").document()["same_weights"] is True


def test_a_checkpoint_may_be_replaced_by_its_own_run(run, places, record):
    before = (places / "small" / "model.safetensors").read_bytes()
    command = ("compress", "--from", record, "-o", places / "small")
    refused(run(*command), "exists; use --force")
    assert run(*command, "--force", "--json").document()["same_weights"] is True
    assert (places / "small" / "model.safetensors").read_bytes() == before


def test_an_unwritable_record_is_an_error_and_leaves_nothing(again, places, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("neuronmm_ops.hf.saving.write_run", fail)
    outcome = again()
    assert outcome.code == 2
    assert "No space left on device" in outcome.err.splitlines()[-1]
    assert sorted(path.name for path in places.iterdir()) == ["dense", "small", "text.txt"]
