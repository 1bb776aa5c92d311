"""What the factory for vLLM-Neuron refuses, with one line and before a weight is read."""

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_ins
import torch
import vllm_neuron_engine
from stored import edit_config, edit_record, edit_tensors
from test_vllm_neuron_model import ATTENTION, LITE, MLP, write
from transformers import AutoConfig
from vllm_neuron_engine import NeuronConfig
from vllm_neuron_serving import config_of, load, metadata

from neuronmm_ops.engines import vllm_neuron
from neuronmm_ops.engines.vllm_neuron.factory import NeuronMMForCausalLM
from neuronmm_ops.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("vllm_neuron_packages")
LAYER = "model.layers.1."


@pytest.fixture
def checkpoint(tmp_path):
    return write(tmp_path / "model", "llama", MLP + ATTENTION)


def assert_refused(expected: str, path: Path, tp: int = 1, config=None, **neuron) -> None:
    """The error is the expected line, in which … stands for anything."""
    vllm_neuron_engine.install(path).group.world_size = tp
    with pytest.raises((CheckpointError, ValueError)) as caught:
        load(path, config or config_of(path), NeuronConfig(**neuron))
    pattern = ".*".join(map(re.escape, expected.split("…")))
    assert re.fullmatch(pattern, str(caught.value)), caught.value


# --- the checkpoint ------------------------------------------------------------------------------

HEAD = "model.head", "model.layers.0.mlp.gate_proj"


def narrow(tensors):
    tensors[f"{LAYER}self_attn.o_proj.u"] = tensors[f"{LAYER}self_attn.o_proj.u"][:, :8]


def rename(tensors):
    for name in [name for name in tensors if HEAD[1] in name]:
        tensors[name.replace(HEAD[1], HEAD[0])] = tensors.pop(name)


def rename_layer(record):
    for layer in record["layers"]:
        layer["name"] = layer["name"].replace("layers.0.mlp.gate_proj", "head")


# What is changed in the record and in the tensors, and what is said of it. Other damage is found by
# the same reader of headers as in test_bad_checkpoints.
CHECKPOINTS = {
    "a member of the fused queries is missing": (
        None,
        lambda tensors: tensors.pop(f"{LAYER}self_attn.k_proj.u"),
        f"{LAYER}self_attn.k_proj.u: config.json asks for [64, 16], the file has none; …",
    ),
    "another rank": (
        None,
        narrow,
        f"{LAYER}self_attn.o_proj.u: config.json asks for [64, 9], the file has [64, 8]; config "
        "and weights are not of the same checkpoint",
    ),
    "low rank where the engine has none": (
        rename_layer,
        rename,
        "vLLM-Neuron takes low-rank projections of attention and MLP, got model.head; …",
    ),
    "a bias": (
        None,
        lambda tensors: tensors.update({f"{LAYER}self_attn.o_proj.bias": torch.zeros(64)}),
        f"…must have no bias in vLLM-Neuron, the file has {LAYER}self_attn.o_proj.bias",
    ),
}


@pytest.mark.parametrize(("record", "tensors", "line"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_that_is_not_taken(checkpoint, record, tensors, line):
    if record is not None:
        edit_record(checkpoint, record)
    if tensors is not None:
        edit_tensors(checkpoint, tensors)
    assert_refused(line, checkpoint)


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda config: config.pop("quantization_config"), "…is not a compressed checkpoint…"),
        *(
            (
                lambda config, found=found: config.update(architectures=found),
                "architectures must be [LlamaForCausalLM] or [Qwen3For…",
            )
            for found in (["Gemma2ForCausalLM"], [], None, "LlamaForCausalLM", [["x"]])
        ),
    ],
)
def test_a_config_that_is_not_taken(checkpoint, edit, line):
    edit_config(checkpoint, edit)
    assert_refused(line, checkpoint)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("attention_bias", True, "attention_bias must be false in vLLM-Neuron's model…"),
        ("use_sliding_window", True, "use_sliding_window must be false in vLLM-Neuron's model…"),
        ("mlp_bias", True, "mlp_bias must be false in vLLM-Neuron's model…"),
        ("hidden_act", "gelu", "hidden_act must be silu in vLLM-Neuron's model, got 'gelu'…"),
        ("dtype", torch.float64, "dtype must be bfloat16, float16 or float32 in vLLM-Neuron, got…"),
        ("dtype", torch.float8_e4m3fn, "dtype must be bfloat16, float16 or float32…"),
        # More blocks than the checkpoint has.
        (
            "num_hidden_layers",
            3,
            "model.layers.2.mlp.gate_proj.weight must be a matrix, the file …",
        ),
    ],
)
def test_a_server_s_config_of_another_model(checkpoint, field, value, line):
    config = config_of(checkpoint)
    setattr(config, field, value)
    assert_refused(line, checkpoint, config=config)


def test_a_dense_member_is_missing(tmp_path):
    path = write(tmp_path / "model", "llama", ("mlp.gate_proj", "mlp.down_proj"))
    name = f"{LAYER}mlp.up_proj.weight"
    edit_tensors(path, lambda tensors: tensors.pop(name))
    assert_refused(f"{name} must be a matrix, the file has none; copy the checkpoint…", path)


def test_no_directory(tmp_path, checkpoint):
    path = tmp_path / "org" / "name"
    assert_refused(f"{path} is no directory; give a local…", path, config=config_of(checkpoint))


def test_a_rotation_that_the_engine_does_not_know(tmp_path):
    path = write(tmp_path, "qwen3", MLP)
    edit_config(path, lambda config: config["rope_parameters"].update(rope_type="yarn"))
    line = "rope_type must be default in vLLM-Neuron's Qwen3ForCausalLM, got 'yarn'"
    assert_refused(line, path)


@pytest.mark.parametrize("change", [{}, {"rope_parameters": None, "rope_theta": 5000.0}])
def test_the_engine_is_told_the_base_of_the_rotation(tmp_path, change):
    path = write(tmp_path, "qwen3", MLP)
    edit_config(path, lambda config: config.update(change))
    vllm_neuron_engine.install(path)
    model = load(path, AutoConfig.from_pretrained(path))
    assert model.config.to_dict()["rope_theta"] == change.get("rope_theta", 10000.0)


# --- the ranks and the engine --------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "heads"), [(3, (4, 2)), (8, (4, 2)), (4, (12, 6)), (5, (4, 2))])
def test_ranks_that_do_not_divide_the_heads(checkpoint, tp, heads):
    config = config_of(checkpoint)
    config.num_attention_heads, config.num_key_value_heads = heads
    assert_refused("tp must divide the …", checkpoint, tp, config)


@pytest.mark.parametrize(
    ("instance", "tp", "line"),
    [
        ("trn2.48xlarge", 1, r"two ranks or more on trn2\.48xlarge, .* got tp = 1; use --tensor"),
        ("trn2.3xlarge", 4, r"even number of heads in .* kernel, got 4 heads and tp = 4; use anot"),
        ("trn2.3xlarge", 1, None),
        ("trn2.48xlarge", 2, None),
    ],
)
def test_ranks_that_end_the_engines_kernels(checkpoint, instance, tp, line, tmp_path, monkeypatch):
    with stand_ins.neuron_machine(tmp_path, monkeypatch) as machine:
        machine.nki()
        machine.package("libtorch_neuronx_lite", "2.11.0", LITE)
        machine.instance(instance)
        found = vllm_neuron_engine.install(checkpoint)
        found.group.world_size, found.runs_kernels = tp, True
        with pytest.raises(ValueError, match=line) if line else nullcontext():
            NeuronMMForCausalLM.from_configs(config_of(checkpoint), NeuronConfig())
        found.runs_kernels = False  # in the engine's CPU mode
        NeuronMMForCausalLM.from_configs(config_of(checkpoint), NeuronConfig())


def test_ranks_that_do_not_divide_a_dense_mlp(tmp_path):
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    path = write(tmp_path / "model", "llama", ("self_attn.o_proj",), **sizes)
    line = (
        "tp must divide intermediate_size of a dense MLP, got intermediate_size of a dense MLP = "
        "176 and tp = 3; use a tp that divides 176"
    )
    assert_refused(line, path, 3)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("attention_dp_size", 2, "1 with low-rank layers, got 2…"),
        ("mlp_dp_size", 2, "1 with low-rank layers, got 2…"),
        ("apply_prefill_dcp", True, "False with low-rank layers, got True…"),
        ("quantization", "mxfp4", "None with low-rank layers, got 'mxfp4'…"),
    ],
)
def test_an_option_that_divides_otherwise(checkpoint, option, value, words):
    assert_refused(f"neuron_config.{option} must be {words}", checkpoint, **{option: value})


def test_an_engine_without_the_family(checkpoint):
    vllm_neuron_engine.install(checkpoint).models = ("GptOssForCausalLM",)
    with pytest.raises(ValueError, match="must serve LlamaForCausalLM, it has GptOssForCausalLM;"):
        load(checkpoint, config_of(checkpoint))


def test_the_servers_own_config_may_keep_the_record(checkpoint):
    vllm_neuron_engine.install(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint)
    record = config.quantization_config
    load(checkpoint, config)
    assert config.quantization_config is record, "the server's is its own"


# --- the plugin ----------------------------------------------------------------------------------


def test_the_architecture_is_registered_once():
    found = vllm_neuron_engine.install()
    vllm_neuron.register()
    vllm_neuron.register()
    (where,) = found.registered.values()
    module, _, name = where.partition(":")
    assert list(found.registered) == ["NeuronMMForCausalLM"] == [name]
    made = getattr(__import__(module, fromlist=[name]), name)
    assert issubclass(made, torch.nn.Module)


def test_another_vllm_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    vllm_neuron.register()


def test_the_class_has_what_vllm_asks_of_a_model_that_generates(checkpoint):
    vllm_neuron_engine.install(checkpoint)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_config=config_of(checkpoint)))
    made = NeuronMMForCausalLM(vllm_config=config, prefix="")
    made.model.load_weights(str(checkpoint), torch.device("cpu"), None)
    ids, positions = torch.tensor([1, 2, 3]), torch.arange(3)
    logits = made(input_ids=ids, positions=positions, attn_metadata=metadata(2, 3))
    assert made.compute_logits(logits).shape == (3, 260)
    assert torch.equal(made.embed_input_ids(ids), made.model.model.embed_tokens.weight[ids])


PLUGIN = """
import sys
sys.path[:0] = sys.argv[1:]
import neuronmm_ops, neuronmm_ops.engines, neuronmm_ops.engines.nxdi
import neuronmm_ops.engines.vllm_neuron.factory
engines = {"vllm", "vllm_neuron", "neuronx_distributed", "neuronx_distributed_inference"}
print(sorted({*engines, "transformers", "optimum", "nki"} & set(sys.modules)))

import nxdi_stand_ins
nxdi_stand_ins.install()
from importlib.metadata import entry_points
(entry,) = entry_points(group="vllm.general_plugins", name="neuronmm_vllm_neuron")
entry.load()()
entry.load()()
from neuronx_distributed_inference.utils.constants import MODEL_TYPES
print(MODEL_TYPES["llama"]["causal-lm"].__name__, *{"vllm", "transformers"} & set(sys.modules))
"""


@pytest.fixture
def older(tmp_path, monkeypatch):
    """vllm-neuron 0.2, which looks models up in NxD Inference's table."""
    (tmp_path / "vllm_neuron").mkdir()
    (tmp_path / "vllm_neuron" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_plugin_on_nxd_inference_gets_its_classes_and_nothing_is_imported_before(older):
    command = (sys.executable, "-c", PLUGIN, str(older), str(Path(__file__).parent))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[]\nNeuronSVDLlamaForCausalLM\n", done.stderr


@pytest.mark.usefixtures("older")
def test_the_plugin_without_nxd_inference_is_quiet(capsys):
    vllm_neuron.register()
    assert capsys.readouterr() == ("", "")
    assert not {"vllm", "neuronx_distributed_inference"} & set(sys.modules)
