"""Checkpoints beside their dense model: what the rows say, and what is refused."""

import json
import math
import shutil

import pytest
import torch
from measured_models import add_token, compressed, computed_dtypes, edit_json, edit_tensor
from tiny import tiny_directory, tiny_model

from neuronmm_ops import CheckpointError, NonFiniteError, hf, token_perplexity
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
def rows(places):
    return compare.run([places / "a", places / "b"], TEXTS, seqlen=64, rounds=2)


def test_every_row_has_every_field(rows, places):
    assert [row["dir"] for row in rows] == [str(places / name) for name in ("dense", "a", "b")]
    assert {tuple(row) for row in rows} == {FIELDS}
    json.dumps(rows, allow_nan=False)


def test_perplexities_are_those_of_eval(rows, places):
    for row in rows:
        model, tokenizer = hf.load(row["dir"]), hf.load_tokenizer(row["dir"])
        for name, text in TEXTS.items():
            ids = encode_documents(tokenizer, [text])
            expected = token_perplexity(model, ids, 64).ppl_token
            assert row["ppl_token"][name] == pytest.approx(expected, rel=1e-6)
            excess = math.log(expected) - math.log(rows[0]["ppl_token"][name])
            assert row["excess_log_ppl"][name] == pytest.approx(excess, abs=1e-6)
            assert row["tokens"][name] == len(ids)


def test_sizes_are_those_on_disk(rows, places):
    for row, name in zip(rows, ("dense", "a", "b"), strict=True):
        assert row["bytes"] == (places / name / "model.safetensors").stat().st_size
    assert [row["ratio"] for row in rows] == [0.0, 0.2, 0.6]
    assert 0 < rows[1]["effective_ratio"] < rows[2]["effective_ratio"]
    assert rows[1]["config"]["method"] == "plain"


def test_speeds_hang_together(rows):
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


def test_gamma_is_a_loss_for_each_unit_of_speed():
    assert compare.gamma(0.053, 1.21) == pytest.approx(0.2524, abs=1e-4)
    assert compare.gamma(-0.1, 1.5) == pytest.approx(-0.2)
    assert compare.gamma(0.1, 1.0) is compare.gamma(0.1, 0.9) is None


def test_the_dense_model_may_be_given_and_is_recorded_in_config_json_too(places, tmp_path, copied):
    moved = shutil.copytree(places / "dense", tmp_path / "moved")
    assert compare.run([places / "a"], TEXTS, moved, rounds=1)[0]["dir"] == str(moved)
    copy = copied("a")
    (copy / RUN_FILE).unlink()
    assert compare.run([copy], TEXTS, rounds=1)[0]["dir"] == str(places / "dense")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_all_compute_in_the_dense_models_dtype(dtype, places, tmp_path, monkeypatch):
    computed = computed_dtypes(monkeypatch, compare, "paired_speed")
    tiny_directory(tmp_path / "dense", dtype=dtype)
    rows = compare.run([places / "a"], TEXTS, tmp_path / "dense", rounds=1)
    assert [row["dtype"] for row in rows] == [name_of(dtype), "float32"]
    assert {row["compute_dtype"] for row in rows} == {name_of(dtype)}
    assert computed == [dtype, dtype]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_other_families(family, tmp_path):
    dense = tiny_directory(tmp_path / "dense", family, tied=False)
    given = compressed(dense, tmp_path / "small", 0.4, targets="all-linear")
    dense, small = compare.run([given], TEXTS, rounds=1)
    assert small["bytes"] < dense["bytes"]
    assert small["tokens_per_s"]["decode"] > 0


def test_short_texts_have_a_perplexity_and_a_speed(places):
    dense, small = compare.run([places / "a"], {"t": "ab"}, rounds=1)
    assert dense["tokens"] == {"t": 2}
    assert small["tokens_per_s"]["prefill"] > 0


def test_a_model_with_few_positions_is_timed_within_them(tmp_path):
    dense = tiny_directory(tmp_path / "dense", max_position_embeddings=8)
    dense, _ = compare.run([compressed(dense, tmp_path / "small", 0.4)], TEXTS, rounds=1)
    assert (dense["seqlen"], dense["prefill_tokens"], dense["decode_tokens"]) == (8, 8, 7)


def test_progress_names_model_and_text(places):
    told = []
    compare.run([places / "a"], TEXTS, rounds=1, progress=lambda what, *_: told.append(what))
    assert list(dict.fromkeys(told)) == [
        *("evaluate dense on quick.txt", "evaluate dense on lorem.txt"),
        *("evaluate a on quick.txt", "evaluate a on lorem.txt", "speed a"),
    ]


@pytest.mark.parametrize(
    ("names", "options", "error", "words"),
    [
        ((), {}, ValueError, "at least one"),
        (("missing",), {}, CheckpointError, "is no directory"),
        (("a",), {"texts": {}}, ValueError, "at least one text"),
        (("a",), {"texts": {"t": "a"}}, ValueError, "text t must hold at least 2 tokens, got 1"),
        (("a",), {"dense": "b"}, CheckpointError, "b is compressed or quantized; give the dense"),
    ],
)
def test_what_cannot_be_compared(places, names, options, error, words):
    texts, dense = options.get("texts", TEXTS), options.get("dense")
    with pytest.raises(error, match=words):
        compare.run([places / n for n in names], texts, dense and places / dense)


def test_the_dense_model_must_be_there(places, copied):
    copy = copied("a")
    edit_json(copy / RUN_FILE, lambda run: run["model"].update(path="/no/such/model"))
    words = r"/no/such/model, .* cannot be read .*; give --dense"
    with pytest.raises(CheckpointError, match=words):
        compare.run([copy], TEXTS)
    with pytest.raises(ValueError, match=r"a is of .*dense and .*copy of /no/such/model"):
        compare.run([places / "a", copy], TEXTS)
    (copy / RUN_FILE).unlink()
    edit_json(copy / "config.json", lambda c: provenance(c).pop("model"))
    with pytest.raises(ValueError, match="does not record its dense model; give --dense"):
        compare.run([copy], TEXTS)


def provenance(config):
    return config["quantization_config"]["provenance"]


def test_other_tokens_do_not_compare(places, copied):
    copy = copied("b")
    add_token(copy)
    with pytest.raises(CheckpointError, match=r"copy must have the tokenizer of .*in/quick\.txt"):
        compare.run([places / "a", copy], TEXTS)


def test_broken_factors_name_the_model_and_the_text(copied):
    copy = copied("a")
    (copy / "manifest.json").unlink()
    # finite, and no activation after it is
    edit_tensor(copy, "model.norm.weight", lambda weight: weight.fill_(3e38))
    with pytest.raises(NonFiniteError, match=r"copy on in/quick\.txt: logits of block 0"):
        compare.run([copy], TEXTS)


def test_paired_speed_runs_both_models_in_every_round():
    models, told = (tiny_model(), tiny_model()), []
    options = {"decode_tokens": 8, "rounds": 3, "progress": lambda *event: told.append(event)}
    speed = paired_speed(*models, torch.arange(40), **options)
    assert speed.tokens == {"prefill": 40, "decode": 8, "end_to_end": 48}
    assert told == [("speed", done, 3) for done in (1, 2, 3)]
    for times in speed.times.values():
        rounds = {name: len(each) for name, each in times.rounds_ms.items()}
        assert rounds == {"dense": 3, "compressed": 3}
    both = speed.times["end_to_end"].rounds_ms["dense"]
    parts = (speed.times[phase].rounds_ms["dense"] for phase in ("prefill", "decode"))
    assert both == tuple(a + b for a, b in zip(*parts, strict=True))
    per_s = 8e3 / speed.times["decode"].median_ms("dense")
    assert speed.tokens_per_s("dense", "decode") == pytest.approx(per_s)


def test_a_model_without_a_cache_is_refused():
    model = tiny_model()
    forward = model.forward
    model.forward = lambda **options: forward(**{**options, "use_cache": False})  # pyright: ignore
    with pytest.raises(ValueError, match="LlamaForCausalLM gives no cache"):
        paired_speed(model, model, torch.arange(8), decode_tokens=2, rounds=1)


def row(name, ratio, recovered=False, **config):
    record = {"version": 2, "ratio": ratio, "block": 8, **config} if config else None
    shown = {"ratio": ratio, "effective_ratio": ratio, "config": record, "recovered": recovered}
    return {"dir": f"x/{name}", **shown}


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (
            [
                row("w4", 0.4, method="whiten", targets=["mlp"]),
                row("s2", 0.2, method="swift", targets=["mlp"]),
                row("w2", 0.2, method="whiten", targets=["mlp"]),
                row("s4", 0.4, method="swift", targets=["mlp"]),
                row("own", 0.3),
                row("p", 0.3, method="plain", targets=["attention"]),
            ],
            {"whiten": "w2 w4", "swift": "s2 s4", "own": "own", "p": "p"},
        ),
        (
            [row("before", 0.2, method="swift"), row("after", 0.2, method="swift")],
            {"before": "before", "after": "after"},
        ),
        ([row("a", 0.2, method="swift"), row("b", 0.4, method="swift")], {"swift": "a b"}),
        (
            [row(f"{r}{s}", r, s == "r", method="swift") for r in (0.2, 0.4) for s in ("", "r")],
            {"as compressed": "0.2 0.4", "recovered": "0.2r 0.4r"},
        ),
    ],
    ids=["a method", "points of one config", "one method", "recovered"],
)
def test_lines_of_a_plot(rows, lines):
    found = compare_plot.series_of(rows)
    named = {each.label: " ".join(r["dir"].removeprefix("x/") for r in each.rows) for each in found}
    assert (named, list(named)) == (lines, list(lines))


def test_a_row_says_whether_its_factors_were_trained(places, copied):
    copy = copied("a")
    edit_json(
        copy / "config.json", lambda c: provenance(c).update(recovery=[{"method": "distill"}])
    )
    rows = compare.run([places / "a", copy], TEXTS, rounds=1)
    assert [row["recovered"] for row in rows] == [False, False, True]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(rows, tmp_path, suffix):
    compare_plot.save(rows, tmp_path / f"out.{suffix}")
    data = (tmp_path / f"out.{suffix}").read_bytes()
    assert (b"PNG" if suffix == "png" else b"<svg") in data
    assert [path.name for path in tmp_path.iterdir()] == [f"out.{suffix}"]


def test_plot_of_many_texts(rows, tmp_path):
    fields = ("ppl_token", "excess_log_ppl")
    many = [
        {**r, **{f: {f"t{i}": r[f]["in/quick.txt"] for i in range(5)} for f in fields}}
        for r in rows
    ]
    compare_plot.save(many, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 10_000
