"""`neuronmm compress`, `inspect` and `eval`: the main road, and one line for every mistake."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import COMPRESS, TEXT, Run, refused
from safetensors.torch import load_file, save_file
from tiny import SIZES, tiny_directory, tiny_model, tiny_tokenizer

from neuronmm_ops import SVDConfig
from neuronmm_ops.cli.compress import show_summary


def test_the_whole_road(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    arguments = ("--ratio", "0.3", "--calibration", text, *COMPRESS, "--json")

    compressed = run("compress", dense, "-o", out, *arguments)
    assert compressed.code == 0, compressed.err
    document = json.loads(compressed.out)
    assert document["output"] == str(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]

    inspected = run("inspect", out, "--json")
    assert inspected.code == 0, inspected.err
    summary = json.loads(inspected.out)
    assert summary.pop("verified") is True
    assert summary == {key: value for key, value in document.items() if key != "output"}
    assert list(summary) == [
        *("ratio", "effective_ratio", "model_ratio", "compute_dtype", "bytes", "dense_bytes"),
        *("left_dense", "config", "calibration", "provenance", "layers"),
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

    evaluated = run("eval", out, "--text", text, "--seqlen", "64", "--json")
    assert evaluated.code == 0, evaluated.err
    result = json.loads(evaluated.out, parse_constant=lambda name: pytest.fail(name))
    assert list(result) == [
        *("model", "text", "ppl_token", "tokens", "seqlen", "dtype", "compute_dtype", "compute")
    ]
    blocks = -(-len(TEXT) // 64)
    assert (result["tokens"], result["seqlen"]) == (len(TEXT) - blocks, 64)
    assert result["dtype"] == result["compute_dtype"] == "float32"
    assert 1 < result["ppl_token"] < 1000

    generated = run("generate", out, "--prompt", "The quick", "--new-tokens", "5", "--json")
    assert generated.code == 0, generated.err
    assert 1 <= json.loads(generated.out)["new_tokens"] <= 5


def test_tables_for_people(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    outcome = run("compress", dense, "-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    assert outcome.code == 0, outcome.err
    assert "nominal ratio 0.200, effective" in outcome.out
    assert "whole model: 0.129" in outcome.out
    assert "method kfac, block 8, alpha 0.5, targets mlp" in outcome.out
    assert "calibrated on 2048 tokens: order spread, samples 32, seqlen 64" in outcome.out
    assert f"from {dense}" in outcome.out
    assert "computed in float32" in outcome.out
    assert "model.layers.0.mlp.gate" in outcome.out
    shown = run("eval", tmp_path / "o", "--text", text)
    assert "ppl_token" in shown.out
    assert "compute_dtype float32" in shown.out
    assert run("generate", tmp_path / "o", "--prompt", "The").out.startswith("The")


@pytest.mark.parametrize("stream", [(), ("--stream",)])
@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_storage(
    run: Run, dense: Path, text: Path, tmp_path: Path, storage: str, stream: tuple[str, ...]
) -> None:
    arguments = ("compress", dense, "-o", tmp_path / "out", "--calibration", text, *stream)
    options = ("--ratio", "0.3", "--block", "8", "--samples", "16", "--seqlen", "64")
    outcome = run(*arguments, *options, "--storage", storage, "--json")
    assert outcome.code == 0, outcome.err
    layers = json.loads(outcome.out)["layers"]
    names = {"fp8": "float8_e4m3fn", "int8": "int8"}
    assert {layer["storage"] for layer in layers if layer["r"]} == {names[storage]}
    again = run("compress", "--from", tmp_path / "out" / "compression.json", "-o", tmp_path / "b")
    assert again.code == 0, again.err
    assert "bit for bit" in again.out


def test_mistakes_of_storage(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("compress", dense, "-o", tmp_path / "out", "--calibration", text)
    refused(run(*arguments, "--storage", "fp4"), "storage must be one of bf16, fp8, int8")
    options = ("--block", "8", "--storage", "bf16")
    for stream in ((), ("--stream",)):
        refused(run(*arguments, *options, *stream), "storage bf16 needs Linears in bfloat16")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.stream").exists()


def test_a_layer_whose_loss_is_unknown_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    layer = {"name": "fc1", "K": 8, "N": 8, "r": 2, "dense": False, "loss": None, "bytes": 128}
    layer |= {"bits_per_weight": 16.0, "compute": "x", "storage": None}
    ratios = {"ratio": 0.5, "effective_ratio": 0.5, "model_ratio": None, "compute_dtype": None}
    provenance = {"model": "m", "torch": "2", "recovery": [{"steps": 3}]}
    record = {"config": None, "calibration": None, "provenance": provenance}
    sizes = {"bytes": 128, "dense_bytes": 256, "left_dense": []}
    show_summary({**ratios, **record, **sizes, "layers": [layer]})
    shown = capsys.readouterr().out
    assert "factors are not of neuronmm compress" in shown
    assert "from m, torch 2\n" in shown
    assert "unknown" in shown
    assert "whole model" not in shown


def test_options_reach_the_library(
    run: Run, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_compressed_model_is_not_compressed_again(run: Run, dense: Path, tmp_path: Path) -> None:
    arguments = ("--method", "plain", "--block", "8")
    assert run("compress", dense, "-o", tmp_path / "a", *arguments).code == 0
    outcome = run("compress", tmp_path / "a", "-o", tmp_path / "b", *arguments)
    refused(outcome, "compressed or quantized already")


def test_plain_needs_no_calibration(run: Run, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    outcome = run("compress", dense, "-o", out, "--method", "plain", "--block", "8", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["effective_ratio"] > 0


def test_few_calibration_tokens_warn_in_one_line(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    arguments = ("--calibration", text, "--block", "8", "--seqlen", "64", "--samples", "2")
    outcome = run("compress", dense, "-o", tmp_path / "o", *arguments, "--json")
    assert outcome.code == 0
    assert "warning: calibration has 128 tokens, fewer than 10*K = 1760" in outcome.err
    json.loads(outcome.out)


def test_nothing_compressed_warns_in_one_line(run: Run, dense: Path, tmp_path: Path) -> None:
    outcome = run("compress", dense, "-o", tmp_path / "o", "--method", "plain", "--json")
    assert outcome.code == 0, outcome.err
    (line,) = outcome.err.splitlines()
    assert line.startswith("warning: nothing is compressed")
    assert "the largest block that fits is 40" in line
    assert json.loads(outcome.out)["model_ratio"] == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ratio", "0"), "ratio must be in (0, 1)"),
        (("--ratio", "1"), "ratio must be in (0, 1)"),
        (("--ratio", "nan"), "ratio must be in (0, 1)"),
        (("--ratio", "much"), "invalid float value"),
        (("--block", "12"), "multiple of 8, got 12"),
        (("--block", "0"), "multiple of 8, got 0"),
        (("--method", "magic"), "drift, kfac, zero-sum; got 'magic'"),
        (("--targets", "no_such_proj"), "match no nn.Linear"),
        (("--targets", "lm_head"), "shares its weight with model.embed_tokens"),
        (("--targets", "("), "no regular expression"),
        (("--samples", "0"), "at least 1"),
        (("--seqlen", "-3"), "seqlen must be between 1 and the model's limit of 128 tokens"),
        (("--seqlen", "0"), "limit of 128 tokens, got 0"),
        (("--seqlen", "5000"), "limit of 128 tokens, got 5000"),
        (("--calibration", "/no/such/file"), "/no/such/file"),
        (("--calibration-order", "tail"), "invalid choice: 'tail'"),
        (("--dtype", "float7"), "invalid choice: 'float7'"),
        (("--device", "toaster"), "device must be cpu, cuda or another of torch's"),
        (("--device", "xpu"), "device xpu is not available here"),
        (("--device", "meta"), "device meta is not available here"),
        (("--max-shard-size", "five"), "a size such as 5GB"),
        (("--max-shard-size", "0GB"), "a size such as 5GB"),
        (("--frobnicate",), "unrecognized arguments"),
    ],
)
def test_bad_arguments_of_compress(
    run: Run, dense: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], word: str
) -> None:
    out = tmp_path / "o"
    outcome = run("compress", dense, "-o", out, "--calibration", text, *COMPRESS, *arguments)
    refused(outcome, word)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--seqlen", "0"), "between 2 and the model's limit of 128 tokens, got 0"),
        (("--seqlen", "5000"), "between 2 and the model's limit of 128 tokens, got 5000"),
        (("--text", "/no/such/file"), "cannot read text /no/such/file"),
        (("--device", "cuda:77"), "cuda"),
        (("--dtype", "int8"), "invalid choice: 'int8'"),
    ],
)
def test_bad_arguments_of_eval(
    run: Run, dense: Path, text: Path, arguments: tuple[str, ...], word: str
) -> None:
    refused(run("eval", dense, "--text", text, *arguments), word)


@pytest.mark.parametrize(
    ("data", "word"),
    [(b"", "empty"), (b"\x00\x01\x02", "binary"), (b"\xff\xfe", "UTF-8"), (b"short", "one block")],
)
def test_bad_calibration_text(
    run: Run, dense: Path, tmp_path: Path, data: bytes, word: str
) -> None:
    file = tmp_path / "bad"
    file.write_bytes(data)
    refused(run("compress", dense, "-o", tmp_path / "o", "--calibration", file, *COMPRESS), word)


def test_calibration_is_required(run: Run, dense: Path, tmp_path: Path) -> None:
    refused(run("compress", dense, "-o", tmp_path / "o"), "needs --calibration", "plain")


def test_output_exists(run: Run, dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.mkdir()
    arguments = ("compress", dense, "-o", out, "--calibration", text, *COMPRESS)
    refused(run(*arguments), "exists", "--force")
    assert list(out.iterdir()) == []


def test_model_directories_that_cannot_be_loaded(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    def broken(name: str, change: Callable[[Path], Any]) -> Path:
        copy = Path(shutil.copytree(dense, tmp_path / name))
        change(copy)
        return copy

    weights = "model.safetensors"
    cases = {
        "config.json is missing": broken("a", lambda d: (d / "config.json").unlink()),
        "has no weights": broken("b", lambda d: (d / weights).unlink()),
        "damaged or truncated": broken("c", lambda d: os.truncate(d / weights, 1000)),
        "no usable tokenizer": broken("d", lambda d: [f.unlink() for f in d.glob("tok*")]),
        "cannot be loaded": broken("e", lambda d: (d / "config.json").write_text("{}")),
    }
    for word, directory in cases.items():
        refused(run("eval", directory, "--text", text), word)
    refused(run("eval", tmp_path / "missing", "--text", text), str(tmp_path / "missing"))


def test_non_finite_weights_name_the_layer(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(dense, tmp_path / "nan"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    arguments = ("-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    for command in (("compress", copy, *arguments), ("eval", copy, "--text", text)):
        refused(run(*command), "model.layers.1.mlp.up_proj.weight must be finite", "NaN")
    plain = ("--method", "plain", "--stream")
    refused(run("compress", copy, *arguments, *plain), "model.layers.1.mlp.up_proj: weight must be")


def test_non_finite_activations_name_the_layer(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(dense, tmp_path / "inf"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.post_attention_layernorm.weight"].fill_(3e38)  # finite
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    arguments = ("compress", copy, "-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    by_error = ("--method", "swift", "--importance", "error")
    refused(
        run(*arguments, *by_error), "model.layers.0.mlp.gate_proj", "activations must be finite"
    )
    refused(run(*arguments), "_proj: input activations must be finite")


def mixtral(directory: Path) -> int:
    """Write a mixture of experts; return the number of its parameters."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_local_experts=4)  # pyright: ignore
    model = MixtralForCausalLM(config)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def test_experts_alone_are_refused(run: Run, text: Path, tmp_path: Path) -> None:
    mixtral(tmp_path / "moe")
    outcome = run(
        "compress", tmp_path / "moe", "-o", tmp_path / "o", "--calibration", text, *COMPRESS
    )
    refused(outcome, "targets mlp match no nn.Linear", "q_proj", "MixtralExperts, stay dense")


def test_what_was_left_dense_is_shown(run: Run, text: Path, tmp_path: Path) -> None:
    total, out = mixtral(tmp_path / "moe"), tmp_path / "o"
    experts = 2 * 4 * 2 * 176 * 64
    arguments = ("--calibration", text, *COMPRESS, "--targets", "all-linear")
    compressed = run("compress", tmp_path / "moe", "-o", out, *arguments)
    assert compressed.code == 0, compressed.err
    inspected = run("inspect", out)
    line = (
        f"left dense: model.layers.*.mlp.experts.gate_up_proj, {experts / total:.1%} of the "
        "model's parameters (a stack of matrices in one parameter of MixtralExperts)\n"
    )
    for outcome in (compressed, inspected):
        assert line in outcome.out
    left = json.loads(run("inspect", out, "--json").out)["left_dense"]
    assert [entry["name"].rpartition(".")[2] for entry in left[:2]] == ["gate_up_proj", "down_proj"]
    assert left[0]["parameters"] == 2 * left[1]["parameters"] == experts


def test_gpt2(run: Run, text: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    directory, out = tmp_path / "gpt2", tmp_path / "o"
    # Its projections are Conv1D modules: there is no nn.Linear but the head.
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 260, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    arguments = ("--calibration", text, *COMPRESS, "--targets", "mlp", "c_attn")
    outcome = run("compress", directory, "-o", out, *arguments, "--json")
    assert outcome.code == 0, outcome.err
    layers = {layer["name"]: layer for layer in json.loads(outcome.out)["layers"]}
    shapes = {name: (layer["K"], layer["N"]) for name, layer in layers.items()}
    assert shapes == {
        "transformer.h.0.attn.c_attn": (64, 192),
        "transformer.h.0.mlp.c_fc": (64, 256),
        "transformer.h.0.mlp.c_proj": (256, 64),
    }
    assert json.loads(run("inspect", out, "--json").out)["layers"] == list(layers.values())
    generated = run("generate", out, "--prompt", "The", "--new-tokens", "3", "--json")
    assert json.loads(generated.out)["new_tokens"] == 3


def test_encoder_decoders_are_refused_in_one_line(run: Run, text: Path, tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    directory = tmp_path / "t5"
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=260, **sizes)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    words = (str(directory), "is an encoder-decoder", "decoders")
    refused(run("compress", directory, "-o", tmp_path / "o", "--method", "plain"), *words)
    refused(run("eval", directory, "--text", text), *words)
    refused(run("generate", directory, "--prompt", "The"), *words)


def test_a_tokenizer_of_another_model_is_refused(run: Run, text: Path, tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "small", vocab_size=64, pad_token_id=0)
    words = ("token id", "embedding has 64 rows")
    arguments = ("-o", tmp_path / "o", "--calibration", text, *COMPRESS)
    refused(run("compress", directory, *arguments), "calibration text", *words)
    refused(run("eval", directory, "--text", text), "text", *words)
    refused(run("generate", directory, "--prompt", "The", "--new-tokens", "2"), *words)


def test_bfloat16_checkpoints_stay_bfloat16(run: Run, text: Path, tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    tiny_tokenizer().save_pretrained(tmp_path / "bf16")
    out = tmp_path / "o"
    assert run("compress", tmp_path / "bf16", "-o", out, "--calibration", text, *COMPRESS).code == 0
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {
        torch.bfloat16
    }
    outcome = run("eval", out, "--text", text, "--dtype", "float32", "--json")
    document = json.loads(outcome.out)
    assert (document["dtype"], document["compute_dtype"]) == ("bfloat16", "float32")
