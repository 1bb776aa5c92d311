"""Which core, which NKI, and how an op is lowered."""

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import stand_ins
from stand_ins import NeuronMachine

from neuroncore.hardware import MACHINES
from neuronmm_ops.errors import NkiVersionError, NkiVersionWarning
from neuronmm_ops.extras import version_of
from neuronmm_ops.kernels import shim
from neuronmm_ops.ops.backends.environment import (
    core,
    is_installed,
    neuron_package,
    nki_bridge,
    nki_release,
    why_not_compilable,
    wrapper,
    xla_route,
)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[NeuronMachine]:
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:
        yield found


@pytest.mark.parametrize(
    ("instance", "target", "lnc"),
    [
        ("trn1.2xlarge", "trn1", 1),
        ("trn1.32xlarge", "trn1", 1),
        ("trn1n.32xlarge", "trn1", 1),
        ("inf2.xlarge", "trn1", 1),
        ("inf2.48xlarge", "trn1", 1),
        ("trn2.3xlarge", "trn2", 2),
        ("trn2.48xlarge", "trn2", 2),
        ("trn2u.48xlarge", "trn2", 2),
        ("trn3.48xlarge", "trn3", 2),
        ("trn3u.48xlarge", "trn3", 2),
        ("trn3pd98.3xlarge", "trn3", 2),
        ("trn3-dev0", "trn3", 2),
        ("trn3s-es", "trn3", 2),
        ("trn2-ac", "trn2", 2),
        ("trn2", "trn2", 2),
        ("Amazon EC2 trn1.2xlarge", "trn1", 1),
    ],
)
def test_the_instance_type_says_the_target(machine, instance, target, lnc):
    machine.instance(instance)
    found = core()
    assert (found.target, found.lnc, found.known) == (target, lnc, True)
    assert found.source == f"target: instance type {instance}; lnc: default of {target}"


@pytest.mark.parametrize(
    "instance",
    [
        *(None, "m5.large", "inf1.xlarge", "trn10.large", "trn4.48xlarge", "inf20.xlarge", ""),
        *("Virtual PC", "winf2 server", "xtrn2.large", "2trn2.large", "trn 2", "trn-2.large"),
    ],
)
def test_other_machines_are_not_known(machine, instance):
    if instance is not None:
        machine.instance(instance)
    found = core()
    assert (found.target, found.lnc, found.known) == ("trn2", 2, False)
    assert "no Neuron instance found; set NEURON_PLATFORM_TARGET_OVERRIDE" in found.source


def test_the_environment_outranks_the_instance_at_every_call(machine):
    machine.instance("trn1.32xlarge")
    names = {"trn1": "trn1", "inf2": "trn1", "gen3": "trn2", "TRN2": "trn2", "gen4": "trn3",
             "trn3pre": "trn3"}  # fmt: skip
    for name, target in names.items():
        machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE=name)
        found = core()
        assert (found.target, found.lnc) == (target, MACHINES[target].default_lnc)
        assert found.known
        assert "target: NEURON_PLATFORM_TARGET_OVERRIDE" in found.source


@pytest.mark.parametrize(("target", "lnc"), [("trn1", 1), ("trn2", 1), ("trn2", 2), ("trn3", 1)])
def test_lnc(machine, target, lnc):
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE=target, NEURON_LOGICAL_NC_CONFIG=str(lnc))
    assert core().lnc == lnc
    assert core().source.endswith("lnc: NEURON_LOGICAL_NC_CONFIG")


LNC = "NEURON_LOGICAL_NC_CONFIG must be 1, or 2 on trn2 and trn3; got"


@pytest.mark.parametrize(
    ("target", "lnc", "words"),
    [
        ("trn1", "2", f"{LNC} '2' on trn1"),
        ("trn2", "3", f"{LNC} '3' on trn2"),
        ("trn2", "0", f"{LNC} '0' on trn2"),
        ("trn3", "two", f"{LNC} 'two' on trn3"),
        ("trn2", " ", f"{LNC} ' ' on trn2"),
        ("trn9", "1", r"target must be one of trn1, .*; got 'trn9'"),
    ],
)
def test_what_no_machine_has_is_refused(machine, target, lnc, words):
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE=target, NEURON_LOGICAL_NC_CONFIG=lnc)
    with pytest.raises(ValueError, match=words):
        core()


def test_the_placeholder_is_no_nki(machine):
    assert nki_release() is None
    machine.package("nki", "0.0.1", {"nki/__init__.py": ""})
    assert nki_release() is None


@pytest.mark.parametrize("line", stand_ins.BRIDGES)
@pytest.mark.parametrize("patch", [".0", ".1b4", ".0+g1234abcd"])
def test_every_supported_line_has_its_bridge(machine, line, patch):
    machine.nki(line + patch)
    assert nki_release() == line + patch
    assert nki_bridge() == stand_ins.BRIDGES[line].removesuffix(".py").replace("/", ".")
    assert "nki" not in sys.modules, "found without an import"


@pytest.mark.parametrize("version", ["0.8.0", "0.60.1", "1.0", "1"])
def test_a_later_line_is_warned_of_once_and_tried(machine, version):
    machine.package("nki", version, {"nki/__init__.py": ""})
    machine.torch_neuronx()
    with pytest.warns(NkiVersionWarning, match=rf"nki {version} is newer than 0.7") as told:
        assert (nki_release(), nki_release()) == (version, version)
    assert len(told) == 1
    assert why_not_compilable() is None
    assert xla_route() == ("nki", f"nki {version} and torch_neuronx, through itself")


@pytest.mark.parametrize(
    ("version", "files", "words"),
    [
        *[
            (old, {}, rf"nki must be 0.3 or later, got {old};")
            for old in ("0.1.0", "0.0.2", "0.1", "none")
        ],
        (
            "0.7.0",
            {"nki/framework/kernel.py": ""},
            r"nki 0.7.0 must have .*, found none; reinstall it",
        ),
        ("0.7.0", None, "nki is installed without a version; reinstall it"),
    ],
)
def test_old_and_broken_releases_are_refused(machine, version, files, words):
    machine.package("nki", version, {"nki/__init__.py": "", **(files or {})})
    if files is None:  # an interrupted installation
        (machine.root / f"nki-{version}.dist-info" / "METADATA").unlink()
        assert version_of("nki") is None
    for ask in (nki_release, nki_release, xla_route):
        with pytest.raises(NkiVersionError, match=words):
            ask()


def test_the_kernels_do_not_compile_in_0_2(machine):
    machine.nki("0.2.1")
    words = r"kernels need nc_matmul\(accumulate=\), which nki 0.2.1 lacks; install nki 0.7"
    assert re.search(words, why_not_compilable() or "")


@pytest.mark.parametrize("version", ["0.3.0", "0.7.0", "0.9.0"])
@pytest.mark.filterwarnings("ignore::neuronmm_ops.errors.NkiVersionWarning")
def test_what_an_imported_nki_has_decides(machine, monkeypatch, version):
    machine.nki(version)
    assert why_not_compilable() is None
    functions = {name: None for name in dir(shim.nisa) if name != "sendrecv"}
    monkeypatch.setattr(shim, "nisa", SimpleNamespace(**functions))
    monkeypatch.setitem(sys.modules, "nki.isa", ModuleType("nki.isa"))
    assert f"need sendrecv, which nki {version} lacks" in (why_not_compilable() or "")


def test_is_installed_imports_no_parent(machine):
    bad = "raise AssertionError('imported')"
    machine.package("nki", "0.6.0", {"nki/framework/kernel.py": ""})
    (machine.root / "nki" / "__init__.py").write_text(bad)
    assert is_installed("nki.framework.kernel")
    assert not is_installed("nki.framework.absent")
    assert not is_installed("nki.absent.kernel")
    assert not is_installed("no_such_package.part")


def test_a_folder_without_init_is_a_package_too(machine):
    machine.package("part", "1.0", {"part/__init__.py": ""})
    (machine.root / "part" / "inner").mkdir()
    (machine.root / "part" / "inner" / "leaf.py").touch()
    names = ("part.inner.leaf", "part.inner", "part.inner.other", "part.inner.leaf.below")
    assert [is_installed(name) for name in names] == [True, True, False, False]


def test_of_both_packages_one_is_imported(machine):
    """Each registers PrivateUse1 for itself, and the second fails."""
    machine.torch_neuronx("direct")
    source = "raise AssertionError('imported')"
    machine.package("libtorch_neuronx_lite", "2.11.0", {"libtorch_neuronx_lite/nki/nki_hop.py": ""})
    (machine.root / "libtorch_neuronx_lite" / "__init__.py").write_text(source)
    assert neuron_package() == "torch_neuronx"
    assert wrapper("wrap_nki") is None


def test_the_name_torch_neuronx_may_mean_the_other_package(machine, monkeypatch):
    machine.torch_neuronx("wrap_nki in lite")
    lite = importlib.import_module("libtorch_neuronx_lite")
    monkeypatch.setitem(sys.modules, "torch_neuronx", lite)
    assert neuron_package() == "libtorch_neuronx_lite"
    assert wrapper("wrap_nki") is stand_ins.wrap_nki


@pytest.mark.parametrize("module", [ModuleType("torch_neuronx"), MagicMock()], ids=type)
def test_a_module_made_by_hand_is_installed(machine, monkeypatch, module):
    monkeypatch.setitem(sys.modules, "torch_neuronx", module)
    assert is_installed("torch_neuronx")
    assert not is_installed("torch_neuronx.nki_hop")
    assert neuron_package() == "torch_neuronx"
    assert xla_route().reason == "nki is not installed"


def test_a_blocked_module_is_not_installed(machine, monkeypatch):
    machine.torch_neuronx()
    monkeypatch.setitem(sys.modules, "torch_neuronx", None)
    assert not is_installed("torch_neuronx")
    assert neuron_package() is None


@pytest.mark.parametrize(
    ("packages", "name", "reason"),
    [
        ({}, "custom call", "nki and torch_neuronx are not installed"),
        ({"nki": ()}, "custom call", "torch_neuronx is not installed"),
        ({"torch_neuronx": ()}, "custom call", "nki is not installed"),
        (
            # what vllm-neuron installs does not bring XLA
            {"nki": (), "torch_neuronx": ("wrap_nki in lite",)},
            *("custom call", "torch_neuronx is not installed"),
        ),
        (
            {"nki": (), "torch_neuronx": ()},
            *("nki", "nki 0.7.0 and torch_neuronx, through nki.framework._torch_xla"),
        ),
    ],
)
def test_the_packages_choose_the_route(machine, packages, name, reason):
    for package, arguments in packages.items():
        getattr(machine, package)(*arguments)
    assert xla_route() == (name, reason)


def test_the_composite_is_asked_for(machine):
    machine.nki()
    machine.torch_neuronx()
    machine.environment(NEURONMM_XLA="composite")
    reason = "two dots per pair, asked for by NEURONMM_XLA=composite"
    assert xla_route() == ("composite", reason)
    machine.environment(NEURONMM_XLA="")
    assert xla_route().name == "nki"


@pytest.mark.parametrize("value", ["nki", "Composite", "1", " "])
def test_no_other_route_can_be_asked_for(machine, value):
    machine.environment(NEURONMM_XLA=value)
    with pytest.raises(ValueError, match=f"NEURONMM_XLA must be composite or empty; got '{value}'"):
        xla_route()
