"""The kernels are legal under both front ends of NKI, the parser of 0.6 and the tracing of 0.7."""

import sys
from pathlib import Path

import numpy as np
import pytest

from neuroncore import simulate
from neuroncore.checks.lint import LINES, lint
from neuroncore.memory.tensor import NkiTensor
from neuronmm_ops import kernels
from neuronmm_ops.kernels import front_end
from neuronmm_ops.kernels.rms_norm.prefill import rms_norm
from neuronmm_ops.kernels.xuv.decode import xuv_decode
from neuronmm_ops.kernels.xuv.prefill import xuv

FOLDER = Path(kernels.__file__).parent
FILES = sorted(p for p in FOLDER.rglob("*.py") if "\n@jit\n" in p.read_text(encoding="utf-8"))


@pytest.mark.parametrize("nki", LINES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_kernel_is_clean_in_both_lines(path, nki):
    assert lint(path, nki) == []


def test_all_kernels_are_read():
    assert len(FILES) >= 12


@pytest.mark.parametrize(
    ("version", "asked", "parsed"),
    [
        (None, "", False),
        ("", "", False),  # an interrupted installation
        ("0.0.1", "", False),
        ("0.3.0", "", True),
        ("0.6.1", "", True),
        ("0.6.0", "tracer", False),
        ("0.7.0", "", False),
        ("0.7.0", "custom", True),
        ("0.7.0", "parser", True),
        ("0.10.0", "", False),
    ],
)
def test_which_front_end_reads_the_kernels(monkeypatch, tmp_path, version, asked, parsed):
    if version is not None:
        information = tmp_path / f"nki-{version or '0.7.0'}.dist-info"
        information.mkdir()
        stated = f"Version: {version}\n" if version else ""
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nki\n{stated}")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("NKI_COMPILER_FRONTEND", asked)
    assert front_end.is_parsed() is parsed


@pytest.mark.parametrize("is_none", [front_end.equals_none, front_end.is_the_none])
def test_both_forms_say_what_is_missing(is_none):
    assert is_none(None)
    assert not any(map(is_none, (0, "", (), [], object())))


def test_no_kernel_asks_a_tensor_what_equality_means(monkeypatch):
    """While NKI 0.7 traces, `==` is what a tensor makes of it."""

    def refuse(self, other):
        raise AssertionError(f"a tensor was compared with {other!r}")

    monkeypatch.setattr(NkiTensor, "__eq__", refuse)
    monkeypatch.setattr(NkiTensor, "__ne__", refuse)
    rng = np.random.default_rng(0)
    x, u, v, bias = (
        rng.normal(size=shape).astype(np.float32) for shape in ((4, 64), (64, 32), (32, 48), (48,))
    )
    scales = np.ones(32, np.float32), np.ones(48, np.float32)
    for kernel in (xuv, xuv_decode):
        for b in (None, bias):
            expected = x @ u @ v + (0 if b is None else b)
            np.testing.assert_allclose(simulate(kernel, x, u, v, b).outputs, expected, rtol=1e-4)
        as_int8 = u.astype(np.int8), v.astype(np.int8)
        scaled = simulate(kernel, x, *as_int8, bias, *scales).outputs
        expected = x @ as_int8[0].astype(np.float32) @ as_int8[1].astype(np.float32) + bias
        np.testing.assert_allclose(scaled, expected, rtol=1e-3, atol=1e-3)
    weight = np.ones(64, np.float32)
    assert simulate(rms_norm, x, None, weight).outputs.shape == x.shape
    assert simulate(rms_norm, x, x, weight).outputs[0].shape == x.shape
