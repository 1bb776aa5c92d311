"""`neuronmm device-check` without a device: what it writes, and what it refuses."""

import json

import pytest
from outcomes import refused

from neuronmm_ops.device.record import FILE


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A directory of a run that had no time."""
    from neuronmm_ops.device import run
    from neuronmm_ops.device.runners import SimulatedDevice

    out = tmp_path_factory.mktemp("checked")
    run.run(out, 1e-6, SimulatedDevice("trn2"))
    return out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("needs a Neuron device, got none", "nki and torch_neuronx", "--simulated")),
        (("--simulated", "--minutes", "0"), ("--minutes must be a number above 0, got 0",)),
        (("--simulated", "--minutes", "nan"), ("above 0, got nan",)),
        (("--simulated", "--target", "trn9"), ("target must be one of trn1", "got 'trn9'")),
        (("--simulated", "--target", "trn1"), ("of target trn2, this run has trn1", "another -o")),
    ],
)
def test_mistakes_are_one_line(options, words, checked, run):
    refused(run("device-check", "-o", checked, *options), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "is no JSON document, or is cut off"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has version 2; this reads 1"),
        (lambda text: text.replace("neuronmm-device-check", "x"), "is no record of device-check"),
        (lambda text: text.replace('"rows": []', '"rows": [{}]'), "that device-check never writes"),
        (lambda text: "[" * 100_000, "is no JSON document"),
    ],
)
def test_a_damaged_record_is_one_line(change, words, checked, tmp_path, run):
    (tmp_path / FILE).write_text(change((checked / FILE).read_text()))
    refused(run("device-check", "-o", tmp_path, "--simulated", "--target", "trn2"), FILE, words)


def test_a_file_is_no_directory(tmp_path, run):
    (tmp_path / "file").touch()
    refused(run("device-check", "-o", tmp_path / "file", "--simulated"), "file: File exists")


def test_what_did_not_run_is_shown(checked, run):
    path = checked / FILE
    document = json.loads(path.read_text())
    prediction = {"time_us": 10.0, "range_us": [9.0, 11.0], "decides": {"dma": 9.0}}
    row = {"step": "kernels", "name": "xw of X", "prediction": prediction, "error_ratio": None}
    rows = [("refused", "NCC_1", None), *[("measured", "", us) for us in (500.0, 20.0, 20.0)]]
    keys = ("status", "reason", "time_us")
    document["rows"] = [{**row, **dict(zip(keys, values, strict=True))} for values in rows]
    path.write_text(json.dumps(document))
    call = "device-check", "-o", checked, "--simulated", "--target", "trn2", "--minutes", "1e-6"
    shown = run(*call).page()
    assert "1 refused, 3 measured" in shown
    assert "2 inside the modelled range, 1 outside" in " ".join(shown.split())
    page = (checked / "device-check.md").read_text()
    assert "| xw of X | refused | NCC_1 |" in page
