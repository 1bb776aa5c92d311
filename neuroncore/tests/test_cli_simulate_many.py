"""`neuroncore simulate` with several kernels, and with a sweep."""

import sys
from pathlib import Path

import pytest
from outcomes import failed
from scale_kernels import KERNELS, X

EXAMPLE = Path(__file__).parents[2] / "examples" / "kernels" / "matmul.py"
SIZES = ("--arg", "lhsT=bf16[256,512]", "--arg", "rhs=bf16[256,1024]", "--target", "trn2")


# --- side by side


def test_comparison_is_two_profiles_and_their_ratios(simulate, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(EXAMPLE.read_text().replace("rows=4, columns=2", "rows=2, columns=1"))
    command = ("--compare", f"{EXAMPLE}:matmul", f"{other}:matmul", *SIZES, "--trace-only")
    found = simulate(*command, "--json").document()
    first, second = found["kernels"]
    assert (first["file"], second["file"]) == ("matmul.py:matmul", "other.py:matmul")
    alone = simulate(f"{EXAMPLE}:matmul", *SIZES, "--trace-only", "--json").document()
    assert first["time_ms"] == alone["time_ms"]
    assert set(found["ratios"][0].values()) <= {1.0, None}
    ratio = found["ratios"][1]
    assert ratio["time_ms"] == second["time_ms"] / first["time_ms"] != 1
    assert ratio["hbm_read_bytes"] == second["hbm_read_bytes"] / first["hbm_read_bytes"]
    page = simulate(*command)
    assert page.code == 0
    assert page.out.startswith("trn2, 1 core, calibrated model; times are modelled\n")
    (line,) = [line for line in page.out.splitlines() if "time, ms (modelled)" in line]
    assert line.split()[-1] == f"{ratio['time_ms']:.3f}"


def test_compared_kernels_take_the_arguments_that_they_know(simulate, file):
    command = ("--compare", f"{file}:scale", f"{file}:in_place", *X)
    found = simulate(*command, "--arg", "by=2.0", "--json").document()
    assert [k["kernel"] for k in found["kernels"]] == ["scale", "in_place"]
    failed(simulate(*command, "--arg", "z=2"), 2, "none of the kernels has a parameter z")
    failed(simulate(*command[:3]), 2, "kernels.py:scale", "--arg x")


def test_compared_values(simulate, file):
    reference = ("--reference", f"{file}:reference")
    command = ("--compare", f"{file}:scale", f"{file}:in_place", f"{file}:anything", *X)
    found = simulate(*command, *reference, "--json").document()
    assert [k["agreement"][0]["agrees"] for k in found["kernels"]] == [True] * 3
    page = simulate(*command, "--reference", f"{file}:wrong").out
    assert page.count("too large") == 3


# --- sweeps


def test_sweep_is_sorted_and_says_what_was_refused(simulate):
    command = (f"{EXAMPLE}:matmul", *SIZES, "--trace-only", "--sweep", "rows=1,2,3,4")
    found = simulate(*command, "--sweep", "columns=1,2", "--json").document()
    points = found["points"]
    assert len(points) == 8
    ran = [p for p in points if p["refused"] is None]
    assert points[: len(ran)] == ran
    times = [p["time_ms"] for p in ran]
    assert times == sorted(times)
    assert len(set(times)) > 1
    assert {p["values"]["rows"] for p in points[len(ran) :]} == {"3"}
    for point in points[len(ran) :]:
        assert point["refused"].startswith("AssertionError: assert M % height == 0 [matmul.py:")
    page = simulate(*command).out
    assert "refused" in page
    assert page.index(" 4 ") < page.index("AssertionError")


def test_a_swept_point_is_the_run_with_that_value(simulate):
    command = (f"{EXAMPLE}:matmul", *SIZES, "--trace-only", "--json")
    (point,) = simulate(*command, "--sweep", "rows=2").document()["points"]
    alone = simulate(*command, "--arg", "rows=2").document()
    for name in ("time_ms", "bound", "instructions", "hbm_bytes", "sbuf_peak_bytes"):
        assert point[name] == alone[name], name


def test_a_constant_of_the_file_is_swept_with_what_follows_from_it(simulate, file):
    found = simulate(f"{file}:scale", *X, "--sweep", "BLOCK=64,128,96", "--json").document()
    counts = {p["values"]["BLOCK"]: p.get("instructions") for p in found["points"]}
    assert counts == {"64": 12, "128": 6, "96": None}  # WIDTH is four times BLOCK
    place = f"[kernels.py:{KERNELS[: KERNELS.index('assert x')].count(chr(10)) + 1}]"
    assert found["points"][-1]["refused"].endswith(place)


def test_a_constant_takes_any_plain_value(simulate, tmp_path):
    text = KERNELS.replace("BLOCK: int = 128", "TILES = (512,)\nBY = 2.0")
    text = text.replace("4 * BLOCK", "TILES[0]").replace("by=2.0", "by=BY")
    (tmp_path / "kernels.py").write_text("from __future__ import annotations\n" + text)
    command = (f"{tmp_path / 'kernels.py'}:scale", *X, "--json")
    found = simulate(*command, "--sweep", "TILES=(256,),(512,)", "--sweep", "BY=inf,-1").document()
    assert [p["refused"] for p in found["points"]] == [None] * 4
    assert {p["values"]["TILES"]: p["instructions"] for p in found["points"]} == {
        "(256,)": 12,
        "(512,)": 6,
    }


def test_tensors_and_texts_are_swept_too(simulate, file):
    shapes = ("--sweep", "x=f32[128,512],bf16[64,1024]")
    found = simulate(f"{file}:scale", "--target", "trn2", *shapes, "--json").document()
    assert {p["values"]["x"] for p in found["points"]} == {"f32[128,512]", "bf16[64,1024]"}
    found = simulate(f"{file}:scale", *X, "--sweep", "extra='a,b',(1,2),none", "--json").document()
    assert [p["values"]["extra"] for p in found["points"]] == ["'a,b'", "(1,2)", "none"]


def test_all_points_refused_is_still_a_table(simulate, file):
    outcome = simulate(f"{file}:scale", *X, "--sweep", "BLOCK=96,100")
    assert outcome.code == 0
    assert outcome.out.count("AssertionError") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sweep", "BLOCK"), ["NAME=VALUE,VALUE", "'BLOCK'"]),
        (("--sweep", "by="), ["NAME=VALUE,VALUE"]),
        (("--sweep", "by=1,"), ["--sweep by: ''"]),
        (("--sweep", "by=1", "--sweep", "by=2"), ["--sweep by is given twice"]),
        (("--sweep", "by=1", "--arg", "by=2"), ["--sweep by and --arg"]),
        (("--sweep", "NOPE=1"), ["--sweep NOPE", "no parameter", "never"]),
        (("--sweep", "BLOCK=f32[4,4]"), ["--sweep BLOCK", "takes no tensor"]),
        (("--reference", "kernels.py:other_name"), ["reference other_name needs --arg y"]),
        (("--sweep", "TWICE=1"), ["--sweep TWICE", "2 times"]),
        (("--sweep", "A=1"), ["--sweep A", "never"]),
        (("--sweep", "by=1", "--compare"), ["not allowed with"]),
        (("--compare",), ["--compare takes two kernels or more"]),
        (("--sweep", "by=1", "--timeline", "a.html"), ["--timeline takes a single run"]),
        (("--sweep", "by=1", "--save", "a.npy"), ["--save takes a single run"]),
        (("--save", "a.txt"), ["--save", "a.txt"]),
        (("--save", "a.npy", "--trace-only"), ["--save needs values"]),
        (("--save", "no/a.npy"), ["cannot write no/a.npy"]),
        (("--timeline", "no/a.html"), ["cannot write no/a.html"]),
        (("--reference", "kernels.py:reference", "--trace-only"), ["--reference needs values"]),
        (("--reference", "kernels.py"), ["FILE.py:FUNCTION"]),
        (("--reference", "kernels.py:nope"), ["kernels.py has no function nope"]),
        (("--reference", "kernels.py:BLOCK"), ["kernels.py has no function BLOCK"]),
    ],
)
def test_bad_options(simulate, file, monkeypatch, arguments, words):
    monkeypatch.chdir(file.parent)
    failed(simulate("kernels.py:scale", *X, *arguments), 2, *words)
    assert {path.suffix for path in file.parent.iterdir() if path.is_file()} == {".py"}


def test_two_kernels_without_the_option(simulate, file):
    failed(simulate(f"{file}:scale", f"{file}:both", *X), 2, "got 2 kernels; put --compare")


def test_the_timeline_page_is_written(simulate, tmp_path):
    page = tmp_path / "page.html"
    found = simulate(f"{EXAMPLE}:matmul", *SIZES, "--timeline", page, "--json").document()
    assert found["what_would_help"] in page.read_text()
    assert found["what_if"][0]["time_ms"] <= found["time_ms"]
    assert "What would help" in simulate(f"{EXAMPLE}:matmul", *SIZES).out


def test_ctrl_c_ends_a_sweep(simulate, file, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("neuroncore.cli.runs.kernels.run", interrupt)
    outcome = simulate(f"{file}:scale", *X, "--sweep", "by=1,2")
    assert (outcome.code, outcome.out) == (130, "")
    assert "nki" not in sys.modules
