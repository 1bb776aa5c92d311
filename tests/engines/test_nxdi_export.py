"""An export is whole, of one dtype, and what the machine with NxD Inference reads; or nothing."""

import json
import shutil

import pytest
import torch
from nxdi_checkpoints import make
from stored import assert_same_bits, config_of, edit_config, tensors_of

from neuronmm_ops.checkpoint import SINGLE, inspect_checkpoint
from neuronmm_ops.engines.nxdi import export as nxdi_export
from neuronmm_ops.engines.nxdi import files
from neuronmm_ops.engines.nxdi.export import export
from neuronmm_ops.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    return make(tmp_path / "checkpoint")


def test_every_tensor_is_kept_bit_for_bit(checkpoint, tmp_path):
    found = export(checkpoint, tmp_path / "out", tp=2)
    original = tensors_of(checkpoint)
    assert_same_bits(tensors_of(tmp_path / "out"), original)
    assert inspect_checkpoint(tmp_path / "out").layers[0].r == 29
    assert found.low_rank == 14
    assert found.bytes == (checkpoint / SINGLE).stat().st_size
    assert found.notes == ()
    assert not list(tmp_path.glob(".out*"))
    # Whoever can read the config can read every file.
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


SCALING = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("made", "theta", "scaling"),
    [
        ({}, 5000.0, None),
        ({"rope_parameters": {**SCALING, "rope_theta": 7.0}}, 7.0, SCALING),
        # As Transformers 4 has it.
        ({"rope_theta": 9.0, "rope_scaling": {"type": "linear"}}, 9.0, {"type": "linear"}),
    ],
)
def test_the_config_is_of_transformers_4(made, theta, scaling, tmp_path):
    source = make(tmp_path / "in", **made)
    if "rope_theta" in made:
        edit_config(source, lambda config: config.pop("rope_parameters"))
    export(source, tmp_path / "out", divide="one")
    config = config_of(tmp_path / "out")
    assert (config["rope_theta"], config["rope_scaling"]) == (theta, scaling)
    assert not {"rope_parameters", "dtype"} & set(config)
    assert (config["torch_dtype"], config["neuronmm_divide"]) == ("float32", "one")


@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_one_byte_stays_one_byte(storage, tmp_path):
    source = make(tmp_path / "in", dense=("down_proj",), storage=storage, dtype=torch.bfloat16)
    found = export(source, tmp_path / "out", tp=2)
    assert found.dtype == "bfloat16"
    assert not [note for note in found.notes if storage in note]
    assert_same_bits(tensors_of(tmp_path / "out"), tensors_of(source))
    assert inspect_checkpoint(tmp_path / "out").layers[0].storage == storage


def test_dense_attention_may_have_the_engines_kernels(tmp_path):
    source = make(tmp_path / "in", dense=("q_proj", "k_proj", "v_proj", "o_proj"))
    (note,) = export(source, tmp_path / "out").notes
    assert note.startswith("attention is dense: with --fused-qkv --qkv-kernel-enabled")


@pytest.mark.parametrize(
    ("made", "options", "target"),
    [(torch.float32, {"dtype": "bfloat16"}, "bfloat16"), (torch.float64, {}, "float32")],
)
def test_a_cast_is_said(made, options, target, tmp_path):
    found = export(make(tmp_path / "in", dtype=made), tmp_path / "out", **options)
    assert found.dtype == config_of(tmp_path / "out")["torch_dtype"] == target
    words = f"tensors in {str(made)[6:]} are cast to {target} as the engine loads them"
    assert found.notes == (words,)
    assert f"--torch-dtype {target}" in found.command


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_tokenizer_is_refused(text, checkpoint, tmp_path):
    (checkpoint / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json must hold"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_comes_along_as_transformers_4_knows_it(checkpoint, tmp_path):
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "compression.json").write_text("{}")
    fields = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "eos_token": "<e>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(fields))
    (checkpoint / "notes.txt").write_text("not ours")
    export(checkpoint, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    configs = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert names == {*configs, "tokenizer.json", SINGLE, "manifest.json"}
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"}
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 256


@pytest.mark.parametrize(
    ("tp", "made", "words"),
    [
        (3, {"num_key_value_heads": 4}, "intermediate_size 178 is padded to 180"),
        (3, {"num_key_value_heads": 4}, "4 heads are padded to 6"),
        (4, {}, "2 key/value heads are replicated to 4"),
    ],
)
def test_what_ranks_pad_or_hold_whole_is_said(tp, made, words, tmp_path):
    found = export(make(tmp_path / "in", **made), tmp_path / "out", tp=tp, divide="one")
    assert any(words in note for note in found.notes), found.notes
    assert "whole" in found.notes[-1]
    assert f"--tp-degree {tp}" in found.command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 0}, "--tp must be at least 1, got 0"),
        ({"divide": "two"}, "--divide must be one or both, got 'two'"),
        ({"dtype": "int8"}, "--dtype must be auto, bfloat16, float16, float32; got 'int8'"),
    ],
)
def test_bad_options_are_refused(options, words, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=words):
        export(checkpoint, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"model_type": "phi3"}, "got 'phi3'"),
        ({"num_key_value_heads": 4, "mlp_bias": True}, "must divide intermediate_size"),
        ({}, "got 2 and tp = 3"),
        ({"num_key_value_heads": 4, "rope_parameters": {"full": {}}}, "differ between layers"),
    ],
)
def test_models_that_are_not_taken_are_refused(made, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        export(make(tmp_path / "in", **made), tmp_path / "out", tp=3)
    assert not (tmp_path / "out").exists()


def test_an_earlier_export_is_replaced_and_nothing_else(checkpoint, tmp_path):
    out = tmp_path / "out"
    export(checkpoint, out)
    export(checkpoint, out, dtype="bfloat16")
    assert config_of(out)["torch_dtype"] == "bfloat16"
    other = make(tmp_path / "other")
    before = tensors_of(other)
    for target, words in ((other, "exists"), (checkpoint, "holds the input model")):
        with pytest.raises(FileExistsError, match=words):
            export(checkpoint, target)
    (out / "mine.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match=r"first mine\.txt"):
        export(checkpoint, out)
    assert (out / "mine.txt").exists()
    assert_same_bits(tensors_of(other), before)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failure_leaves_what_was_there(error, checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(checkpoint, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(source, target):
        raise error

    monkeypatch.setattr(files.shutil, "copyfile", fail)
    with pytest.raises(type(error)):
        export(checkpoint, out, dtype="bfloat16")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not list(tmp_path.glob(".out*"))


def test_a_full_disk_is_refused_before_writing(checkpoint, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(OSError, match=r"needs 0\.\d+ MB and the disk has 0\.000 MB free"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_that_a_shell_would_split_are_quoted(checkpoint, tmp_path):
    found = nxdi_export(checkpoint, tmp_path / "my model")
    assert f"--model-path '{tmp_path}/my model' " in found.command


def test_the_command_gives_a_sliding_window_a_longer_graph(tmp_path):
    checkpoint = make(tmp_path / "checkpoint", "mistral", sliding_window=64)
    assert "--seq-len 1024 " in nxdi_export(checkpoint, tmp_path / "out").command
