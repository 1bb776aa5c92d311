"""What the factory for vLLM-Neuron refuses, with one line and before a weight is read."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_ins
import torch
import vllm_neuron_engine
from safetensors.torch import load_file, save_file
from test_vllm_neuron_model import ATTENTION, LITE, MLP, write
from tiny import tiny_model
from transformers import AutoConfig
from vllm_neuron_engine import NeuronConfig
from vllm_neuron_serving import config_of, load, metadata

from neuronmm_ops import swap_
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.integrations import vllm_neuron
from neuronmm_ops.integrations.vllm_neuron.factory import NeuronMMForCausalLM

LAYER = "model.layers.1."


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "model", "llama", MLP + ATTENTION)


@pytest.fixture(autouse=True)
def packages() -> Iterator[None]:
    yield
    vllm_neuron_engine.uninstall()


def refused(path: Path, tp: int = 1, config: Any = None, **neuron: Any) -> str:
    """The line of the error."""
    found = vllm_neuron_engine.install(path)
    found.group.world_size = tp
    with pytest.raises((CheckpointError, ValueError)) as caught:
        load(path, config or config_of(path), NeuronConfig(**neuron))
    line = str(caught.value)
    assert "\n" not in line
    return line


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


# --- the checkpoint ------------------------------------------------------------------------------


def test_a_member_of_the_fused_queries_is_missing(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.pop(f"{LAYER}self_attn.k_proj.u"))
    expected = f"{LAYER}self_attn.k_proj.u: config.json asks for [64, 16], the file has none; "
    assert refused(checkpoint).startswith(expected)


def test_a_dense_member_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "llama", ("mlp.gate_proj", "mlp.down_proj"))
    edit_weights(path, lambda tensors: tensors.pop(f"{LAYER}mlp.up_proj.weight"))
    expected = f"{LAYER}mlp.up_proj.weight must be a matrix, the file has none; copy the checkpoint"
    assert refused(path).startswith(expected)


def test_more_blocks_than_the_checkpoint_has(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    config.num_hidden_layers = 3
    line = refused(checkpoint, config=config)
    assert line.startswith(
        "model.layers.2.mlp.gate_proj.weight must be a matrix, the file has none"
    )


def test_another_rank_than_the_record(checkpoint: Path) -> None:
    name = f"{LAYER}self_attn.o_proj.u"
    edit_weights(checkpoint, lambda t: t.update({name: t[name][:, :8].contiguous()}))
    assert refused(checkpoint) == (
        f"{name}: config.json asks for [64, 9], the file has [64, 8]; config and weights are not "
        "of the same checkpoint"
    )


def test_factors_of_another_dtype_than_the_record(checkpoint: Path) -> None:
    name = f"{LAYER}mlp.up_proj.v"
    edit_weights(checkpoint, lambda t: t.update({name: t[name].to(torch.int8)}))
    assert refused(checkpoint).startswith(f"{name}: config.json asks for F64 or F32 or F16 or BF16")


def test_a_newer_format(checkpoint: Path) -> None:
    edit(checkpoint, lambda config: config["quantization_config"].update(format_version=2))
    assert refused(checkpoint).startswith("format_version must be 1, got 2; the checkpoint was wri")


def test_an_unknown_storage(checkpoint: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["layers"][0]["storage"] = "fp3"

    edit(checkpoint, change)
    assert "fp3" in refused(checkpoint)


def test_factors_in_one_byte(tmp_path: Path) -> None:
    model = tiny_model()
    u, v = (torch.full(shape, 3, dtype=torch.int8) for shape in ((64, 16), (16, 176)))
    factors = (u, v, torch.ones(16), torch.ones(176))
    swap_(model, {"model.layers.0.mlp.up_proj": factors})
    model.save_pretrained(tmp_path)
    assert refused(tmp_path) == (
        "factors must be floats of two bytes or more in vLLM-Neuron, model.layers.0.mlp.up_proj is "
        "in int8; compress without --storage"
    )


def test_a_dense_checkpoint(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    edit(checkpoint, lambda config: config.pop("quantization_config"))
    assert "is not a compressed checkpoint" in refused(checkpoint, config=config)


def test_no_directory(tmp_path: Path, checkpoint: Path) -> None:
    config = config_of(checkpoint)
    assert "is no directory; give a local" in refused(tmp_path / "org" / "name", config=config)


@pytest.mark.parametrize("found", [["Gemma2ForCausalLM"], [], None, "LlamaForCausalLM", [["x"]]])
def test_another_architecture(checkpoint: Path, found: Any) -> None:
    edit(checkpoint, lambda config: config.update(architectures=found))
    assert refused(checkpoint).startswith("architectures must be [LlamaForCausalLM] or [Qwen3For")


def test_low_rank_where_the_engine_has_none(checkpoint: Path) -> None:
    def rename(config: dict[str, Any]) -> None:
        for layer in config["quantization_config"]["layers"]:
            layer["name"] = layer["name"].replace("layers.0.mlp.gate_proj", "head")

    edit(checkpoint, rename)
    old = "model.layers.0.mlp.gate_proj"
    edit_weights(
        checkpoint,
        lambda t: [t.update({n.replace(old, "model.head"): t.pop(n)}) for n in list(t) if old in n],
    )
    assert refused(checkpoint).startswith("model.head must be dense in vLLM-Neuron, got r = 16; ")


def test_a_bias(checkpoint: Path) -> None:
    name = f"{LAYER}self_attn.o_proj.bias"
    edit_weights(checkpoint, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert refused(checkpoint).endswith(f"must have no bias in vLLM-Neuron, the file has {name}")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attention_bias", True, "attention_bias must be false in vLLM-Neuron's model"),
        ("use_sliding_window", True, "use_sliding_window must be false in vLLM-Neuron's model"),
        ("mlp_bias", True, "mlp_bias must be false in vLLM-Neuron's model"),
        ("hidden_act", "gelu", "hidden_act must be silu in vLLM-Neuron's model, got 'gelu'"),
        ("dtype", torch.float64, "dtype must be bfloat16, float16 or float32 in vLLM-Neuron, got"),
        ("dtype", torch.float8_e4m3fn, "dtype must be bfloat16, float16 or float32"),
    ],
)
def test_a_config_of_another_model(checkpoint: Path, field: str, value: Any, words: str) -> None:
    config = config_of(checkpoint)
    setattr(config, field, value)
    assert refused(checkpoint, config=config).startswith(words)


def test_a_rotation_that_the_engine_does_not_know(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3", MLP)
    edit(path, lambda config: config["rope_parameters"].update(rope_type="yarn"))
    assert refused(path) == (
        "rope_type must be default in vLLM-Neuron's Qwen3ForCausalLM, got 'yarn'"
    )


@pytest.mark.parametrize("change", [{}, {"rope_parameters": None, "rope_theta": 5000.0}])
def test_the_engine_is_told_the_base_of_the_rotation(tmp_path: Path, change: Any) -> None:
    path = write(tmp_path, "qwen3", MLP)
    edit(path, lambda config: config.update(change))
    vllm_neuron_engine.install(path)
    model = load(path, AutoConfig.from_pretrained(path))
    assert model.config.to_dict()["rope_theta"] == change.get("rope_theta", 10000.0)


# --- the ranks and the engine --------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "heads"), [(3, (4, 2)), (8, (4, 2)), (4, (12, 6)), (5, (4, 2))])
def test_ranks_that_do_not_divide_the_heads(
    checkpoint: Path, tp: int, heads: tuple[int, int]
) -> None:
    config = config_of(checkpoint)
    config.num_attention_heads, config.num_key_value_heads = heads
    assert refused(checkpoint, tp, config).startswith("tp must divide the ")


@pytest.mark.parametrize(
    ("instance", "tp", "line"),
    [
        (
            "trn2.48xlarge",
            1,
            r"two ranks or more on trn2\.48xlarge, .* got tp = 1; use --tensor-par",
        ),
        (
            "trn2.3xlarge",
            4,
            r"even number of heads in .* kernel, got 4 heads and tp = 4; use anoth",
        ),
        ("trn2.3xlarge", 1, None),
        ("trn2.48xlarge", 2, None),
    ],
)
def test_ranks_that_end_the_engines_kernels(
    checkpoint: Path,
    instance: str,
    tp: int,
    line: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_ranks_that_do_not_divide_a_dense_mlp(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    path = write(tmp_path / "model", "llama", ("self_attn.o_proj",), **sizes)
    assert refused(path, 3) == (
        "tp must divide intermediate_size of a dense MLP, got intermediate_size of a dense MLP = "
        "176 and tp = 3; use a tp that divides 176"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("attention_dp_size", 2),
        ("mlp_dp_size", 2),
        ("apply_prefill_dcp", True),
        ("quantization", "mxfp4"),
    ],
)
def test_an_option_that_divides_otherwise(checkpoint: Path, option: str, value: Any) -> None:
    line = refused(checkpoint, **{option: value})
    assert re.match(rf"neuron_config.{option} must be .* with low-rank layers, got {value!r}", line)


def test_an_engine_without_the_family(checkpoint: Path) -> None:
    vllm_neuron_engine.install(checkpoint).models = ("GptOssForCausalLM",)
    with pytest.raises(ValueError, match="must serve LlamaForCausalLM, it has GptOssForCausalLM;"):
        load(checkpoint, config_of(checkpoint))


def test_the_servers_own_config_may_keep_the_record(checkpoint: Path) -> None:
    vllm_neuron_engine.install(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint)
    record = config.quantization_config
    load(checkpoint, config)
    assert config.quantization_config is record, "the server's is its own"


# --- the plugin ----------------------------------------------------------------------------------


def test_the_architecture_is_registered_once() -> None:
    found = vllm_neuron_engine.install()
    vllm_neuron.register()
    vllm_neuron.register()
    (where,) = found.registered.values()
    module, _, name = where.partition(":")
    assert list(found.registered) == ["NeuronMMForCausalLM"] == [name]
    made = getattr(__import__(module, fromlist=[name]), name)
    assert issubclass(made, torch.nn.Module)


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    vllm_neuron.register()


def test_the_class_has_what_vllm_asks_of_a_model_that_generates(checkpoint: Path) -> None:
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
import nxdi_stand_ins
if "nxdi" in sys.argv:
    nxdi_stand_ins.install()
from importlib.metadata import entry_points
(entry,) = entry_points(group="vllm.general_plugins", name="neuronmm_vllm_neuron")
entry.load()()
entry.load()()
from neuronx_distributed_inference.utils.constants import MODEL_TYPES
print(MODEL_TYPES["llama"]["causal-lm"].__name__, *{"vllm", "transformers"} & set(sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["nxdi", "none"])
def test_the_plugin_on_nxd_inference_gets_its_classes(tmp_path: Path, inference: str) -> None:
    """vllm-neuron 0.2 looks models up in NxD Inference's table, in the engine's process."""
    (tmp_path / "vllm_neuron").mkdir()
    (tmp_path / "vllm_neuron" / "__init__.py").touch()
    folders = (str(tmp_path), str(Path(__file__).parent), inference)
    done = subprocess.run([sys.executable, "-c", PLUGIN, *folders], capture_output=True, text=True)
    if inference == "nxdi":
        assert done.stdout == "NeuronSVDLlamaForCausalLM\n", done.stderr
    else:  # the plugin itself is quiet
        assert "No module named 'neuronx_distributed_inference'" in done.stderr
        assert "entry.load" not in done.stderr


@pytest.mark.slow
def test_importing_the_integrations_imports_no_engine() -> None:
    script = """
import sys
import neuronmm_ops, neuronmm_ops.integrations, neuronmm_ops.integrations.vllm_neuron
import neuronmm_ops.integrations.vllm_neuron.factory
engines = {"vllm", "vllm_neuron", "neuronx_distributed", "neuronx_distributed_inference"}
print(sorted({*engines, "transformers", "optimum", "nki"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
