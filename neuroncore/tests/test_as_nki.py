"""The simulator under the name `nki`, as published kernels import it."""

import importlib
import sys
import types

import pytest
from samples import data, equal

import neuroncore as nc
import neuroncore.isa as nisa
import neuroncore.language as nl

SOURCE = """
import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
from nki.language import NKIObject
from nki.isa import dma_copy

@nki.jit(mode="auto")
def add(a: nt.tensor[4, 6], b: nt.mutable_tensor[4, 6]):
    x, y = nl.load(a), nl.load(b)
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
    dma_copy(dst=out, src=x)
    return out

def answer(a, b):
    return nki.simulate(add)(a, b)
"""


def test_as_nki_runs_published_source_and_leaves_nothing():
    module = types.ModuleType("published")
    with nc.as_nki() as nki:
        exec(SOURCE, vars(module))  # noqa: S102 - our own text
        assert nki.dtype.bfloat16 is nl.bfloat16
        assert importlib.import_module("nki.isa") is nisa
    equal(module.answer(data((4, 6)), data((4, 6), seed=1)), data((4, 6)) + data((4, 6), seed=1))
    assert not [name for name in sys.modules if name.partition(".")[0] == "nki"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nki")


def test_as_nki_does_not_shadow_a_real_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "nki", types.ModuleType("nki"))
    with pytest.raises(RuntimeError, match="is installed"), nc.as_nki():
        pass
    monkeypatch.undo()
    (tmp_path / "nki.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="is installed"), nc.as_nki():
        pass
    assert "nki" not in sys.modules


def test_an_error_inside_as_nki_takes_the_name_away():
    with pytest.raises(KeyError), nc.as_nki():
        raise KeyError
    assert "nki" not in sys.modules
