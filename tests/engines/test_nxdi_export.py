"""An export is whole, of one dtype, and what the machine with NxD Inference reads; or nothing."""

import json
import shutil

import pytest
import torch
from nxdi_checkpoints import make
from safetensors.torch import load_file
from stored import assert_same_bits, config_of, edit_config, tensors_of

from neuronmm_ops.checkpoint import INDEX, SINGLE, inspect_checkpoint
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
    assert found.bytes == sum(tensor.nbytes for tensor in original.values())
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
def test_one_byte_factors_are_multiplied_out_with_a_note(storage, tmp_path):
    source = make(tmp_path / "in", dense=("down_proj",), storage=storage, dtype=torch.bfloat16)
    found = export(source, tmp_path / "out")
    assert found.dtype == "bfloat16"
    assert found.notes[0].startswith(f"14 layers were in {storage}; they are multiplied out")
    original, written = tensors_of(source), tensors_of(tmp_path / "out")
    assert set(written) == {name for name in original if not name.endswith(("_scale", ".w"))}
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    name = "model.layers.0.mlp.up_proj.v"
    wanted = original[name].float() * original[f"{name}_scale"]
    assert torch.equal(written[name], wanted.bfloat16())
    name = "model.layers.0.mlp.down_proj.w"
    wanted = original[name].float() * original[f"{name}_scale"]
    assert torch.equal(written[f"{name}eight"], wanted.bfloat16().t())
    layer = inspect_checkpoint(tmp_path / "out").layers[0]
    assert (layer.storage, layer.bytes) == (None, layer.parameters * 2)


@pytest.mark.parametrize(
    ("made", "options", "target"),
    [(torch.float32, {"dtype": "bfloat16"}, "bfloat16"), (torch.float64, {}, "float32")],
)
def test_a_dtype_is_cast_with_a_note(made, options, target, tmp_path):
    found = export(make(tmp_path / "in", dtype=made), tmp_path / "out", **options)
    assert found.dtype == target
    assert found.notes == (f"tensors in {str(made)[6:]} are cast to {target}",)
    written = tensors_of(tmp_path / "out").values()
    assert {str(tensor.dtype)[6:] for tensor in written} == {target}
    assert f"--torch-dtype {target}" in found.command


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_tokenizer_is_refused(text, checkpoint, tmp_path):
    (checkpoint / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json must hold"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_large_weights_are_in_several_files(checkpoint, tmp_path):
    found = export(checkpoint, tmp_path / "out", shard_bytes=100_000)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == found.bytes
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / n).values()) for n in names]
    assert max(sizes) <= 100_000
    assert_same_bits(tensors_of(tmp_path / "out"), tensors_of(checkpoint))
    again = export(tmp_path / "out", tmp_path / "single")
    assert (tmp_path / "single" / SINGLE).exists()
    assert again.bytes == found.bytes


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
    save, calls = files.save_file, list[str]()

    def fail(tensors, path, **options):
        calls.append(path.name)
        if len(calls) == 2:
            raise error
        save(tensors, path, **options)

    monkeypatch.setattr(files, "save_file", fail)
    with pytest.raises(type(error)):
        export(checkpoint, out, dtype="bfloat16", shard_bytes=100_000)
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
