"""`neuronmm simulate` with several kernels, a sweep, tensors from files and a reference."""

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from outcomes import Outcome, Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "kernels" / "matmul.py"
SIZES = ("--arg", "lhsT=bf16[256,512]", "--arg", "rhs=bf16[256,1024]", "--target", "trn2")
KERNELS = """\
import functools

import nki
import nki.isa as nisa
import nki.language as nl

BLOCK: int = 128
WIDTH = 4 * BLOCK
TWICE = 1
TWICE = 2
A = B = 3


@nki.jit
def scale(x, by=2.0, extra=None):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for n in range(0, x.shape[1], WIDTH):
        assert x.shape[1] % WIDTH == 0
        tile = nl.ndarray((x.shape[0], WIDTH), x.dtype)
        nisa.dma_copy(tile, x[:, n : n + WIDTH])
        nisa.tensor_scalar(tile, tile, nl.multiply, by)
        nisa.dma_copy(out[:, n : n + WIDTH], tile)
    return out


@nki.jit
def both(x):
    return scale(x), scale(x, 3.0)


@nki.jit
def nothing(x):
    scale(x)


@nki.jit
def in_place(x):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nisa.dma_copy(x, tile)
    return x


@nki.jit
def anything(x, **options):
    return scale(x, options.get("by", 2.0))


def any_reference(x, **options):
    return x * options.get("by", 2.0)


def reference(x, by=2.0):
    return x * by


def wrong(x, by=2.0):
    return x * by * 1.25


def wide(x):
    return x[None] * 2.0


def two(x):
    return x * 2.0, x * 3.0


def wrapped(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


@wrapped
def decorated(x):
    return x * 2.0


def other_name(y):
    return y * 2.0


def nan(x):
    return x * float("nan")


def raises(x):
    return x.no_such_thing
"""
X = ("--arg", "x=f32[128,1024]", "--target", "trn2")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture(name="run")
def simulate(run: Run) -> Generator[Run]:
    modules = set(sys.modules)
    yield lambda *arguments: run("simulate", *arguments)
    left = set(sys.modules) - modules
    assert not [name for name in left if name.startswith("_simulated")]


def document(outcome: Outcome) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out, parse_constant=lambda name: pytest.fail(name))


def failed(outcome: Outcome, code: int, *words: str) -> None:
    assert (outcome.code, outcome.out) == (code, ""), outcome
    (line,) = outcome.err.strip().splitlines()
    assert line.startswith("neuronmm")
    for word in words:
        assert word in line, line


# --- side by side


def test_comparison_is_two_profiles_and_their_ratios(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(EXAMPLE.read_text().replace("rows=4, columns=2", "rows=2, columns=1"))
    command = ("--compare", f"{EXAMPLE}:matmul", f"{other}:matmul", *SIZES, "--trace-only")
    found = document(run(*command, "--json"))
    first, second = found["kernels"]
    assert (first["file"], second["file"]) == ("matmul.py:matmul", "other.py:matmul")
    alone = document(run(f"{EXAMPLE}:matmul", *SIZES, "--trace-only", "--json"))
    assert first["time_ms"] == alone["time_ms"]
    assert set(found["ratios"][0].values()) <= {1.0, None}
    ratio = found["ratios"][1]
    assert ratio["time_ms"] == second["time_ms"] / first["time_ms"] != 1
    assert ratio["hbm_read_bytes"] == second["hbm_read_bytes"] / first["hbm_read_bytes"]
    page = run(*command)
    assert page.code == 0
    assert page.out.startswith("trn2, 1 core, calibrated model; times are modelled\n")
    (line,) = [line for line in page.out.splitlines() if "time, ms (modelled)" in line]
    assert line.split()[-1] == f"{ratio['time_ms']:.3f}"


def test_compared_kernels_take_the_arguments_that_they_know(run: Run, file: Path) -> None:
    command = ("--compare", f"{file}:scale", f"{file}:in_place", *X)
    found = document(run(*command, "--arg", "by=2.0", "--json"))
    assert [k["kernel"] for k in found["kernels"]] == ["scale", "in_place"]
    failed(run(*command, "--arg", "z=2"), 2, "none of the kernels has a parameter z")
    failed(run("--compare", f"{file}:scale", f"{file}:in_place"), 2, "kernels.py:scale", "--arg x")


def test_compared_values(run: Run, file: Path) -> None:
    reference = ("--reference", f"{file}:reference")
    command = ("--compare", f"{file}:scale", f"{file}:in_place", f"{file}:anything", *X)
    found = document(run(*command, *reference, "--json"))
    assert [k["agreement"][0]["agrees"] for k in found["kernels"]] == [True] * 3
    page = run(*command, "--reference", f"{file}:wrong").out
    assert page.count("too large") == 3


# --- sweeps


def test_sweep_is_sorted_and_says_what_was_refused(run: Run) -> None:
    command = (f"{EXAMPLE}:matmul", *SIZES, "--trace-only", "--sweep", "rows=1,2,3,4")
    found = document(run(*command, "--sweep", "columns=1,2", "--json"))
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
    page = run(*command).out
    assert "refused" in page
    assert page.index(" 4 ") < page.index("AssertionError")


def test_a_swept_point_is_the_run_with_that_value(run: Run) -> None:
    command = (f"{EXAMPLE}:matmul", *SIZES, "--trace-only", "--json")
    (point,) = document(run(*command, "--sweep", "rows=2"))["points"]
    alone = document(run(*command, "--arg", "rows=2"))
    for name in ("time_ms", "bound", "instructions", "hbm_bytes", "sbuf_peak_bytes"):
        assert point[name] == alone[name], name


def test_a_constant_of_the_file_is_swept_with_what_follows_from_it(run: Run, file: Path) -> None:
    found = document(run(f"{file}:scale", *X, "--sweep", "BLOCK=64,128,96", "--json"))
    counts = {p["values"]["BLOCK"]: p.get("instructions") for p in found["points"]}
    assert counts == {"64": 12, "128": 6, "96": None}  # WIDTH is four times BLOCK
    place = f"[kernels.py:{KERNELS[: KERNELS.index('assert x')].count(chr(10)) + 1}]"
    assert found["points"][-1]["refused"].endswith(place)


def test_a_constant_takes_any_plain_value(run: Run, tmp_path: Path) -> None:
    text = KERNELS.replace("BLOCK: int = 128", "TILES = (512,)\nBY = 2.0")
    text = text.replace("4 * BLOCK", "TILES[0]").replace("by=2.0", "by=BY")
    (tmp_path / "kernels.py").write_text("from __future__ import annotations\n" + text)
    command = (f"{tmp_path / 'kernels.py'}:scale", *X, "--json")
    found = document(run(*command, "--sweep", "TILES=(256,),(512,)", "--sweep", "BY=inf,-1"))
    assert [p["refused"] for p in found["points"]] == [None] * 4
    assert {p["values"]["TILES"]: p["instructions"] for p in found["points"]} == {
        "(256,)": 12,
        "(512,)": 6,
    }


def test_tensors_and_texts_are_swept_too(run: Run, file: Path) -> None:
    found = document(
        run(
            f"{file}:scale", "--target", "trn2", "--sweep", "x=f32[128,512],bf16[64,1024]", "--json"
        )
    )
    assert {p["values"]["x"] for p in found["points"]} == {"f32[128,512]", "bf16[64,1024]"}
    found = document(run(f"{file}:scale", *X, "--sweep", "extra='a,b',(1,2),none", "--json"))
    assert [p["values"]["extra"] for p in found["points"]] == ["'a,b'", "(1,2)", "none"]


def test_all_points_refused_is_still_a_table(run: Run, file: Path) -> None:
    outcome = run(f"{file}:scale", *X, "--sweep", "BLOCK=96,100")
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
def test_bad_options(
    run: Run,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: list[str],
) -> None:
    monkeypatch.chdir(file.parent)
    failed(run("kernels.py:scale", *X, *arguments), 2, *words)
    assert {path.suffix for path in file.parent.iterdir() if path.is_file()} == {".py"}


def test_two_kernels_without_the_option(run: Run, file: Path) -> None:
    failed(run(f"{file}:scale", f"{file}:both", *X), 2, "got 2 kernels; put --compare")


# --- tensors in files


def values(dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((128, 1024)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_inputs_and_outputs_of_files(
    run: Run, file: Path, tmp_path: Path, dtype: Any, suffix: str
) -> None:
    x, source, target = values(dtype), tmp_path / f"x{suffix}", tmp_path / f"y{suffix}"
    if suffix == ".npy":
        np.save(source, x)
        given = f"x=bf16[{source}]" if dtype is ml_dtypes.bfloat16 else f"x={source}"
    else:
        safetensors.numpy.save_file({"a": x, "b": np.zeros(3, np.float32)}, source)
        given = f"x={source}:a"
    before = source.read_bytes()
    done = document(run(f"{file}:scale", "--arg", given, "--save", target, "--json"))
    assert done["hbm_bytes"] == 2 * x.nbytes
    saved = (
        np.load(target).view(dtype)
        if suffix == ".npy"
        else safetensors.numpy.load_file(target)["output0"]
    )
    np.testing.assert_array_equal(saved.astype(np.float32), (x * dtype(2)).astype(np.float32))
    assert source.read_bytes() == before


def test_a_file_is_not_written_by_a_kernel_that_writes_its_input(
    run: Run, file: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", values(np.float32)[:, :512])
    before = (tmp_path / "x.npy").read_bytes()
    command = (f"{file}:in_place", "--arg", f"x={tmp_path / 'x.npy'}")
    assert run(*command, "--reference", f"{file}:reference").code == 0
    assert (tmp_path / "x.npy").read_bytes() == before


def test_values_are_converted_where_a_dtype_is_named(run: Run, file: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", values(np.float64))
    np.save(tmp_path / "i.npy", np.arange(128 * 512).reshape(128, 512) % 100)
    x, i = tmp_path / "x.npy", tmp_path / "i.npy"
    failed(run(f"{file}:scale", "--arg", f"x={x}"), 2, "float64", f"x=f32[{x}]")
    failed(run(f"{file}:scale", "--arg", f"x={x}", "--trace-only"), 2, "float64", f"x=f32[{x}]")
    target = tmp_path / "y.npy"
    assert run(f"{file}:scale", "--arg", f"x=bf16[{x}]", "--save", target).code == 0
    expected = values(np.float64).astype(ml_dtypes.bfloat16) * ml_dtypes.bfloat16(2)
    np.testing.assert_array_equal(np.load(target).view(ml_dtypes.bfloat16), expected)
    assert run(f"{file}:scale", "--arg", f"x=i32[{i}]").code == 0
    failed(run(f"{file}:scale", "--arg", f"x=i8[{x}]"), 2, "float64 values that int8")
    np.save(i, np.full((128, 512), 300))
    failed(run(f"{file}:scale", "--arg", f"x=i8[{i}]"), 2, "int64 values that int8")


@pytest.mark.parametrize("own", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("wanted", ["f32", "bf16", "fp16"])
def test_every_float_converts_to_every_other(
    run: Run, file: Path, tmp_path: Path, own: str, wanted: str
) -> None:
    x = np.arange(128 * 512).reshape(128, 512) % 200 / 4
    dtype = np.dtype(getattr(ml_dtypes, own, own))
    safetensors.numpy.save_file({"x": x.astype(dtype)}, tmp_path / "x.safetensors")
    target = tmp_path / "y.safetensors"
    given = f"x={wanted}[{tmp_path / 'x.safetensors'}]"
    assert run(f"{file}:scale", "--arg", given, "--save", target).code == 0
    saved = safetensors.numpy.load_file(target)["output0"]
    np.testing.assert_array_equal(saved.astype(np.float64), 2 * x)


def test_trace_only_reads_the_header_alone(run: Run, file: Path, tmp_path: Path) -> None:
    for dtype, short in ((np.float32, "float32"), (np.float16, "float16")):
        np.save(tmp_path / "x.npy", values(dtype))
        safetensors.numpy.save_file({"x": values(dtype)}, tmp_path / "x.safetensors")
        for name in ("x.npy", "x.safetensors"):
            command = (f"{file}:scale", "--arg", f"x={tmp_path / name}", "--trace-only", "--json")
            (x, _) = document(run(*command))["tensors"]
            assert (x["shape"], x["dtype"]) == ([128, 1024], short)


def test_files_that_cannot_be_read(run: Run, file: Path, tmp_path: Path) -> None:
    def given(name: str, content: bytes = b"no tensor") -> tuple[str, ...]:
        (tmp_path / name).write_bytes(content)
        return (f"{file}:scale", "--arg", f"x={tmp_path / name}")

    for name in ("x.npy", "x.safetensors"):
        failed(run(*given(name)), 2, "--arg x", name, "cannot be read")
        failed(run(*given(name, b"")), 2, "--arg x", name, "cannot be read")
        failed(run(*given(name), "--trace-only"), 2, "--arg x", name, "cannot be read")
    failed(run(f"{file}:scale", "--arg", "x=no.npy"), 2, "no.npy is no file", "quoted")
    np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
    failed(run(f"{file}:scale", "--arg", f"x={tmp_path / 'x.npy'}"), 2, "cannot be read")
    np.save(tmp_path / "x.npy", values(ml_dtypes.bfloat16))
    failed(run(f"{file}:scale", "--arg", f"x={tmp_path / 'x.npy'}"), 2, "x=bf16[")
    many = tmp_path / "many.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(2), "b": np.zeros(2)}, many)
    failed(run(f"{file}:scale", "--arg", f"x={many}"), 2, "2 tensors", "many.safetensors:a")
    safetensors.numpy.save_file({}, tmp_path / "none.safetensors")
    failed(run(f"{file}:scale", "--arg", f"x={tmp_path / 'none.safetensors'}"), 2, "has 0 tensors")
    failed(run(f"{file}:scale", "--arg", f"x={many}:c"), 2, "no tensor c", "a, b")
    failed(run(f"{file}:scale", "--arg", f"x={many}:a"), 2, "float64", "f32[")


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.ones((128, 512), np.float32)),
        np.ones((128, 512), ">f4"),
        np.ones((128, 512), np.float32)[:, ::-1],
    ],
)
def test_layouts_of_arrays(run: Run, file: Path, tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array * np.arange(512, dtype=np.float32))
    target = tmp_path / "y.npy"
    command = (f"{file}:scale", "--arg", f"x=f32[{tmp_path / 'x.npy'}]", "--save", target)
    assert run(*command).code == 0
    np.testing.assert_array_equal(np.load(target)[5], 2 * np.arange(512))


@pytest.mark.parametrize(
    "array", [np.float32(1), np.ones((0, 4), np.float32), np.zeros((4, 4), "i1,i1"), np.array("a")]
)
@pytest.mark.parametrize("how", ["x={}", "x=bf16[{}]"])
def test_arrays_that_are_no_tensors(
    run: Run, file: Path, tmp_path: Path, array: np.ndarray, how: str
) -> None:
    np.save(tmp_path / "x.npy", array)
    command = (f"{file}:scale", "--arg", how.format(tmp_path / "x.npy"))
    for more in ((), ("--trace-only",)):
        outcome = run(*command, *more)
        assert outcome.code in (1, 2), outcome
        failed(outcome, outcome.code)
        assert "internal error" not in outcome.err


def test_outputs_that_a_file_cannot_hold(run: Run, file: Path, tmp_path: Path) -> None:
    def command(kernel: str, name: str, dtype: str = "f32") -> tuple[object, ...]:
        return (f"{file}:{kernel}", "--arg", f"x={dtype}[128,1024]", "--save", tmp_path / name)

    failed(run(*command("both", "y.npy")), 2, "2 tensors", ".safetensors")
    failed(run(*command("nothing", "y.npy")), 2, "returns nothing")
    failed(run(*command("scale", "y.safetensors", "fp8")), 2, "float8_e4m3", ".npy")
    assert list(tmp_path.iterdir()) == []
    assert run(*command("both", "y.safetensors")).code == 0
    saved = safetensors.numpy.load_file(tmp_path / "y.safetensors")
    assert sorted(saved) == ["output0", "output1"]
    np.testing.assert_allclose(saved["output1"], saved["output0"] * 1.5, rtol=1e-6)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_is_read_only(run: Run, file: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    outcome = run(f"{file}:scale", *X, "--save", tmp_path / "y.npy")
    tmp_path.chmod(0o700)
    failed(outcome, 2, "no permission")


# --- references


def test_agreement_is_shown_and_in_the_document(run: Run, file: Path) -> None:
    command = (f"{file}:scale", "--arg", "x=bf16[128,1024]", "--arg", "by=1.7")
    found = document(run(*command, "--reference", f"{file}:reference", "--json"))
    (entry,) = found["agreement"]
    assert entry["agrees"]
    assert 0 < entry["max_error"] <= entry["allowed"] < entry["largest"]
    page = run(*command, "--reference", f"{file}:reference").out
    assert "Values beside kernels.py:reference in fp64" in page
    assert "output 0 is off by" in page


@pytest.mark.parametrize(
    ("kernel", "function", "words"),
    [
        ("scale", "wrong", ["output 0 is off by", "beyond", "kernels.py:wrong in fp64"]),
        ("scale", "nan", ["off by not finite"]),
        ("scale", "wide", ["output 0 is [128, 512], of kernels.py:wide [1, 128, 512]"]),
        ("scale", "two", ["the kernel returns 1 tensors, kernels.py:two 2"]),
        ("both", "two", None),
        ("scale", "decorated", None),
        ("scale", "any_reference", None),
        ("scale", "raises", ["AttributeError", "[kernels.py:"]),
        ("in_place", "reference", None),
    ],
)
def test_references(
    run: Run, file: Path, kernel: str, function: str, words: list[str] | None
) -> None:
    x = ("--arg", "x=f32[128,512]", "--target", "trn2")
    outcome = run(f"{file}:{kernel}", *x, "--reference", f"{file}:{function}")
    if words is None:
        assert outcome.code == 0, outcome.err
    else:
        failed(outcome, 1, *words)


def test_outputs_are_saved_before_they_are_found_wrong(
    run: Run, file: Path, tmp_path: Path
) -> None:
    target = tmp_path / "y.npy"
    command = (f"{file}:scale", *X, "--save", target, "--reference", f"{file}:wrong")
    assert run(*command).code == 1
    assert np.load(target).shape == (128, 1024)


def test_the_timeline_page_is_written(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = document(run(f"{EXAMPLE}:matmul", *SIZES, "--timeline", page, "--json"))
    assert found["what_would_help"] in page.read_text()
    assert found["what_if"][0]["time_ms"] <= found["time_ms"]
    assert "What would help" in run(f"{EXAMPLE}:matmul", *SIZES).out


def test_ctrl_c_ends_a_sweep(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("neuronmm_ops.cli.kernel_runs.kernels.run", interrupt)
    outcome = run(f"{file}:scale", *X, "--sweep", "by=1,2")
    assert (outcome.code, outcome.out) == (130, "")
    assert "nki" not in sys.modules
