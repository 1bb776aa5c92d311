"""Checkpoints beside their dense model: what the rows say, and what is refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_directory, tiny_model
from tokenizers import Tokenizer

from neuronmm_ops import CheckpointError, NonFiniteError, SVDConfig, hf, token_perplexity
from neuronmm_ops.eval import encode_documents
from neuronmm_ops.measure import compare, compare_plot
from neuronmm_ops.measure.speed import paired_speed
from neuronmm_ops.ops.backends.cpu import name_of

TEXTS = {
    "in/quick.txt": "The quick brown fox jumps over the lazy dog. 0123456789\n" * 20,
    "out/lorem.txt": "Lorem ipsum dolor sit amet, consectetur adipiscing elit.\n" * 3,
}
RUN_FILE = "compression.json"
FIELDS = (
    *("dir", "ratio", "effective_ratio", "model_ratio", "bytes", "ppl_token", "excess_log_ppl"),
    *("tokens_per_s", "speedup", "gamma", "config", "recovered", "dtype", "tokens", "seqlen"),
    *("prefill_tokens", "decode_tokens", "compute_dtype", "device", "threads", "versions"),
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `dense`, and `a` and `b` compressed from it."""
    root = tmp_path_factory.mktemp("places")
    tiny_directory(root / "dense")
    for name, ratio in (("a", 0.2), ("b", 0.6)):
        config = SVDConfig(ratio=ratio, block=8, method="plain")
        hf.compress(root / "dense", config, None, root / name)
    return root


@pytest.fixture(scope="module")
def rows(places: Path) -> list[dict[str, Any]]:
    return compare.run([places / "a", places / "b"], TEXTS, seqlen=64, rounds=2)


def test_every_row_has_every_field(rows: list[dict[str, Any]], places: Path) -> None:
    assert [row["dir"] for row in rows] == [str(places / name) for name in ("dense", "a", "b")]
    assert {tuple(row) for row in rows} == {FIELDS}
    json.dumps(rows, allow_nan=False)


def test_perplexities_are_those_of_eval(rows: list[dict[str, Any]], places: Path) -> None:
    for row in rows:
        model, tokenizer = hf.load(row["dir"]), hf.load_tokenizer(row["dir"])
        for name, text in TEXTS.items():
            ids = encode_documents(tokenizer, [text])
            expected = token_perplexity(model, ids, 64).ppl_token
            assert row["ppl_token"][name] == pytest.approx(expected, rel=1e-6)
            excess = math.log(expected) - math.log(rows[0]["ppl_token"][name])
            assert row["excess_log_ppl"][name] == pytest.approx(excess, abs=1e-6)
            assert row["tokens"][name] == len(ids)


def test_sizes_are_those_on_disk(rows: list[dict[str, Any]], places: Path) -> None:
    for row, name in zip(rows, ("dense", "a", "b"), strict=True):
        assert row["bytes"] == (places / name / "model.safetensors").stat().st_size
    assert [row["ratio"] for row in rows] == [0.0, 0.2, 0.6]
    assert 0 < rows[1]["effective_ratio"] < rows[2]["effective_ratio"]
    assert rows[1]["config"]["method"] == "plain"


def test_speeds_hang_together(rows: list[dict[str, Any]]) -> None:
    dense, *others = rows
    assert dense["speedup"] == {"prefill": 1.0, "decode": 1.0, "end_to_end": 1.0}
    assert dense["gamma"] is None
    assert (dense["prefill_tokens"], dense["decode_tokens"]) == (64, 32)
    for row in others:
        for phase, speed in row["tokens_per_s"].items():
            expected = dense["tokens_per_s"][phase] * row["speedup"][phase]
            assert 0 < speed == pytest.approx(expected)
        excess = sum(row["excess_log_ppl"].values()) / len(TEXTS)
        assert row["gamma"] == compare.gamma(excess, row["speedup"]["end_to_end"])


def test_gamma_is_a_loss_for_each_unit_of_speed() -> None:
    assert compare.gamma(0.053, 1.21) == pytest.approx(0.2524, abs=1e-4)
    assert compare.gamma(-0.1, 1.5) == pytest.approx(-0.2)
    assert compare.gamma(0.1, 1.0) is compare.gamma(0.1, 0.9) is None


def test_the_dense_model_may_be_given(places: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(places / "dense", tmp_path / "moved"))
    rows = compare.run([places / "a"], TEXTS, moved, rounds=1)
    assert rows[0]["dir"] == str(moved)


def test_a_record_in_config_json_alone_names_the_dense_model(places: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(places / "a", tmp_path / "copy"))
    (copy / RUN_FILE).unlink()
    assert compare.run([copy], TEXTS, rounds=1)[0]["dir"] == str(places / "dense")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_all_compute_in_the_dense_models_dtype(
    dtype: torch.dtype, places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronmm_ops.ops.backends.cpu.multiplies_fast", lambda dtype: True)
    computed: list[torch.dtype] = []

    def spy(*models: Any, **options: Any) -> Any:
        computed.extend(model.model.layers[0].input_layernorm.weight.dtype for model in models[:2])
        return paired_speed(*models, **options)

    monkeypatch.setattr(compare, "paired_speed", spy)
    tiny_directory(tmp_path / "dense", dtype=dtype)
    rows = compare.run([places / "a"], TEXTS, tmp_path / "dense", rounds=1)
    assert [row["dtype"] for row in rows] == [name_of(dtype), "float32"]
    assert {row["compute_dtype"] for row in rows} == {name_of(dtype)}
    assert computed == [dtype, dtype]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_other_families(family: str, tmp_path: Path) -> None:
    tiny_directory(tmp_path / "dense", family, tied=False)
    config = SVDConfig(ratio=0.4, block=8, method="plain", targets="all-linear")
    hf.compress(tmp_path / "dense", config, None, tmp_path / "small")
    dense, small = compare.run([tmp_path / "small"], TEXTS, rounds=1)
    assert small["bytes"] < dense["bytes"]
    assert small["tokens_per_s"]["decode"] > 0


def test_short_texts_have_a_perplexity_and_a_speed(places: Path) -> None:
    dense, small = compare.run([places / "a"], {"t": "ab"}, rounds=1)
    assert dense["tokens"] == {"t": 2}
    assert small["tokens_per_s"]["prefill"] > 0


def test_a_model_with_few_positions_is_timed_within_them(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "dense", max_position_embeddings=8)
    config = SVDConfig(ratio=0.4, block=8, method="plain")
    hf.compress(tmp_path / "dense", config, None, tmp_path / "small")
    dense, _ = compare.run([tmp_path / "small"], TEXTS, rounds=1)
    assert (dense["seqlen"], dense["prefill_tokens"], dense["decode_tokens"]) == (8, 8, 7)


def test_progress_names_model_and_text(places: Path) -> None:
    told: list[str] = []
    compare.run([places / "a"], TEXTS, rounds=1, progress=lambda what, *_: told.append(what))
    assert list(dict.fromkeys(told)) == [
        *("evaluate dense on quick.txt", "evaluate dense on lorem.txt"),
        *("evaluate a on quick.txt", "evaluate a on lorem.txt", "speed a"),
    ]


# --- refused


def test_names_must_differ(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "b", tmp_path / "a")
    with pytest.raises(ValueError, match="names that differ, got a 2 times"):
        compare.run([places / "a", tmp_path / "a"], TEXTS)
    with pytest.raises(ValueError, match="at least one"):
        compare.run([], TEXTS)


def test_what_is_no_compressed_checkpoint(places: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dense is not a compressed checkpoint"):
        compare.run([places / "a", places / "dense"], TEXTS)
    with pytest.raises(CheckpointError, match="is no directory"):
        compare.run([tmp_path / "missing"], TEXTS)


def test_texts_are_needed(places: Path) -> None:
    with pytest.raises(ValueError, match="at least one text"):
        compare.run([places / "a"], {})
    with pytest.raises(ValueError, match="text t must hold at least 2 tokens, got 1"):
        compare.run([places / "a"], {"t": "a"})


def test_the_dense_model_must_be_there_and_dense(places: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(places / "a", tmp_path / "copy"))
    run = json.loads((copy / RUN_FILE).read_text())
    run["model"]["path"] = "/no/such/model"
    (copy / RUN_FILE).write_text(json.dumps(run))
    with pytest.raises(
        CheckpointError, match=r"/no/such/model, .* cannot be read .*; give --dense"
    ):
        compare.run([copy], TEXTS)
    with pytest.raises(ValueError, match=r"a is of .*dense and .*copy of /no/such/model"):
        compare.run([places / "a", copy], TEXTS)
    with pytest.raises(CheckpointError, match="b is compressed or quantized; give the dense"):
        compare.run([places / "a"], TEXTS, places / "b")
    (copy / RUN_FILE).unlink()
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]["provenance"]["model"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not record its dense model; give --dense"):
        compare.run([copy], TEXTS)


def test_other_tokens_do_not_compare(places: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(places / "b", tmp_path / "copy"))
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.add_tokens(["quick"])
    tokenizer.save(str(copy / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"copy must have the tokenizer of .*in/quick\.txt"):
        compare.run([places / "a", copy], TEXTS)


def test_broken_factors_name_the_model_and_the_text(places: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(places / "a", tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)  # finite, and no activation after it is
    (copy / "manifest.json").unlink()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"copy on in/quick\.txt: logits of block 0"):
        compare.run([copy], TEXTS)


# --- speed and plot


def test_paired_speed_runs_both_models_in_every_round() -> None:
    dense, compressed, told = tiny_model(), tiny_model(), []
    speed = paired_speed(
        dense,
        compressed,
        torch.arange(40),
        decode_tokens=8,
        rounds=3,
        progress=lambda *event: told.append(event),
    )
    assert speed.tokens == {"prefill": 40, "decode": 8, "end_to_end": 48}
    assert told == [("speed", done, 3) for done in (1, 2, 3)]
    for times in speed.times.values():
        assert {name: len(each) for name, each in times.rounds_ms.items()} == {
            "dense": 3,
            "compressed": 3,
        }
    both = speed.times["end_to_end"].rounds_ms["dense"]
    parts = (speed.times[phase].rounds_ms["dense"] for phase in ("prefill", "decode"))
    assert both == tuple(a + b for a, b in zip(*parts, strict=True))
    assert speed.tokens_per_s("dense", "decode") == pytest.approx(
        8e3 / speed.times["decode"].median_ms("dense")
    )


def test_a_model_without_a_cache_is_refused() -> None:
    model = tiny_model()
    forward = model.forward
    model.forward = lambda **options: forward(**{**options, "use_cache": False})  # pyright: ignore
    with pytest.raises(ValueError, match="LlamaForCausalLM gives no past_key_values"):
        paired_speed(model, model, torch.arange(8), decode_tokens=2, rounds=1)


def row(name: str, ratio: float, recovered: bool = False, **config: Any) -> dict[str, Any]:
    record = {"version": 2, "ratio": ratio, "block": 8, **config} if config else None
    shown = {"ratio": ratio, "effective_ratio": ratio, "config": record, "recovered": recovered}
    return {"dir": f"x/{name}", **shown}


def test_checkpoints_that_differ_in_the_ratio_alone_are_one_line() -> None:
    found = compare_plot.series_of(
        [
            row("w4", 0.4, method="whiten", targets=["mlp"]),
            row("s2", 0.2, method="swift", targets=["mlp"]),
            row("w2", 0.2, method="whiten", targets=["mlp"]),
            row("s4", 0.4, method="swift", targets=["mlp"]),
            row("own", 0.3),
            row("p", 0.3, method="plain", targets=["attention"]),
        ]
    )
    names = [(each.label, [r["dir"] for r in each.rows]) for each in found]
    assert names == [
        ("whiten", ["x/w2", "x/w4"]),
        ("swift", ["x/s2", "x/s4"]),
        ("own", ["x/own"]),
        ("p", ["x/p"]),
    ]


def test_checkpoints_of_one_config_and_ratio_are_points() -> None:
    twice = [row("before", 0.2, method="swift"), row("after", 0.2, method="swift")]
    assert [each.label for each in compare_plot.series_of(twice)] == ["before", "after"]
    alone = [row("a", 0.2, method="swift"), row("b", 0.4, method="swift")]
    assert [each.label for each in compare_plot.series_of(alone)] == ["swift"]


def test_recovered_checkpoints_are_a_line_of_their_own() -> None:
    rows = [row(f"{r}{s}", r, s == "r", method="swift") for r in (0.2, 0.4) for s in ("", "r")]
    assert [each.label for each in compare_plot.series_of(rows)] == ["as compressed", "recovered"]


def test_a_row_says_whether_its_factors_were_trained(places: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(places / "a", tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["provenance"]["recovery"] = [{"method": "distill"}]
    (copy / "config.json").write_text(json.dumps(config))
    rows = compare.run([places / "a", copy], TEXTS, rounds=1)
    assert [row["recovered"] for row in rows] == [False, False, True]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(rows: list[dict[str, Any]], tmp_path: Path, suffix: str) -> None:
    compare_plot.save(rows, tmp_path / f"out.{suffix}")
    data = (tmp_path / f"out.{suffix}").read_bytes()
    assert (b"PNG" if suffix == "png" else b"<svg") in data
    assert [path.name for path in tmp_path.iterdir()] == [f"out.{suffix}"]


def test_plot_of_many_texts(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    fields = ("ppl_token", "excess_log_ppl")
    many = [
        {**r, **{f: {f"t{i}": r[f]["in/quick.txt"] for i in range(5)} for f in fields}}
        for r in rows
    ]
    compare_plot.save(many, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000
