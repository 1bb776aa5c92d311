"""The microkernels run everywhere, and the file of their times is checked."""

import json
from dataclasses import replace

import numpy as np
import pytest

import neuroncore as nc
from neuroncore.calibration import microkernels, profiled
from neuroncore.calibration.cases import cases, of_simulator
from neuroncore.calibration.measurements import Measurements, Row, read, write
from neuroncore.calibration.published import PUBLISHED
from neuroncore.hardware import MACHINES

GIVEN = Measurements(
    "trn2",
    {"nki": "0.7.0"},
    (Row("loads-256/32", "measured", 43.5), Row("columns/16", "refused", None, "EVRF001")),
)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("target", MACHINES)
def test_each_series_takes_longer_the_more_often_it_repeats(target):
    times = {}
    for case in cases(target):
        run = nc.simulate(
            case.simulated, *case.operands, **case.arguments, mode="trace", target=target
        )
        times.setdefault(case.series, []).append((case.count, run.profile.time_ms))
    assert len(times) >= 18 + 2 * MACHINES[target].has("paired_cores")
    for found in times.values():
        assert len(found) >= 2
        assert found == sorted(found)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "case", {case.series: case for case in reversed(cases("trn2"))}.values(), ids=lambda c: c.name
)
def test_a_kernel_computes(case):
    """No instruction reads what was not written; no core races the other."""
    operands = [np.zeros(each.shape, each.dtype.numpy) for each in case.operands]
    out = nc.simulate(case.simulated, *operands, **case.arguments, target="trn2").outputs
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("line", ["0.6", "0.7"])
@pytest.mark.parametrize("module", [microkernels, profiled])
def test_nki_takes_the_kernels(module, line):
    assert not nc.lint(module.__file__, line)


@pytest.mark.parametrize("module", [microkernels, profiled])
def test_kernels_of_an_installed_nki_are_simulated_too(module, monkeypatch):
    monkeypatch.setattr(module, "jit", None)
    bound = of_simulator.__wrapped__(module.__name__)
    assert bound is not module
    assert bound.jit is nc.jit


def test_all_that_was_profiled_is_of_a_kernel():
    assert {each.function for each in PUBLISHED} == {"tiled", "blocked", "transposing", "resident"}
    for each in PUBLISHED:
        assert each.simulated is each.kernel is getattr(profiled, each.function)


def test_names_are_unique():
    names = [case.name for case in cases("trn2")]
    assert len({*names}) == len(names)


def test_a_file_is_read_as_it_was_written(tmp_path):
    write(tmp_path / "times.json", GIVEN)
    assert read(tmp_path / "times.json") == GIVEN
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(tmp_path / "times.json", replace(GIVEN, rows=(Row("a/1", "measured", float("nan")),)))
    assert read(tmp_path / "times.json") == GIVEN


def row(**changes):
    return {"rows": [{"case": "a/1", "status": "measured", "time_us": 1, "reason": "", **changes}]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "nonsense"}, "is no file of measurements"),
        ({"version": 2}, "has version 2; this reads 1"),
        ({"target": "trn9"}, "has target 'trn9'; it must be one of trn1, trn2, trn3"),
        ({"target": ["trn2"]}, "has target"),
        ({"versions": {"nki": 7}}, "must be texts by name"),
        ({"rows": {}}, "they must be a list"),
        ({"rows": [7]}, "has row 1, 7; it must be an object"),
        (row(status="lost"), "must be one of measured, refused, skipped"),
        (row(status=["lost"]), "must be one of measured"),
        (row(case=7), "must be an object with a case"),
        (row(reason=None), "it must be a text"),
        (row(status="skipped"), "it must be null"),
        (row(time_us="1"), "it must be a number"),
        (row(time_us=True), "it must be a number"),
        (row(time_us=-1), "must be 0.001 to 1e\\+09"),
        (row(time_us=float("nan")), "must be 0.001 to 1e"),
        (row(time_us=10**400), "must be 0.001 to 1e"),
        ({"rows": row()["rows"] * 2}, "has more than one row of a/1"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, changes, problem):
    path = tmp_path / "times.json"
    write(path, GIVEN)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))
    with pytest.raises(ValueError, match=problem) as error:
        read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe{", b'{"format": "neuroncore-meas', b"[" * 9999]
)
def test_what_is_no_json_is_refused(tmp_path, content):
    (tmp_path / "times.json").write_bytes(content)
    with pytest.raises(ValueError, match="is no JSON document, or is cut off"):
        read(tmp_path / "times.json")
