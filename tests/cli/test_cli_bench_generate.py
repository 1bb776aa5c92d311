"""`neuronmm bench generate`: its options, its document, its tables, one line for every mistake."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from outcomes import Run, refused

from neuronmm_ops import SVDConfig, hf
from neuronmm_ops.cli import parser
from neuronmm_ops.measure import generate, generation

FEW = ("--prompt-tokens", "24", "--new-tokens", "4", "--rounds", "2")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, dense: Path) -> Path:
    out = tmp_path_factory.mktemp("small") / "small"
    hf.compress(dense, SVDConfig(ratio=0.3, block=8, method="plain"), None, out)
    return out


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "in_own_process", lambda what, function, *a: function(*a))


def test_defaults_are_those_of_the_function() -> None:
    options = parser().parse_args(["bench", "generate", "DIR"])
    sizes = (options.prompt_tokens, options.new_tokens, options.batch_size)
    found = (*sizes, options.rounds, options.device)
    assert found == (generate.PROMPT, generate.NEW, 1, generate.ROUNDS, "cpu")


def test_document(run: Run, dense: Path, small: Path) -> None:
    outcome = run("bench", "generate", dense, small, *FEW, "--batch-size", "2", "--json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)
    assert [row["dir"] for row in rows] == [str(dense), str(small)]
    assert {(row["prompt"], row["new"], row["batch"], row["rounds"]) for row in rows} == {
        (24, 4, 2, 2)
    }


def test_tables(run: Run, dense: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = generate.run([dense, small], prompt=24, new=4, rounds=2)
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
    outcome = run("bench", "generate", "dense", "small", "--compile")
    assert outcome.code == 0, outcome.err
    shown = [line.split() for line in outcome.out.splitlines()]
    assert ["dense", "812.2", "630", "61.12", "13.7", "5100"] in shown
    assert ["small,", "compiled", "812.2", "630", "61.12", "13.7", "5100"] in shown
    assert ["small,", "compiled", "42"] in shown
    pair = ["1.25x", "(1.10-1.40)", "1.30x", "(1.10-1.40)", "1.25x", "(1.10-1.40)"]
    assert ["small,", "compiled", *pair] in shown
    assert "other, compiled: not measured, no C++ compiler" in outcome.out
    assert "prompts of 24 tokens and 4 new ones, batch 1, static cache, rounds: 2" in outcome.out
    assert "threads: 1; python 3." in outcome.out
    assert "…" not in outcome.out


def test_mistakes(run: Run, dense: Path, small: Path, tmp_path: Path) -> None:
    bench = ("bench", "generate")
    refused(run(*bench), "DIR")
    refused(run(*bench, dense, "--new-tokens", "1"), "new must be at least 2, got 1")
    refused(run(*bench, dense, "--prompt-tokens", "many"), "invalid int value")
    refused(run(*bench, dense, tmp_path / "missing"), "missing is no directory")
    refused(run(*bench, dense), "limit of 128 tokens, got 512 and 64")
    refused(run(*bench, dense, "--device", "cuda:99"), "device cuda")
    silent = Path(shutil.copytree(small, tmp_path / "silent"))
    config = silent / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [*range(260)]}))
    refused(run(*bench, dense, silent, *FEW), "silent generates nothing")


def test_an_interrupt_is_one_line(run: Run, dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "_generate", interrupt)
    outcome = run("bench", "generate", dense, *FEW)
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.splitlines()[-1] == "neuronmm: interrupted"
