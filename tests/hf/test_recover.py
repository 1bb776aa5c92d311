"""hf.recover: what it writes, what it leaves alone, and everything that it refuses."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from stored import assert_same_bits, config_of, tensors_of
from tiny import tiny_directory, tiny_model, tiny_tokenizer

from neuronmm_ops import CompressionReport, SVDConfig, SVDLinear, hf
from neuronmm_ops.compress.record import low_rank_layers
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.eval import encode_documents, token_perplexity
from neuronmm_ops.hf import recover as recover_function
from neuronmm_ops.hf import train
from neuronmm_ops.hf.adapters import adapted
from neuronmm_ops.hf.memory import save_memory_, saved_bytes
from neuronmm_ops.hf.recover import _fingerprint
from neuronmm_ops.hf.samples import samples
from neuronmm_ops.manifest import verify
from neuronmm_ops.recover import RecoverConfig
from neuronmm_ops.recover.data import hold_out
from neuronmm_ops.recover.losses import Distillation, NextToken
from neuronmm_ops.recover.rounding import round_, unround_
from neuronmm_ops.storages import STORAGES, dequantized

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
WORDS = ("quick brown fox", "lazy dog", "sphinx of black quartz", "judge my vow", "pack my box")
TEXT = " ".join(WORDS[(7 * i * i + i // 3) % 5] for i in range(240))
CONFIG = RecoverConfig(steps=12, seqlen=32, batch_tokens=256, learning_rate=3e-3)


def trained(path: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny model that knows the text."""
    model: Any = tiny_model(family, vocab_size=260)
    ids = encode_documents(tiny_tokenizer(), [TEXT])
    blocks = ids[: len(ids) // 32 * 32].view(-1, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        batch = blocks[torch.randint(len(blocks), (8,), generator=generator)]
        NextToken(model)(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(dtype).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("dense") / "dense")


def compressed(dense: Path, path: Path) -> Path:
    hf.compress(dense, SVDConfig(ratio=0.7, block=8), TEXT, path, samples=32, seqlen=32)
    return path


@pytest.fixture(scope="module")
def small(dense, tmp_path_factory):
    with pytest.warns(match="calibration has"):
        return compressed(dense, tmp_path_factory.mktemp("small") / "small")


@pytest.fixture(scope="module", params=STORAGES)
def rounded(request, dense, tmp_path_factory):
    """A checkpoint of pairs, dense layers and a head in a storage."""
    path = tmp_path_factory.mktemp(request.param) / "rounded"
    ratios = {"q_proj": 0, "down_proj": 0}
    options = {"targets": "all-linear", "method": "plain", "layer_ratios": ratios}
    config = SVDConfig(ratio=0.7, block=8, storage=request.param, **options)
    hf.compress(dense, config, None, path)
    return path


def perplexity(directory: Path, ids: torch.Tensor) -> float:
    return token_perplexity(hf.load(directory), ids, 32).ppl_token


def changed(one: Path, other: Path) -> set[str]:
    """Return the names of the tensors in which two checkpoints differ, which have one shape."""
    before, after = tensors_of(one), tensors_of(other)
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    return {name for name in before if not torch.equal(before[name], after[name])}


def factors_of(directory: Path) -> set[str]:
    return {name for name in tensors_of(directory) if name.endswith((".u", ".v"))}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def entry(report: CompressionReport) -> dict[str, Any]:
    return report.provenance["recovery"][-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        RecoverConfig(method="lora", steps=12, seqlen=32, learning_rate=1e-2),
        RecoverConfig(
            method="lora", lora_order="joint", steps=12, seqlen=32, learning_rate=1e-2, lora_rank=4
        ),
    ],
    ids=lambda config: f"{config.method}-{config.lora_order}",
)
def test_it_recovers(config, small, dense, tmp_path):
    told, out = [], tmp_path / "out"
    report = hf.recover(small, TEXT, out, config, progress=lambda *event: told.append(event))
    run = entry(report)
    assert config_of(out)["quantization_config"]["provenance"]["recovery"] == [run]
    assert run["config"] == config.to_dict()
    assert run["improved"]
    assert run["data_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (run["steps"], run["compute_dtype"]) == (12, "float32")
    assert len(told) == 12
    loss = [math.log(run[f"held_out_ppl_{when}"]) for when in ("before", "after")]
    ids = encode_documents(tiny_tokenizer(), [TEXT])
    floor = math.log(perplexity(dense, ids)) if config.method == "distill" else loss[0]
    assert loss[1] - floor < 0.8 * (loss[0] - floor) or loss[1] < loss[0] - 0.02

    # What was measured is what was written.
    _, held_out = hold_out(ids, 32)
    for directory, number in ((small, "before"), (out, "after")):
        found = perplexity(directory, held_out.flatten())
        assert found == pytest.approx(run[f"held_out_ppl_{number}"])
    assert run["held_out_tokens"] == held_out.numel()
    assert names(tmp_path) == ["out"]

    # No cost: the same layers and shapes, and nothing but the factors has changed.
    ranks = [m.rank for m in hf.load(out).modules() if isinstance(m, SVDLinear)]
    assert [layer.r for layer in report.layers] == ranks
    assert changed(small, out) == factors_of(small)


@pytest.mark.slow
def test_recovered_twice_is_recorded_twice(small, tmp_path):
    hf.recover(small, TEXT, tmp_path / "one", CONFIG)
    report = hf.recover(tmp_path / "one", TEXT, tmp_path / "two", CONFIG)
    manifest = verify(tmp_path / "two")
    assert (manifest["made_by"], manifest["source"]["path"]) == ("recover", str(tmp_path / "one"))
    first, second = report.provenance["recovery"]
    assert second["held_out_ppl_before"] == pytest.approx(first["held_out_ppl_after"])


@pytest.fixture(scope="module", params=["qwen2", "gemma2"])
def in_bfloat16(request, tmp_path_factory):
    """Another family, compressed."""
    root = tmp_path_factory.mktemp(request.param)
    with pytest.warns(match="calibration has"):
        return compressed(trained(root / "dense", request.param, torch.bfloat16), root / "small")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["distill", "lora"])
def test_other_families_in_bfloat16(in_bfloat16, method, tmp_path):
    small = in_bfloat16
    config = RecoverConfig(method=method, steps=12, seqlen=32, learning_rate=3e-3)
    run = entry(hf.recover(small, TEXT, tmp_path / "out", config))
    assert run["improved"] == (run["held_out_ppl_after"] < run["held_out_ppl_before"])
    assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}
    assert changed(small, tmp_path / "out") == (factors_of(small) if run["improved"] else set())


def test_where_nothing_improves_the_start_is_saved(small, tmp_path, monkeypatch):
    def slow(*arguments: object) -> torch.Tensor:
        sleep(0.3)
        return samples(*arguments)

    monkeypatch.setattr(train, "samples", slow)
    config = RecoverConfig(steps=1, minutes=0.001, seqlen=32, learning_rate=10.0)
    run = entry(hf.recover(small, TEXT, tmp_path / "out", config))
    assert (run["improved"], run["best_step"]) == (False, 0)
    assert run["minutes"] > 0.3 / 60
    assert run["held_out_ppl_after"] == run["held_out_ppl_before"]
    assert not changed(small, tmp_path / "out")


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_run_is_that_of_the_models_values(role, small, dense):
    models = {"student": hf.load(small), "teacher": hf.load(dense)}
    ids = torch.arange(64)
    before = _fingerprint(**models, ids=ids, config=CONFIG)
    assert before == _fingerprint(hf.load(small), hf.load(dense), ids, CONFIG)
    with torch.no_grad():  # no factor
        models[role].get_parameter("model.layers.0.self_attn.q_proj.weight")[0, 0] += 1
    assert before != _fingerprint(**models, ids=ids, config=CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["distill", "lora"])
@pytest.mark.parametrize("step", [1, 9])
def test_a_loss_that_is_not_finite(method, step, small, tmp_path, monkeypatch):
    kind = Distillation if method == "distill" else NextToken
    call, calls = kind.__call__, iter(range(100))

    def broken(self, ids):
        # The first call counts memory.
        return call(self, ids) * (float("nan") if next(calls) == step else 1.0)

    monkeypatch.setattr(kind, "__call__", broken)
    config = RecoverConfig(method=method, lora_order="joint", steps=12, seqlen=32)
    with pytest.raises(NonFiniteError, match=f"loss of step {step} must be finite") as caught:
        hf.recover(small, TEXT, tmp_path / "out", config)
    if step == 1:
        assert "nothing is written" in str(caught.value)
        assert names(tmp_path) == []
        return
    found = re.search(r"out holds the checkpoint after step (\d), the best", str(caught.value))
    report = hf.load(tmp_path / "out").config.quantization_config.report
    assert found is not None
    assert (entry(report)["best_step"], entry(report)["improved"]) == (int(found[1]), True)


def refused(match: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises((ValueError, OSError), match=match) as caught:
        hf.recover(*arguments, **options)
    assert "\n" not in str(caught.value)


def test_what_is_refused(small, dense, tmp_path):
    out = tmp_path / "out"
    refused("leave out the dense", small, TEXT, out, RecoverConfig("lora"), dense=dense)
    refused("seqlen must be between 2 and", small, TEXT, out, RecoverConfig(seqlen=129))
    refused("device must be cpu", small, TEXT, out, CONFIG, device="toaster")
    refused("holds the input model", small, TEXT, small, CONFIG, force=True)
    refused("is compressed itself", small, TEXT, out, CONFIG, dense=small)
    assert names(tmp_path) == []


@pytest.mark.slow
def test_another_dense_model_is_refused(small, dense, tmp_path):
    out = tmp_path / "out"
    for sizes, words in (
        ({"intermediate_size": 192}, r"gate_proj.weight is \[192, 64\], not \[176, 64\]"),
        ({"num_hidden_layers": 3}, "is in one of them alone"),
        ({}, "embed_tokens.weight has other values"),
    ):
        other = tiny_directory(tmp_path / "other", **sizes)
        refused(words, small, TEXT, out, dense=other)
    renamed = Path(shutil.copytree(dense, tmp_path / "renamed"))
    tokenizer = json.loads((renamed / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (renamed / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused("has another tokenizer", small, TEXT, out, dense=renamed)
    assert not out.exists()

    for path in renamed.glob("*token*"):
        path.unlink()  # the compressed model's is used
    assert entry(hf.recover(small, TEXT, out, CONFIG, dense=renamed))["improved"]


def test_a_missing_peft_is_named(small, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'neuronmm-ops\[recover\]'"):
        hf.recover(small, TEXT, tmp_path / "out", RecoverConfig("lora"))


def _interrupted(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.fill_(0.1)
    raise KeyboardInterrupt


@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_adapters_come_and_go(order, small):
    model = hf.load(small)
    ids = encode_documents(tiny_tokenizer(), [TEXT])[None, :64]
    config = RecoverConfig("lora", lora_order=order, lora_rank=2)
    with torch.no_grad():
        before = model(ids).logits
        with pytest.raises(KeyboardInterrupt), adapted(model, config) as phases:
            _interrupted(phases[-1].values())
        assert torch.equal(model(ids).logits, before)
        with adapted(model, config) as phases:
            for parameter in phases[-1].values():
                parameter.fill_(0.1)
            during = model(ids).logits
        torch.testing.assert_close(model(ids).logits, during)
    assert (during - before).abs().max() > 0.01
    factors = [{name.split(".lora_")[0][-1] for name in phase} for phase in phases]
    assert factors == ([{"u"}, {"v"}] if order == "sequential" else [{"u", "v"}])
    assert len(low_rank_layers(model)) == 6


def test_two_runs_at_one_output(small, tmp_path, monkeypatch):
    train = recover_function.__globals__["train_factors"]

    def second(*arguments):
        refused("another run works in", small, TEXT, tmp_path / "out", CONFIG)
        return train(*arguments)

    monkeypatch.setitem(recover_function.__globals__, "train_factors", second)
    hf.recover(small, TEXT, tmp_path / "out", CONFIG)
    assert names(tmp_path) == ["out"]


def test_gradient_checkpointing_where_memory_is_short(small, monkeypatch):
    ids = torch.arange(256).view(4, 64)

    def gradients(free):
        monkeypatch.setattr("neuronmm_ops.hf.memory._free_bytes", lambda _: free)
        model = hf.load(small)
        used = save_memory_(model, NextToken(model), ids)
        kept = saved_bytes(lambda: NextToken(model)(ids), ())
        NextToken(model)(ids).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert not model.model.layers[0].mlp.training
        return used, kept, found

    plenty, scarce = gradients(10**12), gradients(10**5)
    assert (plenty[0], scarce[0]) == (False, True)
    assert scarce[1] < 0.8 * plenty[1]
    for one, other in zip(plenty[2], scarce[2], strict=True):
        torch.testing.assert_close(one, other)


def test_rounded_factors_are_trained_and_stay_rounded(rounded, dense, tmp_path):
    out = tmp_path / "out"
    config = replace(CONFIG, steps=40, learning_rate=None)
    entry = hf.recover(rounded, TEXT, out, config, dense=dense).provenance["recovery"][-1]
    assert entry["improved"]
    assert entry["held_out_ppl_after"] < 0.95 * entry["held_out_ppl_before"]
    ids = encode_documents(tiny_tokenizer(), [TEXT])
    assert perplexity(out, ids) < perplexity(rounded, ids)
    factors = {f"{n}.{key}" for n in low_rank_layers(hf.load(rounded)) for key in ("u", "v")}
    assert changed(rounded, out) <= factors
    verify(out)


def test_rounding_is_exact_at_the_start_and_its_gradient_straight(rounded):
    layer = next(iter(low_rank_layers(hf.load(rounded)).values()))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(5, layer.in_features)
    expected = layer(x)
    unround_(layer)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    layer.v.data += 0.3  # less than half a step of the integers
    layer(x).sum().backward()
    grad = (x @ dequantized(before["u"], before["u_scale"], torch.float32)).sum(0)[:, None]
    scale = STORAGES[layer.storage].spread(before["v_scale"], layer.rank)
    inside = layer.v.abs() <= STORAGES[layer.storage].largest
    torch.testing.assert_close(layer.v.grad[inside], (grad * scale)[inside], rtol=1e-4, atol=1e-5)
    assert not layer.v.grad[~inside].any()
    layer.v.data -= 0.3
    round_(layer)
    assert_same_bits(layer.state_dict(), before)


def test_adapters_are_not_merged_into_what_is_rounded(rounded, tmp_path):
    with pytest.raises(ValueError, match=r"^method lora merges .* use method distill"):
        hf.recover(rounded, TEXT, tmp_path / "out", RecoverConfig(method="lora"))
