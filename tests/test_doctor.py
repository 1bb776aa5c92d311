"""What `diagnose` says of the Neuron backends, on machines with and without the packages."""

import re
import sys
from types import ModuleType

import pytest
import stand_ins
import torch

from neuronmm_ops.doctor import diagnose
from neuronmm_ops.errors import NkiVersionWarning

OWN = ".".join(torch.__version__.split(".")[:2]) + ".0"
TARGET, LNC = "NEURON_PLATFORM_TARGET_OVERRIDE", "NEURON_LOGICAL_NC_CONFIG"
OLD_NKI = {"xla": OWN, "nki": "0.2.0", "neuronx": "nki_op"}
NO_NKI = {"xla": OWN, "nki": "0.0.1", "neuronx": "nki_op"}
ON_TRN2 = {"nki": "0.7.0", "neuronx": "nki_op", "instance": "trn2.48xlarge"}
EMPTY = "nki 0.0.1 is the empty placeholder of the default package index"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of packages' versions, an instance type and environment variables."""
    packages = {"nki", "torch_neuronx", "libtorch_neuronx_lite", "torch_xla"}
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:

        def install(
            *, xla=None, nki=None, neuronx=None, version="2.13.3.0", instance=None, **names
        ):
            if xla:
                found.package("torch_xla", xla, {"torch_xla/__init__.py": ""})
            if nki in ("0.0.1", "0.1.0", "no bridge"):
                release = nki.replace("no bridge", "0.7.0")
                found.package("nki", release, {"nki/__init__.py": ""})
            elif nki:
                found.nki(nki)
            for offers in [neuronx] if isinstance(neuronx, str) else neuronx or []:
                found.torch_neuronx(offers, version)
            if instance:
                found.instance(instance)
            found.environment(**names)

        yield install
        assert not packages & set(sys.modules), "imported"


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


@pytest.mark.parametrize(
    ("what", "name", "usable", "said"),
    [
        ({}, "xla", False, "torch_xla is not installed; run: pip install 'neuronmm-ops[xla]'"),
        (
            {"xla": "2.5.0"},
            *("xla", False, "torch_xla and torch must be of one line, got 2.5.0 and *; run: pip*"),
        ),
        (
            {"xla": OWN},
            *("xla", False),
            f"torch_xla {OWN}; lowered as custom call: nki and torch_neuronx are not installed; "
            "target trn2, lnc 2 (target: no Neuron instance found; set "
            f"{TARGET}; lnc: default of trn2); to be read or exported; to run the ops set "
            "NEURONMM_XLA=composite",
        ),
        # NKI would compile for a guessed core.
        ({"xla": OWN, "nki": "0.3.0", "neuronx": "nki_op"}, "xla", False, f"*set {TARGET}*"),
        (
            {"xla": OWN, "nki": "0.3.0", "neuronx": "nki_op", TARGET: "trn2", LNC: "1"},
            *("xla", True),
            f"torch_xla {OWN}; lowered as nki: nki 0.3.0 and torch_neuronx, through "
            f"nki.framework.torch_xla; target trn2, lnc 1 (target: {TARGET}; lnc: {LNC})",
        ),
        *[
            (
                {**OLD_NKI, "instance": "trn1.32xlarge"},
                *(
                    name,
                    False,
                    "*kernels need nc_matmul(accumulate=), which nki 0.2.0 lacks; install nki 0.7*",
                ),
            )
            for name in ("xla", "neuron")
        ],
        # Plain matmuls need no NKI and no core.
        (
            {"xla": OWN, "nki": "0.2.0", "NEURONMM_XLA": "composite", LNC: "nonsense"},
            *("xla", True),
            "*lowered as composite: two dots per pair, asked for by NEURONMM_XLA*",
        ),
        (
            {},
            *("neuron", False),
            "needs nki and torch_neuronx; run: pip install 'neuronmm-ops[neuron]'*",
        ),
        *[
            (
                {**ON_TRN2, "neuronx": offers},
                *("neuron", True),
                f"torch_neuronx 2.13.3.0 and nki 0.7.0; kernels called {mode}; target trn2, lnc 2 "
                f"(target: instance type trn2.48xlarge; lnc: default of trn2); set {TARGET}=trn2: "
                "NKI looks it up at every call, slowly",
            )
            for offers, mode in (
                ("nki_op", "through nki_op"),
                ("wrap_nki", "through wrap_nki"),
                ("wrap_nki in nki_hop", "through wrap_nki"),
                ("direct", "directly"),
            )
        ],
        ({**ON_TRN2, TARGET: "trn2"}, "neuron", True, "*; lnc: default of trn2)"),
        # What vllm-neuron installs.
        (
            {**ON_TRN2, "neuronx": "wrap_nki in lite", "version": "2.11.0.1.0.1284"},
            *("neuron", True),
            "libtorch_neuronx_lite 2.11.0.1.0.1284 and nki 0.7.0; kernels called through wrap_nki,"
            " in compiled graphs only; target trn2, lnc 2 (target: instance type trn2.48xlarge; "
            f"lnc: default of trn2); set {TARGET}=trn2: NKI looks it up at every call, slowly",
        ),
        (
            {**ON_TRN2, "neuronx": ["wrap_nki in lite", "nki_op"]},
            *("neuron", True),
            "torch_neuronx 2.13.3.0 and nki 0.7.0; kernels called through nki_op;*",
        ),
        *[
            (
                {**ON_TRN2, "version": version},
                *("neuron", False),
                f"torch_neuronx {version} is for PyTorch/XLA; the device neuron came with 2.10",
            )
            for version in ("2.9.0.2.15.32035", "2.8.0", "1.13.1")
        ],
        ({**ON_TRN2, "version": "2.10.0"}, "neuron", True, "torch_neuronx 2.10.0 and nki 0.7.0;*"),
        (
            {"nki": "0.7.0", "neuronx": "nki_op"},
            *("neuron", False, f"*no Neuron instance found; set {TARGET}*"),
        ),
        # What cannot be is one line.
        (NO_NKI, "xla", False, f"*{EMPTY}*"),
        (
            NO_NKI,
            *("neuron", False),
            f"needs nki; {EMPTY}; install nki from the Neuron index; run: pip *",
        ),
        *[
            ({"xla": OWN, "nki": nki, "neuronx": "nki_op"}, name, False, f"*{words}*")
            for nki, words in (
                ("0.1.0", "nki must be 0.3 or later"),
                (
                    "no bridge",
                    "must have nki.framework._torch_xla, nki.framework.torch_xla or nki._torch_xla",
                ),
            )
            for name in ("xla", "neuron")
        ],
        *[
            ({"xla": OWN, variable: "nonsense"}, "xla", False, "*'nonsense'*")
            for variable in (TARGET, LNC, "NEURONMM_XLA")
        ],
    ],
)
def test_a_backend_says_what_it_has_or_lacks(machine, what, name, usable, said):
    """A star in what is said is any text."""
    machine(**what)
    found = backend(name)
    assert found[0] == usable
    assert re.fullmatch(".*".join(map(re.escape, said.split("*"))), found[1]), found[1]


def test_the_versions_name_what_vllm_neuron_installs(machine):
    machine(neuronx="wrap_nki in lite", version="2.11.0.1.0.1284")
    assert diagnose()["versions"]["libtorch-neuronx-lite"] == "2.11.0.1.0.1284"


def test_a_torch_neuronx_made_by_hand(machine, monkeypatch):
    machine(nki="0.7.0", instance="trn2.3xlarge")
    monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))
    usable, reason = backend("neuron")
    assert usable
    assert reason.startswith("torch_neuronx without a version and nki 0.7.0; kernels called direct")
    monkeypatch.delitem(sys.modules, "torch_neuronx")


def test_a_later_nki_is_tried(machine):
    machine(nki="0.8.1", neuronx="nki_op", **{TARGET: "trn2"})
    with pytest.warns(NkiVersionWarning):
        usable, reason = backend("neuron")
    assert usable
    assert "; nki 0.8.1 is newer than 0.7, the last line that this package was tested" in reason
