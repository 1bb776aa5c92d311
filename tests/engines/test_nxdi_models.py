"""The classes as NxD Inference finds and calls them; nothing of it is imported before."""

import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import nxdi_stand_ins as stand_ins
import pytest
import torch
from nxdi_checkpoints import dense_weights, make
from safetensors.torch import load_file, save_file
from test_nxdi_layers import close, config_of, expected, inputs, loaded

from neuronmm_ops.checkpoint import SINGLE
from neuronmm_ops.engines import nxdi
from neuronmm_ops.engines.nxdi import models
from neuronmm_ops.engines.nxdi.__main__ import main
from neuronmm_ops.engines.nxdi.record import OptionError
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.manifest import Origin, tensor_hashes, write_manifest

COMMAND = "neuronmm_ops.engines.nxdi"


@pytest.mark.usefixtures("nxd")
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_class_is_a_subclass_that_is_found_by_its_name(model_type):
    family = nxdi.causal_lm(model_type)
    name = model_type.capitalize()
    assert issubclass(family, getattr(stand_ins, f"Neuron{name}ForCausalLM"))
    # As NxD Inference finds the classes that a saved config names.
    for found in (family, family._model_cls):
        assert getattr(sys.modules[found.__module__], found.__name__) is found


def test_other_names_and_families_are_refused():
    with pytest.raises(AttributeError, match="NeuronSVDGemma"):
        _ = models.NeuronSVDGemmaForCausalLM
    with pytest.raises(ValueError, match="must be one of llama, mistral, qwen2, qwen3, got 'phi3'"):
        nxdi.causal_lm("phi3")


def test_registering_replaces_nxd_inferences_own(nxd):
    nxdi.register()
    types = nxd["neuronx_distributed_inference.utils.constants"].MODEL_TYPES
    assert types == {"llama": {"causal-lm": nxdi.causal_lm("llama")}}


@pytest.mark.usefixtures("nxd")
def test_a_bad_option_is_refused_before_anything_is_loaded(tmp_path):
    directory = make(tmp_path / "checkpoint")
    config = config_of(directory, {"mlp_kernel_enabled": True})
    with pytest.raises(OptionError, match="mlp_kernel_enabled must be False"):
        nxdi.causal_lm("llama")(str(directory), config)


@pytest.mark.usefixtures("nxd")
def test_weights_that_were_changed_after_writing_are_refused(tmp_path):
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


@pytest.mark.parametrize("error", [None, OptionError("cp_degree must be 1")])
def test_the_command_runs_nxd_inferences_demo(nxd, error, capsys):
    demo = nxd["neuronx_distributed_inference.inference_demo"]

    def run():
        print(demo.MODEL_TYPES["llama"]["causal-lm"].__name__)
        if error is not None:
            raise error

    demo.main = run
    code = main()
    out, err = capsys.readouterr()
    assert out == "NeuronSVDLlamaForCausalLM\n"
    assert (code, err) == ((2, f"{COMMAND}: {error}\n") if error else (0, ""))


@pytest.mark.slow
def test_without_nxd_inference_the_command_says_so():
    command = (sys.executable, "-m", COMMAND)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "neuronx_distributed_inference" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_former_name_of_the_package():
    """Saved configs of NxD Inference name a class's module."""
    former = import_module("neuronmm_ops.integrations.nxdi")
    assert former.register is nxdi.register
    assert former.causal_lm is nxdi.causal_lm


class FusedSpeculation(torch.nn.Module):
    """NxD Inference's `NeuronFusedSpecModel`: both models of one worker class."""

    def __init__(self, config):
        super().__init__()
        worker = config.fused_spec_config.worker_cls
        self.draft_model = worker(config.fused_spec_config.draft_config)
        self.target_model = worker(config)


def pair_of(tmp_path, draft_vocabulary=260):
    """A dense model's config with a draft of one layer in one byte, and their family."""
    draft = make(tmp_path / "draft", num_hidden_layers=1, storage="fp8")
    model = make(tmp_path / "model")
    save_file(dense_weights(load_file(model / SINGLE)), model / SINGLE)
    config = config_of(model, {}, quantization_config=None)
    family = nxdi.causal_lm("llama")
    config.fused_spec_config = SimpleNamespace(
        worker_cls=family._model_cls,
        draft_config=config_of(draft, {}, vocab_size=draft_vocabulary),
        draft_model_path=str(draft),
    )
    return model, draft, config, family


@pytest.mark.usefixtures("nxd")
def test_fused_speculation_takes_a_draft(tmp_path):
    """As its `checkpoint_loader_fn` does: the draft's tensors and the model's, by prefixes."""
    path, draft, config, family = pair_of(tmp_path)
    family(str(path), config)
    model, state = FusedSpeculation(config), {}
    draft_config = config.fused_spec_config.draft_config
    for prefix, own, made in (("draft", draft_config, draft), ("target", config, path)):
        found = family.get_state_dict(str(made), own)
        state |= {f"{prefix}_model.{name}": tensor for name, tensor in found.items()}
    stand_ins.shard(model, state, 0)
    x = inputs()[0]
    close(model.draft_model(x), expected(draft, x))
    close(model.target_model(x), expected(path, x))
    assert len(model.draft_model.layers) == 1
    assert model.draft_model.layers[0].mlp.gate_proj.u.dtype == torch.float8_e4m3fn
    assert type(model.target_model.layers[0].mlp) is stand_ins.NeuronLlamaMLP


@pytest.mark.usefixtures("nxd")
def test_a_draft_of_other_tokens_is_refused(tmp_path):
    path, _, config, family = pair_of(tmp_path, 300)
    with pytest.raises(OptionError, match="must have the model's vocabulary, got 300 and 260 tok"):
        family(str(path), config)
