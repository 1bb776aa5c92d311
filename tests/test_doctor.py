"""What `diagnose` says of the Neuron backends, on machines with and without the packages."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import stand_ins
import torch
from stand_ins import NeuronMachine

from neuronmm_ops.doctor import diagnose
from neuronmm_ops.errors import NkiVersionWarning


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[NeuronMachine]:
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:
        yield found
        assert not {"nki", "torch_neuronx", "libtorch_neuronx_lite", "torch_xla"} & set(
            sys.modules
        ), "imported"


OWN = ".".join(torch.__version__.split(".")[:2]) + ".0"


def torch_xla(machine, version=OWN):
    machine.package("torch_xla", version, {"torch_xla/__init__.py": ""})


def backend(name):
    (found,) = [b for b in diagnose()["backends"] if b["name"] == name]
    assert list(found) == ["name", "usable", "reason"]
    assert "\n" not in found["reason"]
    return found["usable"], found["reason"]


def test_a_cuda_build_without_a_device_names_the_smaller_one(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    usable, reason = backend("cuda")
    assert not usable
    assert reason.endswith("see https://download.pytorch.org/whl/cpu")


# --- xla -----------------------------------------------------------------------------------------


def test_xla_is_missing(machine):
    usable, reason = backend("xla")
    assert not usable
    assert reason == "torch_xla is not installed; run: pip install 'neuronmm-ops[xla]'"


def test_a_torch_xla_of_another_torch_does_not_load(machine):
    torch_xla(machine, "2.5.0")
    usable, reason = backend("xla")
    assert not usable
    assert reason.startswith(
        f"torch_xla and torch must be of one line, got 2.5.0 and {torch.__version__}; run: pip"
    )


def test_xla_without_neuron(machine):
    torch_xla(machine)
    assert backend("xla") == (
        False,
        f"torch_xla {OWN}; lowered as custom call: nki and torch_neuronx are not installed; target "
        "trn2, lnc 2 (target: no Neuron instance found; set NEURON_PLATFORM_TARGET_OVERRIDE; lnc: "
        "default of trn2); to be read or exported; to run the ops set NEURONMM_XLA=composite",
    )


def test_xla_with_neuron(machine):
    torch_xla(machine)
    machine.nki("0.3.0")
    machine.torch_neuronx()
    usable, reason = backend("xla")
    assert not usable, "nki would compile for a guessed core"
    assert "set NEURON_PLATFORM_TARGET_OVERRIDE" in reason
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2", NEURON_LOGICAL_NC_CONFIG="1")
    assert backend("xla") == (
        True,
        f"torch_xla {OWN}; lowered as nki: nki 0.3.0 and torch_neuronx, through "
        "nki.framework.torch_xla; target trn2, lnc 1 (target: NEURON_PLATFORM_TARGET_OVERRIDE; "
        "lnc: NEURON_LOGICAL_NC_CONFIG)",
    )


def test_an_nki_too_old_for_the_kernels(machine):
    torch_xla(machine)
    machine.nki("0.2.0")
    machine.torch_neuronx()
    machine.instance("trn1.32xlarge")
    for name in ("xla", "neuron"):
        usable, reason = backend(name)
        assert not usable
        assert (
            "kernels need nc_matmul(accumulate=), which nki 0.2.0 lacks; install nki 0.7" in reason
        )


def test_xla_by_composite(machine):
    torch_xla(machine)
    machine.nki("0.2.0")
    machine.environment(NEURONMM_XLA="composite", NEURON_LOGICAL_NC_CONFIG="nonsense")
    usable, reason = backend("xla")
    assert usable, "plain matmuls need no NKI and no core"
    assert "lowered as composite: two dots per pair, asked for by NEURONMM_XLA" in reason


# --- neuron --------------------------------------------------------------------------------------


def test_neuron_is_missing(machine):
    usable, reason = backend("neuron")
    assert not usable
    assert reason.startswith("needs nki and torch_neuronx; run: pip install 'neuronmm-ops[neuron]'")


@pytest.mark.parametrize(
    ("offers", "call_mode"),
    [
        ("nki_op", "through nki_op"),
        ("wrap_nki", "through wrap_nki"),
        ("wrap_nki in nki_hop", "through wrap_nki"),
        ("direct", "directly"),
    ],
)
def test_neuron_says_the_call_mode(machine, offers, call_mode):
    machine.nki()
    machine.torch_neuronx(offers)
    machine.instance("trn2.48xlarge")
    assert backend("neuron") == (
        True,
        f"torch_neuronx 2.13.3.0 and nki 0.7.0; kernels called {call_mode}; target trn2, lnc 2 "
        "(target: instance type trn2.48xlarge; lnc: default of trn2); "
        "set NEURON_PLATFORM_TARGET_OVERRIDE=trn2: NKI looks it up at every call, slowly",
    )
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    assert backend("neuron")[1].endswith("; lnc: default of trn2)")


def test_neuron_through_what_vllm_neuron_installs(machine):
    machine.nki()
    machine.torch_neuronx("wrap_nki in lite", "2.11.0.1.0.1284")
    machine.instance("trn2.3xlarge")
    assert backend("neuron") == (
        True,
        "libtorch_neuronx_lite 2.11.0.1.0.1284 and nki 0.7.0; kernels called through wrap_nki, in "
        "compiled graphs only; target trn2, lnc 2 (target: instance type trn2.3xlarge; lnc: "
        "default of trn2); set NEURON_PLATFORM_TARGET_OVERRIDE=trn2: NKI looks it up at every "
        "call, slowly",
    )
    assert diagnose()["versions"]["libtorch-neuronx-lite"] == "2.11.0.1.0.1284"


def test_with_both_packages_torch_neuronx_is_taken(machine):
    machine.nki()
    machine.torch_neuronx("wrap_nki in lite", "2.11.0")
    machine.torch_neuronx("nki_op")
    machine.instance("trn2.3xlarge")
    usable, reason = backend("neuron")
    assert usable
    assert reason.startswith("torch_neuronx 2.13.3.0 and nki 0.7.0; kernels called through nki_op;")


@pytest.mark.parametrize(
    ("version", "has_device"),
    [("2.9.0.2.15.32035", False), ("2.8.0", False), ("1.13.1", False), ("2.10.0", True)],
)
def test_the_torch_neuronx_of_xla_has_no_device_neuron(machine, version, has_device):
    machine.nki()
    machine.torch_neuronx(version=version)
    machine.instance("trn2.48xlarge")
    usable, reason = backend("neuron")
    assert usable == has_device
    if not has_device:
        assert reason == (
            f"torch_neuronx {version} is for PyTorch/XLA; the device neuron came with 2.10"
        )


def test_neuron_on_another_machine(machine):
    machine.nki()
    machine.torch_neuronx()
    usable, reason = backend("neuron")
    assert not usable
    assert "no Neuron instance found; set NEURON_PLATFORM_TARGET_OVERRIDE" in reason


def test_a_torch_neuronx_made_by_hand(machine, monkeypatch):
    machine.nki()
    machine.instance("trn2.3xlarge")
    monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))
    usable, reason = backend("neuron")
    assert usable
    assert reason.startswith("torch_neuronx without a version and nki 0.7.0; kernels called direct")
    monkeypatch.delitem(sys.modules, "torch_neuronx")


# --- errors are lines ----------------------------------------------------------------------------


def test_the_placeholder_is_named(machine):
    torch_xla(machine)
    machine.package("nki", "0.0.1", {"nki/__init__.py": ""})
    machine.torch_neuronx()
    words = "nki 0.0.1 is the empty placeholder of the default package index"
    assert words in backend("xla")[1]
    usable, reason = backend("neuron")
    assert not usable
    assert reason.startswith(f"needs nki; {words}; install nki from the Neuron index; run: pip ")


def test_a_later_nki_is_tried(machine):
    machine.nki("0.8.1")
    machine.torch_neuronx()
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    with pytest.warns(NkiVersionWarning):
        usable, reason = backend("neuron")
    assert usable
    assert "; nki 0.8.1 is newer than 0.7, the last line that this package was tested" in reason


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.1.0", "nki must be 0.3 or later"),
        ("0.7.0", "must have nki.framework._torch_xla, nki.framework.torch_xla or nki._torch_xla"),
    ],
)
def test_an_unusable_nki(machine, version, words):
    torch_xla(machine)
    machine.package("nki", version, {"nki/__init__.py": ""})
    machine.torch_neuronx()
    for name in ("xla", "neuron"):
        usable, reason = backend(name)
        assert not usable
        assert words in reason


@pytest.mark.parametrize(
    "variable", ["NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG", "NEURONMM_XLA"]
)
def test_a_bad_environment(machine, variable):
    torch_xla(machine)
    machine.environment(**{variable: "nonsense"})
    usable, reason = backend("xla")
    assert not usable
    assert "'nonsense'" in reason
