"""The classes as NxD Inference finds and calls them; nothing of it is imported before."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nxdi_stand_ins as stand_ins
import pytest
import torch
from nxdi_checkpoints import make
from safetensors.torch import load_file, save_file
from test_nxdi_layers import config_of, loaded

from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.integrations import nxdi
from neuronmm_ops.integrations.nxdi import models
from neuronmm_ops.integrations.nxdi.record import OptionError
from neuronmm_ops.manifest import Origin, tensor_hashes, write_manifest


@pytest.fixture
def nxd(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    found = stand_ins.modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    nxdi.causal_lm.cache_clear()
    yield found
    nxdi.causal_lm.cache_clear()
    for name in ("layers", "factors"):
        sys.modules.pop(f"neuronmm_ops.integrations.nxdi.{name}", None)


@pytest.mark.usefixtures("nxd")
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_class_is_a_subclass_that_is_found_by_its_name(model_type: str) -> None:
    family = nxdi.causal_lm(model_type)
    name = model_type.capitalize()
    assert issubclass(family, getattr(stand_ins, f"Neuron{name}ForCausalLM"))
    # As NxD Inference finds the classes that a saved config names.
    for found in (family, family._model_cls):
        assert getattr(sys.modules[found.__module__], found.__name__) is found


def test_other_names_and_families_are_refused() -> None:
    with pytest.raises(AttributeError, match="NeuronSVDGemma"):
        _ = models.NeuronSVDGemmaForCausalLM  # pyright: ignore
    with pytest.raises(ValueError, match="must be one of llama, mistral, qwen2, qwen3, got 'phi3'"):
        nxdi.causal_lm("phi3")


def test_registering_replaces_nxd_inferences_own(nxd: dict[str, object]) -> None:
    nxdi.register()
    types = nxd["neuronx_distributed_inference.utils.constants"].MODEL_TYPES  # pyright: ignore
    assert types == {"llama": {"causal-lm": nxdi.causal_lm("llama")}}


@pytest.mark.usefixtures("nxd")
def test_a_bad_option_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    directory = make(tmp_path / "checkpoint")
    config = config_of(directory, {"mlp_kernel_enabled": True})
    with pytest.raises(OptionError, match="mlp_kernel_enabled must be False"):
        nxdi.causal_lm("llama")(str(directory), config)


@pytest.mark.usefixtures("nxd")
def test_weights_that_do_not_fit_their_record_are_refused(tmp_path: Path) -> None:
    directory = make(tmp_path / "checkpoint")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.u"
    tensors[name] = tensors[name][:, :8].clone()
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"v_proj.u: config.json asks for \[64, 23\]"):
        loaded(directory, config_of(directory, {}))


@pytest.mark.usefixtures("nxd")
def test_weights_that_were_changed_after_writing_are_refused(tmp_path: Path) -> None:
    directory = make(tmp_path / "checkpoint")
    write_manifest(directory, tensor_hashes(directory), Origin("compress"))
    config = config_of(directory, {})
    loaded(directory, config)
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json says, it has other values of model"):
        loaded(directory, config)


@pytest.mark.usefixtures("nxd")
def test_every_parameter_is_filled(tmp_path: Path) -> None:
    model = loaded(make(tmp_path / "checkpoint"), config_of(tmp_path / "checkpoint", {}))
    # The stand-ins' parameters are NaN until they are loaded.
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def run_module(*lines: str) -> subprocess.CompletedProcess[str]:
    script = "\n".join(
        ["import sys", f"sys.path.insert(0, {str(Path(__file__).parent)!r})", *lines]
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_the_command_runs_nxd_inferences_demo() -> None:
    done = run_module(
        "import nxdi_stand_ins, runpy",
        "nxdi_stand_ins.install()",
        "from neuronx_distributed_inference import inference_demo",
        "types = inference_demo.MODEL_TYPES",
        "inference_demo.main = lambda: print(types['llama']['causal-lm'].__name__)",
        "runpy.run_module('neuronmm_ops.integrations.nxdi', run_name='__main__')",
    )
    assert (done.returncode, done.stdout) == (0, "NeuronSVDLlamaForCausalLM\n"), done.stderr


@pytest.mark.slow
def test_a_refusal_of_the_command_is_one_line() -> None:
    done = run_module(
        "import nxdi_stand_ins, runpy",
        "nxdi_stand_ins.install()",
        "from neuronx_distributed_inference import inference_demo",
        "from neuronmm_ops.integrations.nxdi.record import OptionError",
        "def main(): raise OptionError('cp_degree must be 1')",
        "inference_demo.main = main",
        "runpy.run_module('neuronmm_ops.integrations.nxdi', run_name='__main__')",
    )
    assert done.returncode == 2
    assert done.stderr == "neuronmm_ops.integrations.nxdi: cp_degree must be 1\n"


@pytest.mark.slow
def test_without_nxd_inference_the_command_says_so() -> None:
    command = (sys.executable, "-m", "neuronmm_ops.integrations.nxdi")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "neuronx_distributed_inference" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_importing_the_integration_imports_neither_nxd_nor_transformers() -> None:
    done = run_module(
        "import neuronmm_ops.integrations.nxdi",
        "names = {'neuronx_distributed', 'neuronx_distributed_inference', 'transformers'}",
        "print(names & set(sys.modules))",
    )
    assert done.stdout == "set()\n", done.stderr
