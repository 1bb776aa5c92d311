"""Saving and loading keep every value bit for bit, also in a fresh process."""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny import FAMILIES, tiny_ids, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from neuronmm_ops import CalibrationWarning, CompressionReport, SVDConfig, checkpoint, compress_, hf
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.nn import SVDMLP, SVDLinear

FRESH_PROCESS = """
import hashlib, json, sys
import torch
from transformers import AutoModelForCausalLM
import neuronmm_ops
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(24).view(1, 24)
state = {**model.state_dict(), "logits": model(ids).logits}
digest = lambda t: hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
print(json.dumps({name: digest(tensor) for name, tensor in state.items()}))
"""


def _compressed(
    family: str = "llama", targets: str = "mlp", **overrides: object
) -> tuple[PreTrainedModel, CompressionReport]:
    model = tiny_model(family, **overrides)  # pyright: ignore
    config = SVDConfig(ratio=0.3, block=8, targets=targets, allocation="uniform")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return model, compress_(model, config, [tiny_ids()])


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["mlp", "all-linear"])
def test_round_trip_is_bit_exact(family: str, targets: str, tmp_path: Path) -> None:
    model, report = _compressed(family, targets, dtype=torch.bfloat16)
    hf.save(model, tmp_path / "out", report)

    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    assert restored.dtype == torch.bfloat16
    expected, actual = model.state_dict(), restored.state_dict()
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name
    assert torch.equal(model(tiny_ids(1)).logits, restored(tiny_ids(1)).logits)
    assert isinstance(restored.model.layers[0].mlp, SVDMLP)
    assert restored.model.layers[0].mlp.gate_proj.u.is_contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_round_trip_in_a_fresh_process(family: str, tmp_path: Path) -> None:
    model, report = _compressed(family, "all-linear")
    hf.save(model, tmp_path / "out", report)

    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", FRESH_PROCESS, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )

    assert result.returncode == 0, result.stderr
    torch.set_num_threads(1)
    state = {**model.state_dict(), "logits": model(torch.arange(24).view(1, 24)).logits}
    assert json.loads(result.stdout) == {name: _digest(value) for name, value in state.items()}


def test_untied_head_and_tied_head_survive(tmp_path: Path) -> None:
    for tied in (True, False):
        model, report = _compressed(tied=tied)
        hf.save(model, tmp_path / str(tied), report)
        restored = AutoModelForCausalLM.from_pretrained(tmp_path / str(tied))
        head, embedding = restored.lm_head, restored.model.embed_tokens
        assert type(head) is nn.Linear
        assert (head.weight is embedding.weight) == tied
        assert torch.equal(head.weight, model.lm_head.weight)


def test_resaving_sharded_and_reloading(tmp_path: Path) -> None:
    model, report = _compressed()
    hf.save(model, tmp_path / "one", report)
    hf.load(tmp_path / "one").save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2

    restored = hf.load(tmp_path / "many")

    for name, value in model.state_dict().items():
        assert torch.equal(value, restored.state_dict()[name]), name


def test_saving_a_sharded_model_again_as_one_file(tmp_path: Path) -> None:
    model, _ = _compressed()
    model.save_pretrained(tmp_path / "out", max_shard_size="50KB")
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert inspect_checkpoint(tmp_path / "out").layers
    restored = hf.load(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(value, restored.state_dict()[name]), name


def test_saving_a_loaded_model_needs_no_report(tmp_path: Path) -> None:
    model, report = _compressed()
    hf.save(model, tmp_path / "first", report)
    hf.save(hf.load(tmp_path / "first"), tmp_path / "second")
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("first", "second")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtype_argument_casts_the_factors(dtype: torch.dtype, tmp_path: Path) -> None:
    model, report = _compressed(dtype=torch.bfloat16)
    hf.save(model, tmp_path / "out", report)
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    gate = restored.model.layers[1].mlp.gate_proj
    assert gate.u.dtype == gate.v.dtype == dtype
    assert torch.equal(gate.u, model.model.layers[1].mlp.gate_proj.u.to(dtype))


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
def test_device_maps_and_disk_offload(tmp_path: Path) -> None:
    model, report = _compressed()
    hf.save(model, tmp_path / "out", report)
    parts = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.1")
    device_map = {**dict.fromkeys(parts, "cpu"), "model.layers.0": "disk"}

    on_cpu = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", device_map=device_map, offload_folder=tmp_path / "offload"
    )

    expected = model(tiny_ids(1)).logits
    assert torch.equal(on_cpu(tiny_ids(1)).logits, expected)
    assert offloaded.model.layers[0].mlp.gate_proj.u.is_meta
    assert torch.equal(offloaded(tiny_ids(1)).logits, expected)


def test_base_model_loads_without_the_head(tmp_path: Path) -> None:
    model, report = _compressed()
    hf.save(model, tmp_path / "out", report)
    body = AutoModel.from_pretrained(tmp_path / "out")
    assert isinstance(body.layers[0].mlp.up_proj, SVDLinear)
    expected = model.model(tiny_ids(1)).last_hidden_state
    assert torch.equal(body(tiny_ids(1)).last_hidden_state, expected)


def test_generated_tokens_survive_the_round_trip(tmp_path: Path) -> None:
    model, report = _compressed()
    hf.save(model, tmp_path / "out", report)
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256}
    expected = model.generate(tiny_ids(1, 8), **arguments)
    assert torch.equal(expected, hf.load(tmp_path / "out").generate(tiny_ids(1, 8), **arguments))


def test_gradients_flow_after_loading(tmp_path: Path) -> None:
    model, report = _compressed()
    hf.save(model, tmp_path / "out", report)
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = tiny_ids(2)
    restored(ids, labels=ids).loss.backward()
    for name, parameter in restored.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_loading_reads_each_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, report = _compressed()
    hf.save(model, tmp_path / "out", report)
    hf.load(tmp_path / "out").save_pretrained(tmp_path / "many", max_shard_size="50KB")
    tiny_model().save_pretrained(tmp_path / "dense")
    opened: list[str] = []

    def counting(file: Path, framework: str) -> object:
        opened.append(file.name)
        return safe_open(file, framework=framework)

    monkeypatch.setattr(checkpoint, "safe_open", counting)
    for name in ("out", "many", "dense"):
        hf.load(tmp_path / name)
        assert sorted(opened) == sorted(p.name for p in (tmp_path / name).glob("*.safetensors"))
        opened.clear()


class Work(TorchDispatchMode):
    """Keep the name of each operator that touches a matrix's values, and the matrix's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[0] if args else None
        is_value = isinstance(given, torch.Tensor) and not given.is_meta and given.dim() == 2
        if is_value and not func.is_view and given.numel():
            self.calls.append((func.overloadpacket.__name__, given.data_ptr()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("load", [hf.load, AutoModelForCausalLM.from_pretrained])
def test_loading_reads_each_matrix_once_and_copies_none(load: Any, tmp_path: Path) -> None:
    model, report = _compressed()
    hf.save(model, tmp_path / "out", report)
    with Work() as work:
        loaded = load(tmp_path / "out")
    matrices = [p.data_ptr() for p in loaded.parameters() if p.dim() == 2]
    sums = [pointer for name, pointer in work.calls if name == "sum"]
    assert set(matrices) <= set(sums)
    assert len(sums) == len(set(sums)), "a matrix is read twice"
    assert {name for name, _ in work.calls} <= {"sum", "detach"}
