"""`neuronmm bench`: documents and tables; what it measures is tested in tests/measure."""

import json
import shutil
from typing import Any

import pytest
import torch
from outcomes import interrupt, refused
from safetensors.torch import load_file
from tiny_model import write_tiny

from neuroncore.cli.console import stdout
from neuronmm_ops.cli import parser
from neuronmm_ops.measure import generate, generation
from neuronmm_ops.measure.cpu import CpuOptions


def test_options_of_cpu(run, monkeypatch):
    asked: list[Any] = []
    rows = [{"op": "xuv", "M": 1, "op_ms": 0.123456}, {"op": "xuv", "M": 8, "op_ms": 12.0}]

    def measure(options: CpuOptions, _: Any) -> list[dict[str, Any]]:
        asked.append((options.shape, options.tokens, options.dtype, options.backward))
        return rows

    monkeypatch.setattr("neuronmm_ops.measure.cpu.run", measure)
    monkeypatch.setattr("neuronmm_ops.ops.backends.cpu.multiplies_fast", lambda dtype: False)
    shown = run("bench", "cpu").page()
    assert shown.startswith("op xuv\n")
    assert "0.1235" in shown
    tokens = ("--tokens", "1,2", "3")
    run("bench", "cpu", "--model", "Qwen3-4B", *tokens, "--dtype", "bfloat16", "--backward").page()
    assert asked == [
        ("Llama-3.2-1B", [1, 8, 64, 512], torch.float32, False),
        ("Qwen3-4B", [1, 2, 3], torch.bfloat16, True),
    ]


# --- generate


FEW = ("--prompt-tokens", "24", "--new-tokens", "4", "--rounds", "2")


@pytest.fixture
def bench_generate(run, monkeypatch):
    """`neuronmm bench generate` in this process."""
    monkeypatch.setattr(generate, "in_own_process", lambda what, function, *a: function(*a))
    return lambda *arguments: run("bench", "generate", *arguments)


def test_defaults_are_those_of_the_function():
    options = parser().parse_args(["bench", "generate", "DIR"])
    sizes = (options.prompt, options.new, options.batch)
    found = (*sizes, options.rounds, options.device)
    assert found == (generate.PROMPT, generate.NEW, 1, generate.ROUNDS, "cpu")


def test_document_of_generate(bench_generate, dense, small):
    rows = bench_generate(dense, small, *FEW, "--batch-size", "2", "--json").document()
    assert [row["dir"] for row in rows] == [str(dense), str(small)]
    settings = [(row["prompt"], row["new"], row["batch"], row["rounds"]) for row in rows]
    assert settings == [(24, 4, 2, 2)] * 2


def test_tables_of_generate(bench_generate, dense, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = generate.run([dense], prompt=24, new=4, rounds=2)
    context = {name: found[0][name] for name in list(found[0])[13:]}
    values: dict[str, Any] = {
        "bytes": 1,
        "ttft_ms": 812.25,
        "prefill_tokens_per_s": 630.4,
        "token_ms": 61.125,
        "end_to_end_ms": 4660.0,
        "tokens_per_s": 13.73,
        "peak_memory_bytes": 5.1e9,
        "compile_s": 41.7,
        "rounds": 2,
        "failed": None,
    }
    ratio = {"median": 1.25, "low": 1.1, "high": 1.4}
    speedup = {"prefill": ratio, "decode": {**ratio, "median": 1.3}, "end_to_end": ratio}
    nothing = dict.fromkeys(values, None) | {"rounds": 0, "failed": "no C++ compiler"}
    rows = [
        {"dir": "dense", "compiled": False, **values, "compile_s": None, "speedup": None},
        {"dir": "small", "compiled": True, **values, "speedup": speedup},
        {"dir": "other", "compiled": True, **nothing, "speedup": None},
    ]
    monkeypatch.setattr(generate, "run", lambda *_, **__: [row | context for row in rows])
    page = bench_generate("dense", "small", "--compile").page()
    shown = [line.split() for line in page.splitlines()]
    assert ["dense", "812.2", "630", "61.12", "13.7", "5100"] in shown
    assert ["small,", "compiled", "812.2", "630", "61.12", "13.7", "5100"] in shown
    assert ["small,", "compiled", "42"] in shown
    pair = ["1.25x", "(1.10-1.40)", "1.30x", "(1.10-1.40)", "1.25x", "(1.10-1.40)"]
    assert ["small,", "compiled", *pair] in shown
    assert "other, compiled: not measured, no C++ compiler" in page
    assert "prompts of 24 tokens and 4 new ones, batch 1, static cache, rounds: 2" in page
    assert "threads: 1; python 3." in page
    assert "…" not in page


def test_a_model_that_says_nothing(bench_generate, dense, small, tmp_path):
    silent = shutil.copytree(small, tmp_path / "silent")
    config = silent / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [*range(260)]}))
    refused(bench_generate(dense, silent, *FEW), "silent generates nothing")


def test_more_tokens_than_the_limit(bench_generate, dense):
    refused(bench_generate(dense), "limit of 128 tokens, got 512 and 64")


def test_an_interrupt_is_one_line(bench_generate, dense, monkeypatch):
    monkeypatch.setattr(generation, "_generate", interrupt)
    bench_generate(dense, *FEW).interrupted()


# --- model


@pytest.fixture
def bench_model(run, tmp_path, monkeypatch):
    """`neuronmm bench model` on a tiny model, its tables in 160 columns."""
    (tmp_path / "tiny").mkdir()
    model = write_tiny(tmp_path / "tiny")
    monkeypatch.setattr(stdout._console, "_width", 160)
    short = ("--prompt-tokens", "40", "--new-tokens", "4", "--target", "trn2")
    return lambda *options: run("bench", "model", "--model", model, *short, *options)


def test_json_and_table_of_a_model(bench_model):
    document = bench_model("--storage", "int8", "--json").document()
    assert document["model"] == "tiny"
    assert (document["storage"], document["storage_dense"]) == ("int8", None)
    table = bench_model("--storage", "int8").page()
    lines = [line.split() for line in table.splitlines()]
    assert "modelled" in table.splitlines()[0]
    above = ["low", "dense,", "publ.", "publ."]
    names = ["dense", "rank", "stored", "narrower", "dense", "low", "rank"]
    for phase in ("Prefill", "Decode"):
        at = lines.index([phase, *names])
        assert lines[at - 1] == above
    decode = [variant["phases"]["decode"] for variant in document["variants"]]
    assert ["all", *[f"{phase['time_ms']:.4g}" for phase in decode]] in lines
    assert ["launches", *[str(phase["launches"]) for phase in decode]] in lines
    dense = document["variants"][0]
    rate, weights = dense["tokens_per_s"], dense["memory"]["weight_bytes"]
    assert any(line[-2:] == [f"{rate:.4g}", f"{weights / 1e9:.3g}"] for line in lines)
    for name, label in (
        ("ours", "over dense"),
        ("storage", "storage alone"),
        ("rank", "rank alone"),
        ("width", "width alone"),
    ):
        found = document["speedups"][name]
        each = [
            *[found[p] for p in ("prefill", "decode", "end_to_end")],
            found["decode"]["as_served"],
        ]
        (at,) = (n for n, line in enumerate(lines) if line[-6:-4] == label.split())
        assert set(lines[at][-4:]) == {f"{ratio['middle']:.2f}x" for ratio in each}
        assert set(lines[at + 1]) == {f"{ratio['low']:.2f}-{ratio['high']:.2f}" for ratio in each}
    served = dense["phases"]["decode"]["as_served"]
    times = [f"{served[f'time{end}_ms']:.3g}" for end in ("", "_low", "_high")]
    row = [f"{dense['phases']['decode']['time_ms']:.3g}", times[0], "-".join(times[1:])]
    assert ["dense", *row, f"{served['tokens_per_s']:.4g}"] in lines
    assert "collectives" not in table  # no launch of it
    assert "sampling beyond argmax" in table


def test_a_checkpoint_is_taken_as_it_is(run, small):
    """The demo's model: what it has on disk is told, and no ratio may be given besides."""
    options = ("bench", "model", "--model", small, "--prompt-tokens", "16", "--new-tokens", "2")
    document = run(*options, "--json").document()
    own, page = document["checkpoint"], " ".join(run(*options).page().split())
    assert own["bytes"] == sum(
        tensor.nbytes for file in small.glob("*.safetensors") for tensor in load_file(file).values()
    )
    assert f"{own['bytes'] / 1e6:.4g} MB of tensors on disk" in page
    assert f"of rank {own['least_rank']} to {own['greatest_rank']}" in page
    assert f"{own['matrix_bytes'] / own['dense_matrix_bytes']:.3f} of their dense bytes" in page
    assert "low rank over dense, stored" in page
    given = run(*options, "--ratio", "0.2", "--storage-lm-head", "fp8")
    refused(given, "ranks and storages of its own; leave out ratio, storage-lm-head, or give")


def test_ranks_and_two_cores(bench_model):
    options = ("--tp", "2", "--lnc", "2")
    document = bench_model(*options, "--targets", "all-linear", "--json").document()
    assert [variant["name"] for variant in document["variants"]] == ["dense", "low_rank", "pruned"]
    assert "--lnc 1 --tp 1" in document["left_out"][-1]
    assert "collectives" in bench_model(*options).page()


def test_several_numbers_of_ranks(bench_model):
    documents = bench_model("--tp", "1,2,4", "--json").document()
    assert [document["tp"] for document in documents] == [1, 2, 4]
    assert documents[1] == bench_model("--tp", "2", "--json").document()
    shown = bench_model("--tp", "1,2,4").page()
    lines = [line.split() for line in shown.splitlines()]
    assert "tp 1, 2, 4: 1 x 40 tokens" in shown
    for document in documents:
        for variant in document["variants"][:2]:
            prefill = f"{variant['phases']['prefill']['time_ms']:.4g}"
            row = [str(document["tp"]), *variant["name"].split("_"), prefill]
            assert any(line[: len(row)] == row for line in lines)
        assert f"A token, tp {document['tp']}: modelled, and as served" in shown


def test_what_the_layouts_exchange_is_shown(bench_model):
    options = ("--tp", "4", "--targets", "all-linear", "--ratio", "0.1")
    low = bench_model(*options, "--json").document()["variants"][1]
    shown = " ".join(bench_model(*options).page().split())
    for phase, title in (("prefill", "Prefill"), ("decode", "Decode")):
        assert f"{title}, tp 4: a layer's weights in each layout (* taken)" in shown
        for row in low["phases"][phase]["layouts"]:
            names = set(row["layouts"].values())
            if names != {"dense"} and (row["taken"] or len(names) == 1):
                numbers = [row["launches_ms"] * 1e3, row["time_ms"] * 1e3]
                assert f"{numbers[0]:.4g} {numbers[1]:.4g}" in shown
    assert "gather [M, 256], sum [M, 128], gather [M, 256]" in shown
    assert "sum [M, 256], scattered sum [M, 128], sum [M, 256]" in shown
    weights = low["weight_bytes_by_layout"]
    assert f"one {weights['one'] / 1e9:.3g}, both {weights['both'] / 1e9:.3g}" in shown
    assert (
        "of dense on 4 ranks; neuronmm compress --budget time --target trn2 --lnc 1 --tp 4 buys"
        in shown
    )
    assert "With no collective under 6.16 us" in shown
