"""`neuroncore simulate` with tensors from files, outputs into files, and a reference."""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from outcomes import Run
from scale_kernels import X, document, failed

# --- tensors in files


def values(dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((128, 1024)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_inputs_and_outputs_of_files(
    simulate: Run, file: Path, tmp_path: Path, dtype: Any, suffix: str
) -> None:
    x, source, target = values(dtype), tmp_path / f"x{suffix}", tmp_path / f"y{suffix}"
    if suffix == ".npy":
        np.save(source, x)
        given = f"x=bf16[{source}]" if dtype is ml_dtypes.bfloat16 else f"x={source}"
    else:
        safetensors.numpy.save_file({"a": x, "b": np.zeros(3, np.float32)}, source)
        given = f"x={source}:a"
    before = source.read_bytes()
    done = document(simulate(f"{file}:scale", "--arg", given, "--save", target, "--json"))
    assert done["hbm_bytes"] == 2 * x.nbytes
    saved = (
        np.load(target).view(dtype)
        if suffix == ".npy"
        else safetensors.numpy.load_file(target)["output0"]
    )
    np.testing.assert_array_equal(saved.astype(np.float32), (x * dtype(2)).astype(np.float32))
    assert source.read_bytes() == before


def test_a_file_is_not_written_by_a_kernel_that_writes_its_input(
    simulate: Run, file: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", values(np.float32)[:, :512])
    before = (tmp_path / "x.npy").read_bytes()
    command = (f"{file}:in_place", "--arg", f"x={tmp_path / 'x.npy'}")
    assert simulate(*command, "--reference", f"{file}:reference").code == 0
    assert (tmp_path / "x.npy").read_bytes() == before


def test_values_are_converted_where_a_dtype_is_named(
    simulate: Run, file: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", values(np.float64))
    np.save(tmp_path / "i.npy", np.arange(128 * 512).reshape(128, 512) % 100)
    x, i = tmp_path / "x.npy", tmp_path / "i.npy"
    failed(simulate(f"{file}:scale", "--arg", f"x={x}"), 2, "float64", f"x=f32[{x}]")
    failed(
        simulate(f"{file}:scale", "--arg", f"x={x}", "--trace-only"), 2, "float64", f"x=f32[{x}]"
    )
    target = tmp_path / "y.npy"
    assert simulate(f"{file}:scale", "--arg", f"x=bf16[{x}]", "--save", target).code == 0
    expected = values(np.float64).astype(ml_dtypes.bfloat16) * ml_dtypes.bfloat16(2)
    np.testing.assert_array_equal(np.load(target).view(ml_dtypes.bfloat16), expected)
    assert simulate(f"{file}:scale", "--arg", f"x=i32[{i}]").code == 0
    failed(simulate(f"{file}:scale", "--arg", f"x=i8[{x}]"), 2, "float64 values that int8")
    np.save(i, np.full((128, 512), 300))
    failed(simulate(f"{file}:scale", "--arg", f"x=i8[{i}]"), 2, "int64 values that int8")


@pytest.mark.parametrize("own", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("wanted", ["f32", "bf16", "fp16"])
def test_every_float_converts_to_every_other(
    simulate: Run, file: Path, tmp_path: Path, own: str, wanted: str
) -> None:
    x = np.arange(128 * 512).reshape(128, 512) % 200 / 4
    dtype = np.dtype(getattr(ml_dtypes, own, own))
    safetensors.numpy.save_file({"x": x.astype(dtype)}, tmp_path / "x.safetensors")
    target = tmp_path / "y.safetensors"
    given = f"x={wanted}[{tmp_path / 'x.safetensors'}]"
    assert simulate(f"{file}:scale", "--arg", given, "--save", target).code == 0
    saved = safetensors.numpy.load_file(target)["output0"]
    np.testing.assert_array_equal(saved.astype(np.float64), 2 * x)


def test_trace_only_reads_the_header_alone(simulate: Run, file: Path, tmp_path: Path) -> None:
    for dtype, short in ((np.float32, "float32"), (np.float16, "float16")):
        np.save(tmp_path / "x.npy", values(dtype))
        safetensors.numpy.save_file({"x": values(dtype)}, tmp_path / "x.safetensors")
        for name in ("x.npy", "x.safetensors"):
            command = (f"{file}:scale", "--arg", f"x={tmp_path / name}", "--trace-only", "--json")
            (x, _) = document(simulate(*command))["tensors"]
            assert (x["shape"], x["dtype"]) == ([128, 1024], short)


def test_files_that_cannot_be_read(simulate: Run, file: Path, tmp_path: Path) -> None:
    def given(name: str, content: bytes = b"no tensor") -> tuple[str, ...]:
        (tmp_path / name).write_bytes(content)
        return (f"{file}:scale", "--arg", f"x={tmp_path / name}")

    for name in ("x.npy", "x.safetensors"):
        failed(simulate(*given(name)), 2, "--arg x", name, "cannot be read")
        failed(simulate(*given(name, b"")), 2, "--arg x", name, "cannot be read")
        failed(simulate(*given(name), "--trace-only"), 2, "--arg x", name, "cannot be read")
    failed(simulate(f"{file}:scale", "--arg", "x=no.npy"), 2, "no.npy is no file", "quoted")
    np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
    failed(simulate(f"{file}:scale", "--arg", f"x={tmp_path / 'x.npy'}"), 2, "cannot be read")
    np.save(tmp_path / "x.npy", values(ml_dtypes.bfloat16))
    failed(simulate(f"{file}:scale", "--arg", f"x={tmp_path / 'x.npy'}"), 2, "x=bf16[")
    many = tmp_path / "many.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(2), "b": np.zeros(2)}, many)
    failed(simulate(f"{file}:scale", "--arg", f"x={many}"), 2, "2 tensors", "many.safetensors:a")
    safetensors.numpy.save_file({}, tmp_path / "none.safetensors")
    failed(
        simulate(f"{file}:scale", "--arg", f"x={tmp_path / 'none.safetensors'}"), 2, "has 0 tensors"
    )
    failed(simulate(f"{file}:scale", "--arg", f"x={many}:c"), 2, "no tensor c", "a, b")
    failed(simulate(f"{file}:scale", "--arg", f"x={many}:a"), 2, "float64", "f32[")


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.ones((128, 512), np.float32)),
        np.ones((128, 512), ">f4"),
        np.ones((128, 512), np.float32)[:, ::-1],
    ],
)
def test_layouts_of_arrays(simulate: Run, file: Path, tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array * np.arange(512, dtype=np.float32))
    target = tmp_path / "y.npy"
    command = (f"{file}:scale", "--arg", f"x=f32[{tmp_path / 'x.npy'}]", "--save", target)
    assert simulate(*command).code == 0
    np.testing.assert_array_equal(np.load(target)[5], 2 * np.arange(512))


@pytest.mark.parametrize(
    "array", [np.float32(1), np.ones((0, 4), np.float32), np.zeros((4, 4), "i1,i1"), np.array("a")]
)
@pytest.mark.parametrize("how", ["x={}", "x=bf16[{}]"])
def test_arrays_that_are_no_tensors(
    simulate: Run, file: Path, tmp_path: Path, array: np.ndarray, how: str
) -> None:
    np.save(tmp_path / "x.npy", array)
    command = (f"{file}:scale", "--arg", how.format(tmp_path / "x.npy"))
    for more in ((), ("--trace-only",)):
        outcome = simulate(*command, *more)
        assert outcome.code in (1, 2), outcome
        failed(outcome, outcome.code)
        assert "internal error" not in outcome.err


def test_outputs_that_a_file_cannot_hold(simulate: Run, file: Path, tmp_path: Path) -> None:
    def command(kernel: str, name: str, dtype: str = "f32") -> tuple[object, ...]:
        return (f"{file}:{kernel}", "--arg", f"x={dtype}[128,1024]", "--save", tmp_path / name)

    failed(simulate(*command("both", "y.npy")), 2, "2 tensors", ".safetensors")
    failed(simulate(*command("nothing", "y.npy")), 2, "returns nothing")
    failed(simulate(*command("scale", "y.safetensors", "fp8")), 2, "float8_e4m3", ".npy")
    assert list(tmp_path.iterdir()) == []
    assert simulate(*command("both", "y.safetensors")).code == 0
    saved = safetensors.numpy.load_file(tmp_path / "y.safetensors")
    assert sorted(saved) == ["output0", "output1"]
    np.testing.assert_allclose(saved["output1"], saved["output0"] * 1.5, rtol=1e-6)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_is_read_only(simulate: Run, file: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    outcome = simulate(f"{file}:scale", *X, "--save", tmp_path / "y.npy")
    tmp_path.chmod(0o700)
    failed(outcome, 2, "no permission")


# --- references


def test_agreement_is_shown_and_in_the_document(simulate: Run, file: Path) -> None:
    command = (f"{file}:scale", "--arg", "x=bf16[128,1024]", "--arg", "by=1.7")
    found = document(simulate(*command, "--reference", f"{file}:reference", "--json"))
    (entry,) = found["agreement"]
    assert entry["agrees"]
    assert 0 < entry["max_error"] <= entry["allowed"] < entry["largest"]
    page = simulate(*command, "--reference", f"{file}:reference").out
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
    simulate: Run, file: Path, kernel: str, function: str, words: list[str] | None
) -> None:
    x = ("--arg", "x=f32[128,512]", "--target", "trn2")
    outcome = simulate(f"{file}:{kernel}", *x, "--reference", f"{file}:{function}")
    if words is None:
        assert outcome.code == 0, outcome.err
    else:
        failed(outcome, 1, *words)


def test_outputs_are_saved_before_they_are_found_wrong(
    simulate: Run, file: Path, tmp_path: Path
) -> None:
    target = tmp_path / "y.npy"
    command = (f"{file}:scale", *X, "--save", target, "--reference", f"{file}:wrong")
    assert simulate(*command).code == 1
    assert np.load(target).shape == (128, 1024)
