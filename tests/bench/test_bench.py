"""Rows have the documented fields and sane values; nothing here depends on the machine's speed."""

import itertools
import json
import math

import compress_1b
import pytest
import torch
from full_shape import make_model, make_tokenizer

from neuronmm_ops import PerplexityResult, SVDConfig, SVDLinear, compress_, hf
from neuronmm_ops.bench import cpu, methods, overhead, timing
from neuronmm_ops.models import SHAPES, ModelShape, model_shape
from neuronmm_ops.ops.backends.cpu import multiplies_fast

CPU_FIELDS = (
    "op",
    "pass",
    "M",
    "K",
    "N",
    "r",
    "dtype",
    "compute_dtype",
    "threads",
    "dense_ms",
    "two_gemm_ms",
    "op_ms",
    "speedup",
    "ideal_speedup",
    "storage",
    "stored_ms",
    "stored_speedup",
    "gbps",
    "gflops",
)
METHOD_FIELDS = (
    "method",
    "allocation",
    "importance",
    "ratio",
    "effective_ratio",
    "text",
    "ppl_token",
    "excess_log_ppl",
    "excess_quotient",
    "compute_dtype",
)
TINY = ModelShape("Tiny", 32, 64, 2, 2, 1, 16, 600, tied=True)
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def _tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "Tiny", TINY)


@pytest.fixture
def tiny_model(_tiny_shape: None, tmp_path):
    return make_model(tmp_path / "tiny", shape="Tiny")


def test_shapes_are_found_whatever_the_case():
    assert model_shape("llama-3.2-1b") is SHAPES["Llama-3.2-1B"]
    assert model_shape("Qwen3-4B").projections["q_proj"] == (2560, 4096)
    assert model_shape("Llama-3.2-1B").projections["down_proj"] == (8192, 2048)


def test_unknown_shape_lists_the_names():
    with pytest.raises(ValueError, match=r"Llama-3\.2-1B, .*Mistral.*; got 'GPT-9'"):
        model_shape("GPT-9")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama-3.2-1B", 1.24), ("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.6), ("Qwen3-32B", 32.8)],
)
def test_shapes_have_the_published_number_of_parameters(name, billions):
    shape = model_shape(name)
    layer = sum(K * N for K, N in shape.projections.values())
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    assert shape.layers * layer + embeddings == pytest.approx(billions * 1e9, rel=0.01)


def test_paired_timing_alternates_and_rotates():
    calls: list[tuple[str, int]] = []
    times = timing.time_paired(
        {name: lambda index, name=name: calls.append((name, index)) for name in "ab"},
        rounds=2,
        warmup=1,
    )
    assert calls == [("b", -1), ("a", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert len(times.rounds_ms["a"]) == len(times.rounds_ms["b"]) == 2


def test_paired_speedup_is_the_median_of_the_rounds_ratios():
    times = timing.PairedTimes({"base": (2.0, 40.0, 6.0), "op": (1.0, 10.0, 2.0)})
    assert times.speedup("op", "base") == 3.0
    assert times.median_ms("base") == 6.0


def test_paired_timing_runs_in_its_mode():
    seen: list[bool] = []
    timing.time_paired({"a": lambda _: seen.append(torch.is_inference_mode_enabled())}, 1, 0)
    timing.time_paired(
        {"a": lambda _: seen.append(torch.is_inference_mode_enabled())}, 1, 0, mode=torch.no_grad
    )
    assert seen == [True, False]


@pytest.mark.parametrize(("weights", "copies"), [(10, 10), (30, 4), (1000, 1)])
def test_copies_leave_the_cache(weights, copies):
    assert timing.copies_for(weights, cold_bytes=100) == copies


@pytest.mark.usefixtures("_tiny_shape")
@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_cpu_rows_of_factors_in_one_byte(storage, monkeypatch):
    monkeypatch.setattr(cpu, "copies_for", lambda _: 2)
    chosen = {"tokens": (1,), "ratios": (0.2,), "rounds": 3, "block": 8}
    for row in cpu.run("Tiny", **chosen, storage=storage):
        assert row["storage"] == storage
        assert min(row["stored_ms"], row["stored_speedup"]) > 0
    with pytest.raises(ValueError, match=r"^factors in one byte have no gradients; leave out"):
        cpu.run("Tiny", **chosen, storage=storage, backward=True)
    with pytest.raises(ValueError, match=r"^storage must be fp8 or int8, got 'bf16'$"):
        cpu.run("Tiny", **chosen, storage="bf16")


@pytest.mark.usefixtures("_tiny_shape")
def test_cpu_rows(monkeypatch):
    monkeypatch.setattr(timing, "COLD_BYTES", 1)
    monkeypatch.setattr(cpu, "copies_for", lambda _: 2)
    rows = cpu.run("Tiny", ratios=(0.5,), tokens=(1, 3), rounds=2, block=8)
    assert [(row["op"], row["M"]) for row in rows] == [
        ("xuv", 1),
        ("xuv", 3),
        ("svd_mlp", 1),
        ("svd_mlp", 3),
    ]
    for row in rows:
        assert tuple(row) == CPU_FIELDS
        assert (row["K"], row["N"], row["r"], row["threads"]) == (
            *(32, 64, 8),
            torch.get_num_threads(),
        )
        assert row["dtype"] == "bfloat16"
        assert row["ideal_speedup"] == pytest.approx(32 * 64 / (8 * 96))
        assert min(row[k] for k in CPU_FIELDS if k.endswith("_ms") and k != "stored_ms") > 0
        assert row["storage"] is row["stored_ms"] is row["stored_speedup"] is None
        matrices = 1 if row["op"] == "xuv" else 3
        assert row["gbps"] * row["op_ms"] == pytest.approx(matrices * 8 * 96 * 2 / 1e6)
        assert row["gflops"] == pytest.approx(row["gbps"] * row["M"])
        assert row["compute_dtype"] == (
            "bfloat16" if multiplies_fast(torch.bfloat16) else "float32"
        )


@pytest.mark.usefixtures("_tiny_shape")
def test_cpu_rows_of_both_passes(monkeypatch):
    monkeypatch.setattr(cpu, "copies_for", lambda _: 2)
    rows = cpu.run(
        "Tiny", ratios=(0.5,), tokens=(3,), dtype=torch.float32, rounds=2, block=8, backward=True
    )
    assert [(row["op"], row["pass"]) for row in rows] == [
        (op, name) for op in cpu.OPS for name in ("forward", "forward+backward")
    ]
    for row in rows:
        assert row["dtype"] == row["compute_dtype"] == "float32"
        products = 3 if "backward" in row["pass"] else 1
        assert row["gflops"] == pytest.approx(products * row["gbps"] * row["M"] / 2)


def test_a_slow_round_ends_the_measurement_after_three():
    times = timing.time_paired({"a": lambda _: None}, rounds=9, limit_s=0)
    assert len(times.rounds_ms["a"]) == timing.MIN_ROUNDS


@pytest.mark.usefixtures("_tiny_shape")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": ["conv"]}, "op must be one of xuv, svd_mlp; got 'conv'"),
        ({"tokens": [1, 0]}, "tokens must be at least 1, got 0"),
        ({}, r"no rank that is a multiple of 128 is smaller than \[32, 64\]"),
    ],
)
def test_cpu_refuses_what_it_does_not_know(options, message):
    with pytest.raises(ValueError, match=message):
        cpu.run("Tiny", **options)


def test_overhead_rows():
    rows = overhead.run(repeats=2, calls=2)
    assert [(row["mode"], row["x"]) for row in rows] == [
        ("inference_mode", [2, 8]),
        ("inference_mode", [1, 1, 8]),
        ("no_grad", [2, 8]),
        ("no_grad", [1, 1, 8]),
    ]
    for row in rows:
        assert tuple(row) == (
            "mode",
            "x",
            "linear_us",
            "op_us",
            "function_us",
            "sequential_us",
            "module_us",
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
    *[("whiten", "uniform", None), ("kfac", "greedy", None), ("plain", "uniform", None)],
    *[("plain", "greedy", "error"), ("whiten", "greedy", "gradient")],
    *[("drift", "greedy", "gradient"), ("zero-sum", "greedy", None)],
    *[("swift", "greedy", name) for name in ("gradient", "error", "perplexity")],
]


@pytest.mark.filterwarnings("ignore::neuronmm_ops.CalibrationWarning")
def test_method_rows(tiny_model):
    done: list[tuple[str, int, int]] = []
    texts = {"in": TEXT[:600], "out": "".join(reversed(TEXT))[:600]}
    rows = methods.run(
        tiny_model,
        texts,
        TEXT,
        ratios=(0.2, 0.6),
        block=8,
        seqlen=32,
        samples=4,
        progress=lambda *args: done.append(args),
    )
    assert [(row["method"], row["ratio"], row["text"]) for row in rows[:2]] == [
        ("dense", 0.0, "in"),
        ("dense", 0.0, "out"),
    ]
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
def test_excess_is_divided_by_the_baselines_of_the_same_ratio_and_text(
    tiny_model, monkeypatch: pytest.MonkeyPatch
):
    # By text: the dense model's, then the baseline's and the default's at each ratio.
    ppl = iter([100.0, 200.0, 110.0, 190.0, 105.0, 210.0, 121.0, 242.0, 110.0, 220.0])

    def perplexity(*_: object) -> PerplexityResult:
        return PerplexityResult(next(ppl), 1, 1)

    monkeypatch.setattr(methods, "token_perplexity", perplexity)
    candidates = (methods.BASELINE, SVDConfig(method="plain"))
    options = {"ratios": (0.2, 0.4), "block": 8, "seqlen": 32, "samples": 4}
    rows = methods.run(tiny_model, {"a": TEXT, "b": TEXT}, TEXT, candidates=candidates, **options)
    half = pytest.approx(math.log(1.05) / math.log(1.1))
    assert [row["excess_quotient"] for row in rows] == [
        *(None, None),
        *(1.0, None, half, None),  # the baseline is better than dense on b
        *(1.0, 1.0, pytest.approx(0.5), pytest.approx(0.5)),
    ]


def test_methods_need_enough_text(tiny_model):
    with pytest.raises(ValueError, match="at least one block of 64 tokens"):
        methods.run(tiny_model, {"text": TEXT}, "a b", seqlen=64)


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
def test_the_example_times_both_procedures(extra: list[str], capsys: pytest.CaptureFixture[str]):
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
