"""Tables at 80 columns: no word of a cell is broken, nothing is wider. Documents are long ones."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.table
from rich.console import Console
from tiny_model import write_tiny

from benchmarks.cli import parser as benchmarks
from neuroncore.cli.console import stdout
from neuronmm_ops.cli import parser

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ONE = ("--tokens", "1", "--target", "trn2", "--json")

Show = Callable[[str, Any], None]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """Show a command's document, and check its tables."""
    tables: list[rich.table.Table] = []

    class Kept(rich.table.Table):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            tables.append(self)

    monkeypatch.setattr(rich.table, "Table", Kept)
    monkeypatch.setattr(stdout._console, "_width", 80)

    def call(line: str, document: Any) -> None:
        words = shlex.split(line)
        is_ours = words[:2] == ["python", "benchmarks"]
        options = benchmarks().parse_args(words[2:]) if is_ours else parser().parse_args(words)
        options.show(document)
        assert tables
        for table in tables:
            console = Console(width=80, markup=False, highlight=False)
            with console.capture() as capture:
                console.print(table)
            text = capture.get()
            assert max(map(len, text.splitlines())) <= 80, text
            texts = [t for column in table.columns for t in (column.header, *column.cells)]
            lost = {word for t in texts for word in str(t).split()} - set(text.split())
            assert not lost, f"{lost} in\n{text}"

    return call


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_of_committed_documents(show, file, monkeypatch):
    monkeypatch.syspath_prepend(RESULTS.parents[1] / "examples" / "results")
    from sources import read

    document = read(file.stem)
    assert document is not None
    for run in document["runs"]:
        if run["command"].startswith(("neuronmm eval", "python tests/")):
            continue  # says lines, without tasks
        show(run["command"].removeprefix("neuronmm "), run["document"])


def test_of_several_numbers_of_ranks(show):
    data = json.loads((RESULTS / "model_Llama-3.1-70B.json").read_text())
    large = data["runs"][0]["document"]
    show("bench model --model Llama-3.1-70B --tp 16,32", [large, {**large, "tp": 32}])


def test_of_shards(show, run, tmp_path):
    rows = run("plan", "--model", write_tiny(tmp_path), "--tp", "2", *ONE).document()
    # Numbers of a large model are wider; to find its plans takes half a minute.
    wide = {"M": 2048, "time_ms": 1.2345, "dense_ms": 12.345, "regret": 0.1234}
    wide |= {"K": 28672, "r": 11264, "N": 28672, "shards": [[28672, 11264], [11264, 28672]]}
    longer = [{k: wide.get(k, v) for k, v in row.items()} for row in rows]
    show("plan --model Llama-3.1-70B --tp 8", rows + longer)


@pytest.mark.parametrize(("storage", "loss"), [(None, 0.1234), ("int8", 0.1234), ("int8", None)])
@pytest.mark.parametrize("line", ["inspect small", "compress model -o small"])
def test_of_layers(show, line, storage, loss):
    layer = {"K": 28672, "N": 8192, "r": 11264, "dense": False, "loss": loss, "storage": storage}
    layer |= {"bytes": 646053888, "bits_per_weight": 12.5, "compute": "x"}
    names = ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
    document = {"ratio": 0.2, "effective_ratio": 0.2, "model_ratio": 0.1, "left_dense": []}
    document |= {"bytes": 10**9, "dense_bytes": 2 * 10**9, "compute_dtype": "float32"}
    document |= {"config": None, "calibration": None, "provenance": {}, "verified": True}
    document["narrowed"] = {"inner": 28672, "kept": 20480} if loss else None
    document["layers"] = [{"name": f"model.layers.79.{name}", **layer} for name in names]
    show(line, document)


def test_of_an_evaluation(show):
    common = {"ppl_token": 12345.6789, "tokens": 1234567, "seqlen": 2048}
    data = {"dataset": "wikitext2", "bos": True, "protocol": "standard", **common}
    metrics = {"alias": "x", "acc,none": 0.12345, "acc_stderr,none": 0.01234}
    tasks = {
        "results": {"arc_challenge": metrics, "truthfulqa_mc2": metrics},
        "n-shot": {"arc_challenge": 25, "truthfulqa_mc2": 0},
        "n-samples": {name: {"effective": 1172} for name in ("arc_challenge", "truthfulqa_mc2")},
        "config": {"truncated_requests": 0},
    }
    document = {"perplexities": [{"text": "data/held_out.txt", **common}, data], "tasks": tasks}
    dtypes = {"dtype": "bfloat16", "compute_dtype": "float32", "compute": "x"}
    show("eval small --ppl wikitext2", {"model": "small", **document, **dtypes})


def test_of_a_comparison(show):
    texts = ("held_out.txt", "wikitext2.txt")
    row = {"ratio": 0.2, "effective_ratio": 0.2, "bytes": 10**9, "gamma": 0.1234, "threads": 16}
    row |= {"ppl_token": dict.fromkeys(texts, 123.4567), "device": "cpu", "seqlen": 2048}
    row |= {"excess_log_ppl": dict.fromkeys(texts, 1.0), "compute_dtype": "float32"}
    row |= {"tokens_per_s": {"prefill": 12345.0, "decode": 1234.0}, "versions": {"torch": "2.13.0"}}
    row |= {"speedup": {"prefill": 1.25, "decode": 1.25}}
    row |= {"prefill_tokens": 512, "decode_tokens": 64}
    names = ("dense", "Llama-3.2-1B-low-rank", "Llama-3.2-1B-low-rank-int8")
    rows = [{"dir": name, **row} for name in names]
    show("compare a b --text held_out.txt", rows)


def test_of_this_machine(show):
    from neuronmm_ops.doctor import diagnose

    show("doctor", diagnose())
