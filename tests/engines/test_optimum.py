"""Compressed checkpoints in optimum-neuron's stand-ins: layers, ranks, registry, command."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optimum_stand_ins as stand_ins
import pytest
import ranks
import torch
from nxd_stand_ins import shard
from nxdi_checkpoints import make
from safetensors.torch import load_file
from test_nxdi_layers import MIXED, close, expected, inputs
from torch import Tensor

from neuronmm_ops.engines import nxdi, optimum, vllm_neuron
from neuronmm_ops.engines.nxdi import models
from neuronmm_ops.engines.nxdi.models import OPTIMUM, causal_lm
from neuronmm_ops.engines.nxdi.record import OptionError
from neuronmm_ops.engines.optimum import __main__ as command

ranks.PRELOADED += ["optimum_stand_ins", "neuronmm_ops.engines.optimum"]


@pytest.fixture
def packages(monkeypatch):
    """optimum-neuron's modules, and NxD's, in this process."""
    for name, module in stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    stand_ins.REGISTERED.clear()
    nxdi.causal_lm.cache_clear()
    yield
    nxdi.causal_lm.cache_clear()
    sys.modules.pop("neuronmm_ops.engines.nxdi.layers", None)


def config_of(directory: Path) -> Any:
    fields = json.loads((directory / "config.json").read_text())
    fields["rope_theta"] = fields["rope_parameters"]["rope_theta"]  # as an export has it
    return SimpleNamespace(**fields)


def loaded(directory: Path, options: dict[str, Any], rank: int = 0) -> Any:
    config, family = config_of(directory), causal_lm(config_of(directory).model_type, OPTIMUM)
    neuron_config = stand_ins.NxDNeuronConfig(**{"torch_dtype": torch.float32, **options})
    model = family.create_graph_builders(config, neuron_config)["model"]()
    model.to(neuron_config.torch_dtype)
    state = family().checkpoint_loader_fn(str(directory), config, neuron_config)
    shard(model, state, rank)
    return model


def on_rank(rank: int, directory: Path, xs: list[Tensor], tp: int) -> list[Tensor]:
    stand_ins.install()
    model = loaded(directory, {"tp_degree": tp}, rank)
    with torch.no_grad():
        return [model(x) for x in xs]


MADE = [
    {},
    {"dense": MIXED, "model_type": "qwen3", "storage": "fp8"},
    {"dense": MIXED, "attention_bias": False, "mlp_bias": True},
]


@pytest.mark.parametrize("made", MADE, ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.usefixtures("packages")
def test_one_rank(made, fused, tmp_path):
    directory = make(tmp_path / "checkpoint", **made)
    model = loaded(directory, {"fused_qkv": fused})
    for x in inputs():
        close(model(x), expected(directory, x))


@pytest.mark.slow
@pytest.mark.parametrize("made", MADE[:2], ids=str)
def test_ranks_together_equal_one_process(made, tmp_path):
    directory = make(tmp_path / "checkpoint", **made)
    for results in ranks.run(on_rank, 2, directory, inputs(), 2):
        for found, x in zip(results, inputs(), strict=True):
            close(found, expected(directory, x))


@pytest.mark.parametrize("storage", ["fp8", "int8"])
@pytest.mark.usefixtures("packages")
def test_one_byte_stays_one_byte_though_floats_are_cast(storage, tmp_path):
    directory = make(tmp_path / "checkpoint", storage=storage, dtype=torch.bfloat16)
    model = loaded(directory, {"torch_dtype": torch.bfloat16})
    stored = load_file(directory / "model.safetensors")
    kept = {name for name, p in model.named_parameters() if p.itemsize == 1}
    assert len(kept) == sum(tensor.itemsize == 1 for tensor in stored.values()) > 0
    assert all(model.get_parameter(f"{name}_scale").dtype == torch.float32 for name in kept)


@pytest.mark.usefixtures("packages")
def test_its_registry_gives_these_classes_after_vllms_entry_point(monkeypatch):
    vllm_neuron.register()
    names = {kind.__name__ for kind in stand_ins.REGISTERED.values()}
    assert names == {f"NeuronSVD{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3")}
    assert set(stand_ins.REGISTERED) == {(name, "text-generation") for name in OPTIMUM.families}


@pytest.mark.usefixtures("packages")
def test_the_command_is_its_export_with_these_classes(monkeypatch, capsys):
    found = []
    module = sys.modules["optimum.exporters.neuron.__main__"]
    monkeypatch.setattr(module, "main", lambda: found.extend(stand_ins.REGISTERED), raising=False)
    assert command.reported("optimum", command.main) == 0
    assert len(found) == 3


def test_without_it_the_command_says_so(capsys):
    assert command.reported("optimum", command.main) == 2
    assert capsys.readouterr().err.startswith("neuronmm_ops.engines.optimum: No module named")


@pytest.mark.usefixtures("packages")
def test_options_are_refused_before_anything_is_compiled(tmp_path):
    directory = make(tmp_path / "checkpoint", mlp_bias=True)
    with pytest.raises(OptionError, match="tp_degree must divide intermediate_size"):
        loaded(directory, {"tp_degree": 3})


@pytest.mark.usefixtures("packages")
def test_another_version_is_used_with_a_warning_where_its_classes_fit(monkeypatch):
    monkeypatch.setattr(models, "version_of", lambda _: "0.5.0")
    with pytest.warns(UserWarning, match=r"optimum-neuron 0\.5\.0 was not tested, 0\.4\.6x were"):
        optimum.register()


@pytest.mark.usefixtures("packages")
def test_classes_that_do_not_fit_are_one_line(monkeypatch):
    def convert(state_dict, neuron_config):
        raise AssertionError

    kind = stand_ins.LlamaNxDModelForCausalLM
    monkeypatch.setattr(kind, "convert_hf_to_neuron_state_dict", staticmethod(convert))
    with pytest.raises(ImportError, match=r"convert_hf_to_neuron_state_dict of optimum-.* install"):
        optimum.register()


@pytest.mark.usefixtures("packages")
def test_a_layer_that_does_not_fit_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(stand_ins.NeuronLlamaMLP, "forward", lambda self, hidden, scale: hidden)
    with pytest.raises(ImportError, match=r"NeuronLlamaMLP\.forward must take x, the installed"):
        loaded(make(tmp_path / "checkpoint"), {})
