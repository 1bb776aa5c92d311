"""hf.compress: the checkpoint it writes, and what it checks before the compression."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small import CONFIG, compress
from stored import assert_same_bits, config_of
from tiny import tiny_directory, tiny_ids, tiny_model

from neuronmm_ops import SVDConfig, hf
from neuronmm_ops.compress import compare as comparing
from neuronmm_ops.compress import drift
from neuronmm_ops.compress.compare import candidates
from neuronmm_ops.compress.source import LayersInMemory, Task
from neuronmm_ops.errors import CompressionWarning
from neuronmm_ops.hf import compress as compress_function
from neuronmm_ops.nn import dense_linears
from neuronmm_ops.ops.backends.cpu import name_of

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
FAST = "neuronmm_ops.ops.backends.cpu.multiplies_fast"


def test_it_writes_what_it_returns(dense, tmp_path):
    told, out = [], tmp_path / "out"
    report = compress(dense, out, order="head", progress=lambda stage, *_: told.append(stage))
    record = config_of(out)["quantization_config"]
    assert {key: record[key] for key in report.to_dict()} == report.to_dict()
    assert report.calibration["tokens"] == 16 * 64
    assert report.calibration | {"order": "head", "samples": 16, "seqlen": 64} == report.calibration
    assert report.provenance["compute_dtype"] == "float32"
    assert list(dict.fromkeys(told)) == [
        "load",
        "gradients",
        "calibrate",
        "factorize",
        "drift",
        "save",
    ]
    assert hf.load(out)(tiny_ids(1)).logits.isfinite().all()
    assert hf.load_tokenizer(out)("a")["input_ids"]


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"method": "plain", "importance": "error"}, "load factorize save"),
        ({"method": "swift", "importance": "error"}, "load calibrate factorize save"),
        ({"method": "drift"}, "load gradients calibrate factorize drift save"),
        ({"method": "whiten", "importance": "perplexity"}, "load calibrate factorize probe save"),
    ],
)
def test_the_stages_are_those_of_the_docstring(options, stages, dense, tmp_path):
    told, config = [], SVDConfig(ratio=0.3, block=8, **options)
    compress(dense, tmp_path / "out", config, progress=lambda stage, *_: told.append(stage))
    assert list(dict.fromkeys(told)) == stages.split()
    (listed,) = re.findall(r"stages are (load.*?save)\.", hf.compress.__doc__ or "", re.DOTALL)
    assert set(told) <= set(re.findall(r"\w+", listed))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16"])
def test_what_is_not_compressed_is_written_bit_for_bit(stored, asked, tmp_path, monkeypatch):
    monkeypatch.setattr(FAST, lambda dtype: dtype == torch.float32)
    dense = tiny_directory(tmp_path / "dense", dtype=stored)
    report = compress(dense, tmp_path / "out", dtype=asked)
    assert report.provenance["compute_dtype"] == ("bfloat16" if asked == "bfloat16" else "float32")
    before = load_file(dense / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {stored}
    # A replaced weight may leave an empty tensor of its name.
    same = [name for name in before if name in after and after[name].numel()]
    assert len(same) == len(before) - 6
    for name in same:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name
    factors = after["model.layers.0.mlp.up_proj.u"], after["model.layers.0.mlp.up_proj.v"]
    assert report.layers[1].bytes == sum(factor.nbytes for factor in factors)
    assert report.layers[1].dense_bytes == before["model.layers.0.mlp.up_proj.weight"].nbytes


def test_factors_are_found_in_the_compute_dtype(tmp_path, monkeypatch):
    seen = []
    original = LayersInMemory.prepare

    def spy(self, task):
        seen.append(task.linears["model.layers.0.mlp.up_proj"].weight.dtype)
        original(self, task)

    monkeypatch.setattr(LayersInMemory, "prepare", spy)
    dense = tiny_directory(tmp_path / "dense", dtype=torch.bfloat16)
    for expected in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(FAST, {torch.float32, expected}.__contains__)
        report = compress(dense, tmp_path / f"{expected}")
        assert report.provenance["compute_dtype"] == name_of(expected)
    assert seen == [torch.float32, torch.bfloat16]


def test_the_target_is_checked_before_the_work(dense, tmp_path, monkeypatch):
    asked = []

    def check(target, force, source, needed_bytes=0):
        asked.append((target, force, source, needed_bytes))
        if needed_bytes:
            raise OSError("no room")

    monkeypatch.setitem(compress_function.__globals__, "check_target", check)
    monkeypatch.setattr(LayersInMemory, "gradients", pytest.fail)
    with pytest.raises(OSError, match="no room"):
        compress(dense, tmp_path / "out", force=True)
    assert asked[0] == (tmp_path / "out", True, dense, 0)
    assert asked[1][:3] == asked[0][:3]


@pytest.mark.parametrize(
    ("options", "is_exact"),
    [
        ({"allocation": "uniform"}, True),
        ({"allocation": "uniform", "layer_ratios": {"up_proj": 0, "gate_proj": (0.5, 0.9)}}, True),
        ({"layer_ratios": {"mlp": 0.5}}, True),
        ({}, False),
        ({"method": "zero-sum", "budget": "bytes"}, False),
        ({"layer_ratios": {"up_proj": 0, "down_proj": 0.6}}, False),
    ],
)
def test_room_is_asked_for_what_the_budget_may_leave(
    options, is_exact, dense, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setitem(
        compress_function.__globals__,
        "check_target",
        lambda target, force, source, needed_bytes=0: asked.append(needed_bytes),
    )
    compress(dense, tmp_path / "out", SVDConfig(ratio=0.3, block=8, **options), samples=4)
    model = hf.load(tmp_path / "out")
    bytes_after = sum(parameter.nbytes for parameter in model.parameters())
    largest_block = 4 * 8 * (64 + 176)
    assert 0 <= asked[-1] - bytes_after < (1 if is_exact else largest_block)


def test_a_budget_of_time_asks_for_the_dense_models_room():
    config = SVDConfig(budget="time", target="trn2", block=8)
    linears = dense_linears(tiny_model().model.layers[0].mlp)
    dtypes, limits = dict.fromkeys(linears, torch.float32), dict.fromkeys(linears, 8)
    assert Task(config, linears, dtypes, limits, {}, (), {}, []).bytes_saved() == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"seqlen": 129}, "got 129"),
        ({"order": "tail"}, "order must be one of spread, head; got 'tail'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16; got 'int8'"),
        ({"max_shard_size": 0}, "max_shard_size must be a size"),
    ],
)
def test_bad_arguments(options, word, dense, tmp_path):
    with pytest.raises(ValueError, match=word):
        compress(dense, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_both_records_have_the_method_that_was_used(dense, tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "hindrance", lambda *_: "it has an expert")
    with pytest.warns(CompressionWarning, match="kfac is used, not kfac-drift.*: it has an expert"):
        report = compress(dense, tmp_path / "out")
    assert report.config == replace(CONFIG, method="kfac")
    assert hf.read_run(tmp_path / "out" / "compression.json").config == report.config


def test_text_is_needed_but_for_plain(dense, tmp_path):
    with pytest.raises(ValueError, match="method kfac-drift needs a calibration text"):
        hf.compress(dense, None, None, tmp_path / "out")
    plain = SVDConfig(block=8, method="plain")
    assert hf.compress(dense, plain, None, tmp_path / "out").calibration is None


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_of_configs_the_nearest_is_written(taken, dense, tmp_path, monkeypatch):
    """The checkpoint and its record are those of that config alone, by all blocks."""
    config = SVDConfig(ratio=0.3, block=8)
    every = candidates(hf.load(dense), config, {})
    losses = iter([float(index != taken) for index in range(len(every))])
    monkeypatch.setattr(comparing, "divergence", lambda *_: next(losses))
    report = compress(dense, tmp_path / "out", config, compare=True)
    assert report.config == every[taken]
    assert report.provenance["compared"].split("; ")[taken].endswith(" 0 (taken)")
    assert report.calibration["samples"] == 16
    compress(dense, tmp_path / "again", every[taken])
    written = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "again")]
    assert_same_bits(*written)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"stream": True}, "leave --stream out.*got --stream"),
        ({"method": "plain", "importance": "error"}, {}, "other than plain: got plain"),
        ({"budget": "bytes", "storage": "auto"}, {"stream": True}, "auto cannot be streamed"),
    ],
)
def test_what_cannot_be_compared_is_refused(config, options, message, dense, tmp_path):
    with pytest.raises(ValueError, match=message):
        compress(dense, tmp_path / "out", SVDConfig(block=8, **config), compare=True, **options)
