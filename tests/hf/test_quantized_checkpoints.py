"""hf.quantize: pairs and dense targets of a checkpoint in floats, rounded; what it refuses."""

import pytest
import torch
from stored import tensors_of
from tiny import tiny_directory, tiny_ids

from neuronmm_ops import StoredLinear, SVDConfig, SVDLinear, hf
from neuronmm_ops.checkpoint import inspect_checkpoint
from neuronmm_ops.compress.record import compressed_layers
from neuronmm_ops.errors import CheckpointError
from neuronmm_ops.manifest import verify
from neuronmm_ops.storages import STORAGES

pytestmark = pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
TEXT = " ".join(str(i * i) for i in range(600))
DENSE = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of pairs, one of whose targets has stayed dense."""
    base = tmp_path_factory.mktemp("quantize")
    config = SVDConfig(ratio=0.2, block=8, targets="all-linear", layer_ratios={DENSE: 0})
    hf.compress(tiny_directory(base / "dense"), config, TEXT, base / "small", seqlen=32)
    return base / "small"


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("text", [TEXT, None])
@torch.no_grad()
def test_matrices_are_rounded_and_nothing_else(small, storage, text, tmp_path):
    report = hf.quantize(small, storage, text, tmp_path / "out", samples=8, seqlen=32)
    verify(tmp_path / "out")
    found = inspect_checkpoint(tmp_path / "out")
    before = inspect_checkpoint(small)
    assert sorted(found.layers, key=str) == sorted(report.layers, key=str)
    assert {layer.storage for layer in found.layers} == {storage}
    assert {(x.name, x.r, x.loss) for x in found.layers} == {
        (x.name, x.r, x.loss) for x in before.layers
    }
    quantized = {"storage": storage} | ({"samples": 8, "seqlen": 32} if text else {})
    assert quantized.items() <= report.provenance["quantized"].items()
    model, start = hf.load(tmp_path / "out"), hf.load(small)
    layers = compressed_layers(model)
    for layer in found.layers:
        assert isinstance(layers[layer.name], StoredLinear if layer.dense else SVDLinear)
    assert found.layers[[x.name for x in found.layers].index(DENSE)].dense
    ids = tiny_ids(2, 32)
    logits, expected = model(ids).logits, start(ids).logits
    assert 0 < (logits - expected).norm() / expected.norm() < (0.3 if storage == "int4" else 0.08)
    kept, own = tensors_of(tmp_path / "out"), tensors_of(small)
    for name in own.keys() & kept.keys():
        if name.rpartition(".")[0] not in {layer.name for layer in found.layers}:
            assert torch.equal(kept[name], own[name])


@torch.no_grad()
def test_what_inputs_say_is_worth_it(small, tmp_path):
    ids, errors = hf.load_tokenizer(small)(TEXT, return_tensors="pt").input_ids[:, :64], []
    expected = hf.load(small)(ids).logits
    for number, text in enumerate((TEXT, None)):
        hf.quantize(small, "int4", text, tmp_path / str(number), samples=16, seqlen=32)
        errors.append(float((hf.load(tmp_path / str(number))(ids).logits - expected).norm()))
    assert errors[0] < errors[1]


def test_what_is_refused(small, tmp_path):
    out = tmp_path / "out"

    def refused(error, words, model=small, storage="int8", text=None, output=out, **options):
        with pytest.raises(error, match=words):
            hf.quantize(model, storage, text, output, **options)
        assert not out.exists()  # nor half of it

    refused(ValueError, "storage must be fp8 or int8 or int4, got 'int3'", storage="int3")
    refused(CheckpointError, "is not compressed; .* --ratio 0 --storage", small.parent / "dense")
    refused(FileExistsError, "exists and is no compressed", output=small.parent / "dense")
    refused(ValueError, "must hold at least", text="too short", seqlen=32)
    hf.quantize(small, "fp8", None, tmp_path / "fp8")
    refused(ValueError, r"fp8 is rounded already \(model.*: fp8\); take", tmp_path / "fp8")
