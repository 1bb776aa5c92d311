"""`neuronmm compress`, and what `inspect`, `eval` and `generate` make of its checkpoints."""

import json
import os
import shutil
from typing import Any

import pytest
from outcomes import COMPRESS, TEXT, interrupt, refused
from tiny import SIZES, tiny_directory, tiny_model, tiny_tokenizer

from neuronmm_ops import SVDConfig, hf
from neuronmm_ops.cli.compress import show_summary
from neuronmm_ops.hf.streaming.source import LayersOnDisk
from neuronmm_ops.nn.svd_qkv import PROJECTIONS

PLAIN = ("--method", "plain", "--block", "8")
KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture
def compress(run, text, tmp_path):
    """Compresses a model to `out` as the text says, and returns what came of it."""

    def call(model, *options):
        out = ("-o", tmp_path / "out", "--calibration", text)
        return run("compress", model, *out, *COMPRESS, *options)

    return call


def test_the_whole_road(run, compress, dense, text, tmp_path):
    document = compress(dense, "--ratio", "0.3", "--json").document()
    assert document.pop("output") == str(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    summary = run("inspect", tmp_path / "out", "--json").document()
    assert summary.pop("verified") is True
    assert summary == document
    assert list(summary) == [
        *("ratio", "effective_ratio", "model_ratio", "compute_dtype", "bytes", "dense_bytes"),
        *("narrowed", "left_dense", "config", "calibration", "provenance", "layers"),
    ]
    assert summary["config"]["ratio"] == 0.3
    assert summary["calibration"]["tokens"] == 32 * 64
    assert list(summary["layers"][0]) == [
        *("name", "K", "N", "r", "dense", "loss", "bytes", "bits_per_weight", "compute", "storage")
    ]
    assert len(summary["layers"]) == 6
    parameters = sum(layer["r"] * (layer["K"] + layer["N"]) for layer in summary["layers"])
    assert summary["bytes"] == 4 * parameters
    assert summary["effective_ratio"] == pytest.approx(1 - parameters / (6 * 64 * 176))
    whole = sum(parameter.numel() for parameter in tiny_model().parameters())
    assert summary["model_ratio"] == pytest.approx((6 * 64 * 176 - parameters) / whole)
    assert summary["compute_dtype"] == "float32"

    result = run("eval", tmp_path / "out", "--text", text, "--seqlen", "64", "--json").document()
    assert list(result) == [
        *("model", "text", "ppl_token", "tokens", "seqlen", "dtype", "compute_dtype", "compute")
    ]
    blocks = -(-len(TEXT) // 64)
    assert (result["tokens"], result["seqlen"]) == (len(TEXT) - blocks, 64)
    assert result["dtype"] == result["compute_dtype"] == "float32"
    assert 1 < result["ppl_token"] < 1000
    options = ("--prompt", "The quick", "--new-tokens", "5", "--json")
    generated = run("generate", tmp_path / "out", *options).document()
    assert 1 <= generated["new_tokens"] <= 5


def test_tables_for_people(run, compress, dense, text, tmp_path):
    page = compress(dense).page()
    for words in (
        *("nominal ratio 0.200, effective", "whole model: 0.129", f"from {dense}"),
        "method kfac-drift, block 8, alpha 0.5, targets mlp",
        "calibrated on 2048 tokens: order spread, samples 32, seqlen 64",
        *("computed in float32", "model.layers.0.mlp.gate"),
    ):
        assert words in page
    shown = run("eval", tmp_path / "out", "--text", text).page()
    assert "ppl_token" in shown
    assert "compute_dtype float32" in shown
    assert run("generate", tmp_path / "out", "--prompt", "The").page().startswith("The")


@pytest.mark.parametrize("stream", [(), ("--stream",)])
@pytest.mark.parametrize(("storage", "dtype"), [("fp8", "float8_e4m3fn"), ("int8", "int8")])
def test_storage(run, compress, dense, tmp_path, storage, dtype, stream):
    options = ("--ratio", "0.3", "--samples", "16", "--storage", storage)
    layers = compress(dense, *options, *stream, "--json").document()["layers"]
    assert {layer["storage"] for layer in layers if layer["r"]} == {dtype}
    again = run("compress", "--from", tmp_path / "out" / "compression.json", "-o", tmp_path / "b")
    assert "bit for bit" in again.page()


@pytest.mark.parametrize(
    ("share", "words"), [("0.5", "part of that ratio"), ("1", "neuronmm prune")]
)
def test_narrower_mlps_are_told(run, compress, dense, tmp_path, share, words):
    options = ("--ratio", "0.4", "--prune-share", share)
    page = compress(dense, *options).page()
    narrowed = run("inspect", tmp_path / "out", "--json").document()["narrowed"]
    assert f"MLPs: {narrowed['kept']} of {narrowed['inner']} inner features stay" in page
    assert words in page
    shown = compress(dense, *options, "--compare", "--force").page()
    assert f"narrower {share}" in " ".join(shown.split())
    refused(compress(dense, *options, "--targets", "attention", "--force"), "add mlp to them")
    refused(compress(dense, "--prune-share", "2", "--force"), "prune_share must be in [0, 1]")


def test_a_layer_whose_loss_is_unknown_is_shown(capsys):
    layer = {"name": "fc1", "K": 8, "N": 8, "r": 2, "dense": False, "loss": None, "bytes": 128}
    layer |= {"bits_per_weight": 16.0, "compute": "x", "storage": None}
    ratios = {"ratio": 0.5, "effective_ratio": 0.5, "model_ratio": None, "compute_dtype": None}
    provenance = {"model": "m", "torch": "2", "recovery": [{"steps": 3}]}
    record = {"config": None, "calibration": None, "provenance": provenance}
    sizes = {"bytes": 128, "dense_bytes": 256, "narrowed": None, "left_dense": []}
    show_summary({**ratios, **record, **sizes, "layers": [layer]})
    shown = capsys.readouterr().out
    for words in ("factors are not of neuronmm compress", "from m, torch 2\n", "unknown"):
        assert words in shown
    assert "whole model" not in shown


def test_options_reach_the_library(run, text, tmp_path, monkeypatch):
    asked: dict[str, Any] = {}

    def compress(*arguments: Any, **options: Any) -> None:
        asked.update(options, arguments=arguments)
        raise ValueError("enough")

    monkeypatch.setattr("neuronmm_ops.hf.compress", compress)
    arguments = (
        *("compress", "org/name", "-o", tmp_path / "o", "--calibration", text, "--samples", 3),
        *("--seqlen", 0, "--calibration-order", "head", "--dtype", "bfloat16", "--device", "cuda"),
        *("--max-shard-size", "1GB", "--force", "--budget", "time", "--target", "trn2"),
        *("--tokens", "512"),
    )
    refused(run(*arguments), "enough")
    model, config, read, output = asked.pop("arguments")
    assert (model, read, output) == ("org/name", text, tmp_path / "o")
    assert config == SVDConfig(budget="time", target="trn2", tokens=512)
    assert asked.pop("progress")
    assert asked == {
        "samples": 3,
        "seqlen": 0,
        "order": "head",
        "dtype": "bfloat16",
        "device": "cuda",
        "force": True,
        "max_shard_size": "1GB",
    }


def test_few_calibration_tokens_warn_in_one_line(compress, dense):
    outcome = compress(dense, "--samples", "2", "--json")
    outcome.document()
    assert "warning: calibration has 128 tokens, fewer than 10*K = 1760" in outcome.err


def test_nothing_compressed_warns_in_one_line(run, dense, tmp_path):
    outcome = run("compress", dense, "-o", tmp_path / "o", "--method", "plain", "--json")
    assert outcome.document()["model_ratio"] == 0
    (line,) = outcome.err.splitlines()
    assert line.startswith("warning: nothing is compressed")
    assert "the largest block that fits is 40" in line


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
        (lambda d: os.truncate(d / "model.safetensors", 1000), "damaged or truncated"),
        (lambda d: [file.unlink() for file in d.glob("tok*")], "no usable tokenizer"),
        (lambda d: (d / "config.json").write_text("{}"), "cannot be loaded"),
        (shutil.rmtree, "copy"),
    ],
)
def test_model_directories_that_cannot_be_loaded(run, dense, text, tmp_path, damage, words):
    damage(shutil.copytree(dense, tmp_path / "copy"))
    refused(run("eval", tmp_path / "copy", "--text", text), words)


def saved(model, directory):
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def test_what_was_left_dense_is_shown(run, compress, tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    directory = saved(model, tmp_path / "moe")
    words = ("targets mlp match no nn.Linear", "q_proj", "MixtralExperts, stay dense")
    refused(compress(directory), *words)
    compressed = compress(directory, "--targets", "all-linear").page()
    total, experts = (
        sum(parameter.numel() for parameter in model.parameters()),
        2 * 4 * 2 * 176 * 64,
    )
    line = (
        f"left dense: model.layers.*.mlp.experts.gate_up_proj, {experts / total:.1%} of the "
        "model's parameters (a stack of matrices in one parameter of MixtralExperts)\n"
    )
    for page in (compressed, run("inspect", tmp_path / "out").page()):
        assert line in page
    left = run("inspect", tmp_path / "out", "--json").document()["left_dense"]
    assert [entry["name"].rpartition(".")[2] for entry in left[:2]] == ["gate_up_proj", "down_proj"]
    assert left[0]["parameters"] == 2 * left[1]["parameters"] == experts


def test_encoder_decoders_are_refused_in_one_line(run, compress, text, tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=260, **sizes))
    directory = saved(model, tmp_path / "t5")
    for outcome in (
        compress(directory, "--method", "plain"),
        run("eval", directory, "--text", text),
        run("generate", directory, "--prompt", "The"),
    ):
        refused(outcome, str(directory), "is an encoder-decoder", "decoders")


def test_a_tokenizer_of_another_model_is_refused(run, compress, text, tmp_path):
    directory = tiny_directory(tmp_path / "few", vocab_size=64, pad_token_id=0)
    for outcome, words in (
        (compress(directory), "calibration text"),
        (run("eval", directory, "--text", text), "text"),
        (run("generate", directory, "--prompt", "The", "--new-tokens", "2"), ""),
    ):
        refused(outcome, words, "token id", "embedding has 64 rows")


# --- ranks


def test_ranks_are_chosen_as_asked(compress, dense):
    document = compress(
        *(dense, "--method", "swift", "--importance", "error", "--budget", "bytes"),
        *("--ratio", "0.4", "--layer-ratio", "down_proj=0.5", "--layer-ratio", "gate_proj=0"),
        *("--layer-ratio", r"model\.layers\.0\..*=0.6:0.9", "--json"),
    ).document()
    ratios = {"down_proj": 0.5, "gate_proj": 0, r"model\.layers\.0\..*": (0.6, 0.9)}
    options = {"method": "swift", "importance": "error", "budget": "bytes", "layer_ratios": ratios}
    config = SVDConfig(ratio=0.4, block=8, **options).to_dict()
    assert document["config"] == json.loads(json.dumps(config))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", ("--ratio", "0.3", "--allocation", "uniform")),
        ("qwen3", ("--ratio", "0.6", "--storage", "fp8")),
    ],
)
def test_attention_s_projections_are_as_welcome(family, options, run, compress, text, tmp_path):
    dense, out = tiny_directory(tmp_path / "dense", family), tmp_path / "out"
    compress(dense, "--targets", "all-linear", *options).page()
    document = run("inspect", out, "--json").document()
    layers = document["layers"]
    assert {layer["name"].rpartition(".")[2] for layer in layers} == KINDS
    assert len(layers) == 2 * len(KINDS)
    assert not document["left_dense"]
    if "uniform" not in options:
        assert document["effective_ratio"] >= 0.6  # one budget, met as a whole
    ranks = {layer["name"]: layer["r"] for layer in layers}
    model = hf.load(str(out))
    for n in range(2):
        name = f"model.layers.{n}.self_attn"
        hooks = model.get_submodule(name)._forward_pre_hooks
        assert len(hooks) == all(ranks[f"{name}.{p}"] for p in PROJECTIONS)
        assert hooks or "uniform" not in options
    dtype = ("--dtype", "float32")
    evaluated = run("eval", out, "--text", text, "--seqlen", "64", "--json", *dtype)
    assert evaluated.document()["ppl_token"] > 1
    run("generate", out, "--prompt", "The quick", "--new-tokens", "3", *dtype).page()
    planned = run("plan", "--model", out, "--tokens", "1", "--json").document()
    assert {row["projection"] for row in planned} >= KINDS


# --- --stream


def test_a_stream_s_document_is_the_same_as_without(run, dense, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a table's title wraps at the table's width: a long path would
    command = ("compress", dense, "--ratio", "0.3", "--calibration", text, *COMPRESS, "-o")
    whole, streamed = (run(*command, *rest).page() for rest in (["a"], ["b", "--stream"]))
    assert whole.splitlines()[0].strip() == "a"
    assert streamed.splitlines()[1:] == whole.splitlines()[1:]


def test_a_stopped_stream_goes_on(compress, dense, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LayersOnDisk, "keep", interrupt)
        compress(dense, "--stream").interrupted()
    stopped = compress(dense, "--stream", "--ratio", "0.5")
    refused(stopped, "an unfinished compression", "another SVDConfig")
    compress(dense, "--stream").page()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
