"""`neuroncore simulate` with tensors from files, outputs into files, and a reference."""

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from outcomes import failed
from scale_kernels import X

# --- tensors in files


def values(dtype: Any) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((128, 1024)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_inputs_and_outputs_of_files(simulate, file, tmp_path, dtype, suffix):
    x, source, target = values(dtype), tmp_path / f"x{suffix}", tmp_path / f"y{suffix}"
    if suffix == ".npy":
        np.save(source, x)
        given = f"x=bf16[{source}]" if dtype is ml_dtypes.bfloat16 else f"x={source}"
    else:
        safetensors.numpy.save_file({"a": x, "b": np.zeros(3, np.float32)}, source)
        given = f"x={source}:a"
    before = source.read_bytes()
    done = simulate(f"{file}:scale", "--arg", given, "--save", target, "--json").document()
    assert done["hbm_bytes"] == 2 * x.nbytes
    read = (
        np.load if suffix == ".npy" else lambda path: safetensors.numpy.load_file(path)["output0"]
    )
    saved = read(target).view(dtype)
    np.testing.assert_array_equal(saved.astype(np.float32), (x * dtype(2)).astype(np.float32))
    assert source.read_bytes() == before


def test_a_file_is_not_written_by_a_kernel_that_writes_its_input(simulate, file, tmp_path):
    np.save(tmp_path / "x.npy", values(np.float32)[:, :512])
    before = (tmp_path / "x.npy").read_bytes()
    command = (f"{file}:in_place", "--arg", f"x={tmp_path / 'x.npy'}")
    assert simulate(*command, "--reference", f"{file}:reference").code == 0
    assert (tmp_path / "x.npy").read_bytes() == before


def test_values_are_converted_where_a_dtype_is_named(simulate, file, tmp_path):
    x, i = tmp_path / "x.npy", tmp_path / "i.npy"
    np.save(x, values(np.float64))
    np.save(i, np.arange(128 * 512).reshape(128, 512) % 100)
    target = tmp_path / "y.npy"

    def scale(given, *options):
        return simulate(f"{file}:scale", "--arg", f"x={given}", *options)

    for mode in ((), ("--trace-only",)):
        failed(scale(x, *mode), 2, "float64", f"x=f32[{x}]")
    assert scale(f"bf16[{x}]", "--save", target).code == 0
    expected = values(np.float64).astype(ml_dtypes.bfloat16) * ml_dtypes.bfloat16(2)
    np.testing.assert_array_equal(np.load(target).view(ml_dtypes.bfloat16), expected)
    assert scale(f"i32[{i}]").code == 0
    failed(scale(f"i8[{x}]"), 2, "float64 values that int8")
    np.save(i, np.full((128, 512), 300))
    failed(scale(f"i8[{i}]"), 2, "int64 values that int8")


@pytest.mark.parametrize("own", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("wanted", ["f32", "bf16", "fp16"])
def test_every_float_converts_to_every_other(simulate, file, tmp_path, own, wanted):
    x = np.arange(128 * 512).reshape(128, 512) % 200 / 4
    dtype = np.dtype(getattr(ml_dtypes, own, own))
    safetensors.numpy.save_file({"x": x.astype(dtype)}, tmp_path / "x.safetensors")
    target = tmp_path / "y.safetensors"
    given = f"x={wanted}[{tmp_path / 'x.safetensors'}]"
    assert simulate(f"{file}:scale", "--arg", given, "--save", target).code == 0
    saved = safetensors.numpy.load_file(target)["output0"]
    np.testing.assert_array_equal(saved.astype(np.float64), 2 * x)


def test_trace_only_reads_the_header_alone(simulate, file, tmp_path):
    for dtype, short in ((np.float32, "float32"), (np.float16, "float16")):
        np.save(tmp_path / "x.npy", values(dtype))
        safetensors.numpy.save_file({"x": values(dtype)}, tmp_path / "x.safetensors")
        for name in ("x.npy", "x.safetensors"):
            command = (f"{file}:scale", "--arg", f"x={tmp_path / name}", "--trace-only", "--json")
            (x, _) = simulate(*command).document()["tensors"]
            assert (x["shape"], x["dtype"]) == ([128, 1024], short)


def test_files_that_cannot_be_read(simulate, file, tmp_path):
    x, many, none = (tmp_path / n for n in ("x.npy", "many.safetensors", "none.safetensors"))

    def scale(given, *words, mode=()):
        failed(simulate(f"{file}:scale", "--arg", f"x={given}", *mode), 2, *words)

    for path in (x, many):
        for content in (b"no tensor", b""):
            path.write_bytes(content)
            scale(path, "--arg x", path.name, "cannot be read")
        path.write_bytes(b"no tensor")
        scale(path, "--arg x", path.name, "cannot be read", mode=("--trace-only",))
    scale("no.npy", "no.npy is no file", "quoted")
    np.save(x, np.array([{}], object), allow_pickle=True)
    scale(x, "cannot be read")
    np.save(x, values(ml_dtypes.bfloat16))
    scale(x, "x=bf16[")
    safetensors.numpy.save_file({"a": np.zeros(2), "b": np.zeros(2)}, many)
    scale(many, "2 tensors", "many.safetensors:a")
    safetensors.numpy.save_file({}, none)
    scale(none, "has 0 tensors")
    scale(f"{many}:c", "no tensor c", "a, b")
    scale(f"{many}:a", "float64", "f32[")


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.ones((128, 512), np.float32)),
        np.ones((128, 512), ">f4"),
        np.ones((128, 512), np.float32)[:, ::-1],
    ],
)
def test_layouts_of_arrays(simulate, file, tmp_path, array):
    np.save(tmp_path / "x.npy", array * np.arange(512, dtype=np.float32))
    target = tmp_path / "y.npy"
    command = (f"{file}:scale", "--arg", f"x=f32[{tmp_path / 'x.npy'}]", "--save", target)
    assert simulate(*command).code == 0
    np.testing.assert_array_equal(np.load(target)[5], 2 * np.arange(512))


@pytest.mark.parametrize(
    "array", [np.float32(1), np.ones((0, 4), np.float32), np.zeros((4, 4), "i1,i1"), np.array("a")]
)
@pytest.mark.parametrize("how", ["x={}", "x=bf16[{}]"])
def test_arrays_that_are_no_tensors(simulate, file, tmp_path, array, how):
    np.save(tmp_path / "x.npy", array)
    command = (f"{file}:scale", "--arg", how.format(tmp_path / "x.npy"))
    for more in ((), ("--trace-only",)):
        outcome = simulate(*command, *more)
        assert outcome.code in (1, 2), outcome
        failed(outcome, outcome.code)
        assert "internal error" not in outcome.err


def test_outputs_that_a_file_cannot_hold(simulate, file, tmp_path):
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
def test_a_directory_that_is_read_only(simulate, file, tmp_path):
    tmp_path.chmod(0o500)
    outcome = simulate(f"{file}:scale", *X, "--save", tmp_path / "y.npy")
    tmp_path.chmod(0o700)
    failed(outcome, 2, "no permission")


# --- references


def test_agreement_is_shown_and_in_the_document(simulate, file):
    command = (f"{file}:scale", "--arg", "x=bf16[128,1024]", "--arg", "by=1.7")
    found = simulate(*command, "--reference", f"{file}:reference", "--json").document()
    (entry,) = found["agreement"]
    assert entry["agrees"]
    assert 0 < entry["max_error"] <= entry["allowed"] < entry["largest"]
    page = simulate(*command, "--reference", f"{file}:reference").out
    assert "Values next to kernels.py:reference in fp64" in page
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
def test_references(simulate, file, kernel, function, words):
    x = ("--arg", "x=f32[128,512]", "--target", "trn2")
    outcome = simulate(f"{file}:{kernel}", *x, "--reference", f"{file}:{function}")
    if words is None:
        assert outcome.code == 0, outcome.err
    else:
        failed(outcome, 1, *words)


def test_outputs_are_saved_before_they_are_found_wrong(simulate, file, tmp_path):
    target = tmp_path / "y.npy"
    command = (f"{file}:scale", *X, "--save", target, "--reference", f"{file}:wrong")
    assert simulate(*command).code == 1
    assert np.load(target).shape == (128, 1024)


def test_arguments_of_an_archive_and_of_a_function(simulate, file, tmp_path):
    x = values(np.float32)
    np.savez(tmp_path / "all.npz", x=x, by=np.float32(3))
    np.savez(tmp_path / "brain.npz", x=x.astype(ml_dtypes.bfloat16), y=x)
    source = tmp_path / "inputs.py"
    source.write_text(
        "import numpy as np\n"
        "def given():\n    return {'x': np.ones((128, 1024), np.float32), 'by': 5.0}\n"
        "def other():\n    return 1\n"
    )
    place, out = f"{file}:scale", tmp_path / "y.npy"
    cases = (
        ((f"{source}:given",), 5 * np.ones((128, 1024))),
        ((f"{source}:given", "by=2.0"), 2 * np.ones((128, 1024))),
        ((f"x={tmp_path}/all.npz:x", "by=3.0"), 3 * x),
        ((f"x=f32[{tmp_path}/brain.npz:y]", "by=3.0"), 3 * x),
    )
    for given, expected in cases:
        texts = [word for text in given for word in ("--arg", text)]
        assert simulate(place, *texts, "--save", out).code == 0
        np.testing.assert_array_equal(np.load(out), expected.astype(np.float32))
    np.savez(tmp_path / "all.npz", x=x)
    outcome = simulate(place, "--arg", tmp_path / "all.npz", "--arg", "by=3.0", "--trace-only")
    assert outcome.code == 0, outcome.err
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4")
    for text, code, words in (
        (f"{source}:other", 1, ["other must return a dict", "1"]),
        (f"{source}:gone", 2, ["no function gone"]),
        (f"{tmp_path}/bad.npz", 2, ["bad.npz cannot be read"]),
        (f"{tmp_path}/gone.npz", 2, ["gone.npz"]),
        (f"x={tmp_path}/brain.npz", 2, ["has 2 tensors", "brain.npz:x"]),
        (f"x={tmp_path}/brain.npz:x", 2, ["bf16[", "brain.npz:x]"]),
    ):
        failed(simulate(place, "--arg", text), code, *words)
