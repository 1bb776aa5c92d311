"""Rows have the documented fields and sane values; the example's SVD-LLM is the baseline."""

import itertools
import json
import math

import compress_1b
import pytest
import torch
from full_shape import make_model, make_tokenizer

from benchmarks import methods, overhead
from neuronmm_ops import PerplexityResult, SVDConfig, SVDLinear, compress_, hf
from neuronmm_ops.models import SHAPES, ModelShape

METHOD_FIELDS = (
    *("method", "allocation", "importance", "ratio", "effective_ratio", "text", "ppl_token"),
    *("excess_log_ppl", "excess_quotient", "compute_dtype"),
)
TINY = ModelShape("Tiny", 32, 64, 2, 2, 1, 16, 600, tied=True)
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def _tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "Tiny", TINY)


@pytest.fixture
def tiny_model(_tiny_shape: None, tmp_path):
    return make_model(tmp_path / "tiny", shape="Tiny")


def test_overhead_rows():
    rows = overhead.run(repeats=2, calls=2)
    modes, shapes = ("inference_mode", "no_grad"), ([2, 8], [1, 1, 8])
    assert [(row["mode"], row["x"]) for row in rows] == [*itertools.product(modes, shapes)]
    for row in rows:
        assert tuple(row) == (
            *("mode", "x", "linear_us", "op_us", "function_us", "sequential_us", "module_us"),
            "op_excess_us",
        )
        assert row["op_excess_us"] == pytest.approx(row["op_us"] - row["linear_us"])


def test_tokenizer_gives_any_text_back():
    tokenizer = make_tokenizer(300)
    text = "Grüße, 世界!\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 300


CANDIDATES = [
    *[("whiten", "uniform", None), ("kfac-drift", "greedy", None), ("plain", "uniform", None)],
    *[("plain", "greedy", "error"), ("whiten", "greedy", "gradient")],
    *[("drift", "greedy", "gradient"), ("zero-sum", "greedy", None)],
    *[("swift", "greedy", name) for name in ("gradient", "error", "perplexity")],
]


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_method_rows(tiny_model):
    done: list[tuple[str, int, int]] = []
    texts = {"in": TEXT[:600], "out": "".join(reversed(TEXT))[:600]}
    options = {"seqlen": 32, "samples": 4, "progress": lambda *args: done.append(args)}
    configs = methods.candidates_at((0.2, 0.6), block=8)
    rows = methods.run(tiny_model, texts, TEXT, configs, **options)
    first = [(row["method"], row["ratio"], row["text"]) for row in rows[:2]]
    assert first == [("dense", 0.0, "in"), ("dense", 0.0, "out")]
    assert [
        (row["ratio"], (row["method"], row["allocation"], row["importance"]), row["text"])
        for row in rows[2:]
    ] == list(itertools.product((0.2, 0.6), CANDIDATES, texts))
    assert done[-1] == ("methods", 20, 20)
    dense = {row["text"]: row["ppl_token"] for row in rows[:2]}
    for row in rows:
        assert tuple(row) == METHOD_FIELDS
        assert math.isfinite(row["ppl_token"])
        excess = math.log(row["ppl_token"] / dense[row["text"]])
        assert row["excess_log_ppl"] == pytest.approx(excess)
    assert all(0 < row["effective_ratio"] < 1 for row in rows[2:])


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_excess_is_divided_by_the_baselines_of_the_same_ratio_and_text(tiny_model, monkeypatch):
    # By text: the dense model's, then the baseline's and the default's at each ratio.
    ppl = iter([100.0, 200.0, 110.0, 190.0, 105.0, 210.0, 121.0, 242.0, 110.0, 220.0])

    def perplexity(*_: object) -> PerplexityResult:
        return PerplexityResult(next(ppl), 1, 1)

    monkeypatch.setattr(methods, "token_perplexity", perplexity)
    candidates = (methods.BASELINE, SVDConfig(method="plain"))
    configs = methods.candidates_at((0.2, 0.4), 8, candidates)
    texts = {"a": TEXT, "b": TEXT}
    rows = methods.run(tiny_model, texts, TEXT, configs, seqlen=32, samples=4)
    half = pytest.approx(math.log(1.05) / math.log(1.1))
    assert [row["excess_quotient"] for row in rows] == [
        *(None, None),
        *(1.0, None, half, None),  # the baseline is better than dense on b
        *(1.0, 1.0, pytest.approx(0.5), pytest.approx(0.5)),
    ]


def test_methods_need_enough_text(tiny_model):
    with pytest.raises(ValueError, match="at least one block of 64 tokens"):
        methods.run(tiny_model, {"text": TEXT}, "a b", [], seqlen=64)


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_the_svd_llm_of_the_example_is_whiten_with_uniform_ranks(tiny_model):
    config = SVDConfig(ratio=0.3, block=8, method="whiten", allocation="uniform")
    tokenizer = hf.load_tokenizer(tiny_model)
    batches = hf.calibration_batches(tokenizer, TEXT, 16, 32)
    model = hf.load_computing(tiny_model, "float32")
    rows = [row for batch in batches for row in batch.split(1)]
    found = {name: (u, v) for name, u, v in compress_1b.svd_llm(model, rows, config)}
    compress_(model, config, batches)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, SVDLinear)}
    assert found.keys() == layers.keys()
    assert len(found) == 6
    for name, (u, v) in found.items():
        expected = (layers[name].u @ layers[name].v).detach()
        torch.testing.assert_close(u @ v, expected, atol=1e-4 * float(expected.norm()), rtol=0)


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
@pytest.mark.usefixtures("_tiny_shape")
@pytest.mark.parametrize("extra", [[], ["--stream"]])
def test_the_example_times_both_procedures(extra, capsys):
    arguments = [*extra, "--shape", "Tiny", "--layers", "2", "--block", "8", "--tokens", "256"]
    compress_1b.main([*arguments, "--seqlen", "32", "--dtype", "float32"])
    document = json.loads(capsys.readouterr().out)
    ours, theirs = document["procedures"]
    assert [ours["procedure"], theirs["procedure"]] == ["neuronmm-ops", "SVD-LLM"]
    assert document["wall_quotient"] == pytest.approx(theirs["wall_s"] / ours["wall_s"])
    for spent in (ours, theirs):
        assert spent["compute_dtype"] == "float32"
        assert spent["cpu_s_per_layer"] == pytest.approx(spent["cpu_s"] / 2)
        assert spent["peak_rss_gib"] is None or 0.01 < spent["peak_rss_gib"] < 64
