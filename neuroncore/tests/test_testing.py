"""`assert_kernel`: values, rules and modelled times in tests of others, and pytest's options."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl
from neuroncore import testing
from neuroncore.testing import assert_kernel

X = np.random.default_rng(0).standard_normal((128, 512)).astype(ml_dtypes.bfloat16)


@nc.jit
def scaled(x, factor=2.0, copies=1):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_scalar(tile, tile, nl.multiply, factor)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    for _ in range(copies):
        nisa.dma_copy(out, tile)
    return out


@nc.jit
def half(x):
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out[0:64], x[0:64])
    return out


@nc.jit
def refused(x):
    tile = nl.ndarray((256, 4), x.dtype)
    nisa.dma_copy(tile, x)


def reference(x, factor=2.0):
    return x * factor


def fails(*args, **kwargs):
    with pytest.raises(AssertionError) as raised:
        assert_kernel(*args, **kwargs)
    return str(raised.value)


@pytest.fixture(autouse=True)
def chosen(monkeypatch, tmp_path):
    """Pytest's options as if they were not given, in a directory of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(testing._Chosen, "update", False)
    monkeypatch.setattr(testing._Chosen, "artifacts", None)
    return testing._Chosen


def test_a_right_kernel_on_two_targets():
    profiles = assert_kernel(scaled, (X, 3.0), reference, max_time_ms=1.0, targets=("trn1", "trn2"))
    assert [p.target for p in profiles.values()] == list(profiles) == ["trn1", "trn2"]
    assert_kernel(scaled, {"x": torch.from_numpy(X.astype(np.float32)).bfloat16()}, reference)
    assert_kernel(scaled.func, {"x": X})


def test_wrong_values_are_said_with_what_is_allowed():
    message = fails(scaled, (X, 2.1), lambda x: 2.0 * x)
    assert message.startswith("scaled(x [128, 512] bfloat16, factor 2.1) on trn2: values: output 0")
    assert "is off by 0." in message
    assert "beyond 0.295" in message
    assert message.endswith("of <lambda> in fp64")
    assert_kernel(scaled, (X, 2.1), lambda x: 2.0 * x, rtol=0.1)
    assert "beyond 0.00944" in fails(scaled, (X, 2.1), lambda x: 2.0 * x, rtol=1e-3)
    assert "output 0 is [128, 512], of <lambda> [1, 128, 512]" in fails(
        scaled, (X,), lambda x: x[None]
    )
    assert "returns 1 tensors, <lambda> 0" in fails(scaled, (X,), lambda x: None)


def test_a_broken_rule_is_named_with_its_line():
    message = fails(refused, (X,))
    line = refused.func.__code__.co_firstlineno + 2
    assert "on trn2: rule partition: nl.ndarray [256, 4]" in message
    assert message.endswith(f"tile the first dimension by 128 [test_testing.py:{line}]")


def test_a_warning_fails_unless_it_is_allowed():
    message = fails(half, (X,))
    assert "rule kernel-output: kernel output" in message
    assert 'mend it, or allow=("kernel-output",)' in message
    assert_kernel(half, (X,), allow=("kernel-output",))
    with pytest.raises(ValueError, match="allow: kernel-outpt is no rule of budget, "):
        assert_kernel(half, (X,), allow=("kernel-outpt",))


def test_a_bound_of_the_time_and_every_other_problem_at_once():
    (profile,) = assert_kernel(scaled, (X,)).values()
    assert_kernel(scaled, (X,), max_time_ms=profile.time_ms)
    first, second = fails(scaled, (X,), lambda x: x, max_time_ms=1e-4).splitlines()
    assert "values: " in first
    assert f"time: {profile.time_ms:.4g} ms (modelled; range " in second
    assert "is more than max_time_ms=0.0001; " in second


def test_the_kernels_arguments_stay_as_they_are():
    given = X.copy()

    @nc.jit
    def in_place(x):
        tile = nl.ndarray(x.shape, x.dtype)
        nisa.dma_copy(tile, x)
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
        nisa.dma_copy(x, tile)
        return x

    assert_kernel(in_place, (given,), reference, targets=("trn1", "trn2"))
    assert (given == X).all()


def test_stored_times(chosen, tmp_path):
    path = tmp_path / "times.json"
    assert "times.json has no such entry; store it with pytest --neuron" in fails(
        scaled, (X,), baseline=path
    )
    assert not path.exists()
    chosen.update = True
    assert_kernel(scaled, (X,), baseline=path, targets=("trn2", "trn1"))
    text = path.read_text()
    assert_kernel(scaled, (X,), baseline=path, targets=("trn1", "trn2"))
    assert path.read_text() == text
    stored = json.loads(text)
    assert list(stored) == [f"scaled(x [128, 512] bfloat16) on {t}" for t in ("trn1", "trn2")]
    entry = stored["scaled(x [128, 512] bfloat16) on trn2"]
    assert list(entry) == sorted(entry) == ["kernel", "neuroncore", "range_ms", "target", "time_ms"]
    low, high = entry["range_ms"]
    assert low <= entry["time_ms"] <= high
    chosen.update = False
    assert_kernel(scaled, (X,), baseline=path)
    entry |= {"time_ms": entry["time_ms"] / 1.5, "neuroncore": "0.0.1"}
    path.write_text(json.dumps(stored))
    message = fails(scaled, (X,), baseline=path)
    assert "is 50.0% more than" in message
    assert "times.json, whose clock is that of neuroncore 0.0.1; " in message
    assert message.endswith("store it with pytest --neuroncore-update-baselines")
    entry["time_ms"] *= 3  # quicker than stored is no failure
    path.write_text(json.dumps(stored))
    assert_kernel(scaled, (X,), baseline=path)


def test_a_named_time_is_in_the_working_directory(chosen, tmp_path):
    chosen.update = True
    assert_kernel(scaled, (X,), baseline="small")
    stored = json.loads((tmp_path / "neuroncore-baselines.json").read_text())
    assert list(stored) == ["small on trn2"]
    chosen.update = False
    assert "small on trn2: baseline: " in fails(scaled, (X, 2.0, 40), baseline="small")


@pytest.mark.parametrize("entry", ["{}", "[]", '{"time_ms": 0, "range_ms": [1, 2]}', "3"])
def test_a_file_of_something_else_is_told(tmp_path, entry):
    path = tmp_path / "times.json"
    path.write_text('{"scaled(x [128, 512] bfloat16) on trn2": ' + entry + "}")
    assert "has no time_ms and range_ms" in fails(scaled, (X,), baseline=path)
    path.write_text("no JSON")
    with pytest.raises(ValueError, match="is no JSON document"):
        assert_kernel(scaled, (X,), baseline=path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="holds no stored times"):
        assert_kernel(scaled, (X,), baseline=path)


def test_an_array_in_the_place_of_the_arguments():
    with pytest.raises(TypeError, match="args must be a tuple or a dict of arguments; got ndarray"):
        assert_kernel(scaled, X)
    assert list(assert_kernel(scaled, (X,), targets="trn1")) == ["trn1"]


def test_timeline_pages(chosen, tmp_path):
    chosen.artifacts = tmp_path / "pages" / "deep"
    assert_kernel(scaled, (X,))
    assert not chosen.artifacts.exists()
    assert_kernel(scaled, (X,), timeline=True)
    (page,) = chosen.artifacts.iterdir()
    assert page.name == "scaled-x-128-512-bfloat16-on-trn2.html"
    message = fails(scaled, (X,), lambda x: x, baseline="named/../so")
    assert message.splitlines()[0].endswith(f"[{chosen.artifacts}/named-..-so-on-trn2.html]")
    assert len(list(chosen.artifacts.iterdir())) == 2


TEST = """\
import numpy as np
from kernels import scale
from neuroncore.testing import assert_kernel

def test_scale():
    assert_kernel(scale, (np.ones((4, 512), np.float32),), baseline="scale", max_time_ms={most})
"""


@pytest.mark.slow
def test_the_options_of_pytest(tmp_path, file):
    (tmp_path / "kernels.py").write_text(file.read_text())
    (tmp_path / "test_scale.py").write_text(TEST.format(most=1))

    def pytest_with(*options):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "neuroncore", "--rootdir", "."]
        return subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False
        ).stdout

    assert "has no such entry" in pytest_with("--neuroncore-artifacts", "pages")
    assert [p.name for p in (tmp_path / "pages").iterdir()] == ["scale-on-trn2.html"]
    assert "1 passed" in pytest_with("--neuroncore-update-baselines")
    assert "1 passed" in pytest_with()
    (tmp_path / "test_scale.py").write_text(TEST.format(most=1e-6))
    report = pytest_with()
    assert "AssertionError: scale on trn2: time: " in report
    assert "testing.py" not in report, "the trace ends in the test"
