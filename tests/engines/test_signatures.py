"""The stand-ins have the signatures of the engines' sources, and a signature that moved is told."""

import inspect
import os
import sys
from functools import reduce
from pathlib import Path

import nxdi_stand_ins
import optimum_stand_ins
import pytest

sys.path.append(str(Path(__file__).with_name("sources")))

import signatures
from checkouts import CHECKOUTS


def parameters(function: object) -> list[str]:
    """As `signatures.of_arguments`, of an object."""
    found: list[str] = []
    for parameter in inspect.signature(getattr(function, "__func__", function)).parameters.values():  # pyright: ignore
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        end = "" if parameter.default is parameter.empty else "="
        found.append(f"{mark}{parameter.name}{end}")
    return found


def stood_in() -> list[tuple[str, str, str]]:
    """What the stand-ins have of the functions that are used: checkout, file, name."""
    modules = nxdi_stand_ins.modules()
    return [
        (folder, file, name)
        for folder in ("nxd", "nxdi")
        for file, names in signatures.committed(folder).items()
        for name in names
        if hasattr(modules.get(module_of(file)), name.partition(".")[0])
    ]


def module_of(file: str) -> str:
    """The module of a file of a checkout."""
    return file.removeprefix("src/").removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize(("folder", "file", "name"), stood_in())
def test_a_stand_in_takes_what_the_source_takes(folder, file, name):
    stand_in = reduce(getattr, name.split("."), nxdi_stand_ins.modules()[module_of(file)])
    assert parameters(stand_in) == signatures.committed(folder)[file][name]


OPTIMUM = {
    "llama/modeling_llama.py": (optimum_stand_ins.NeuronLlamaMLP, "NeuronLlamaMLP"),
    "attention/gqa.py": (optimum_stand_ins.QKV, "GroupQueryAttention_QKV"),
    "modules/attention/gqa.py": (optimum_stand_ins.O, "GroupQueryAttention_O"),
}


@pytest.mark.parametrize(("end", "stand_in", "name"), [(k, *v) for k, v in OPTIMUM.items()])
def test_optimum_neurons_forward_is_the_sources(end, stand_in, name):
    own = signatures.committed("optimum-neuron")
    (file,) = [file for file in own if file.endswith(end)]
    assert parameters(stand_in.forward) == own[file][f"{name}.forward"]


def test_the_stand_ins_cover_the_layers():
    assert len(stood_in()) >= 16


def test_the_committed_signatures_are_of_the_commits_that_are_run():
    document = signatures.json.loads(signatures.COMMITTED.read_text())
    assert document.keys() == signatures.USED.keys()
    for folder, own in document.items():
        assert own["commit"] == CHECKOUTS[folder].commit
        for file, names in signatures.USED[folder].items():
            assert sorted(own["signatures"][file]) == sorted(names)
            assert all(own["signatures"][file].values())


def test_a_signature_that_moved_is_a_line(tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()
    source = "class A:\n    def f(self, x, /, y=1, *rest, z, w=2, **more): ...\n"
    (tmp_path / "made/a.py").write_text(f"{source}def g(x): ...\n")
    monkeypatch.setitem(signatures.USED, "made", {"a.py": ("A.f", "g", "gone")})
    found = signatures.signatures(tmp_path, "made")
    wanted = ["self", "x", "y=", "*rest", "z", "w=", "**more"]
    assert found == {"a.py": {"A.f": wanted, "g": ["x"], "gone": None}}
    monkeypatch.setattr(signatures, "committed", lambda _: found)
    assert signatures.moved(tmp_path, "made") == []
    (tmp_path / "made/a.py").write_text(source.replace("y=1", "y"))
    lines = signatures.moved(tmp_path, "made")
    assert [line.partition(" must take ")[0] for line in lines] == [
        "made/a.py: A.f",
        "made/a.py: g",
    ]


@pytest.mark.parametrize("folder", signatures.USED)
def test_the_sources_are_as_committed(folder):
    directory = os.environ.get("ENGINE_SOURCES")
    if directory is None:
        pytest.skip("ENGINE_SOURCES names no folder of checkouts")
    assert signatures.moved(Path(directory), folder) == []
