"""`neuronmm reproduce`: the whole road, runs that are killed, files that change, and mistakes."""

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outcomes import interrupt, refused
from reproductions import MISTAKES, WITH_TASK, workplace, write_paper
from tiny import tiny_directory

from neuronmm_ops.reproduce import measure
from neuronmm_ops.reproduce.cells import key_of

WORDS = ("a", "the", "reads", "file", "returns", "value", "object", "of", "method", "when", "is")


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """A TOML file beside all that it names."""
    return workplace(tmp_path)


@pytest.fixture
def reproduce(run, paper, tmp_path):
    """Runs the file; the output is `out`."""
    return lambda *options: run("reproduce", paper, "-o", tmp_path / "out", *options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A place where a run has ended; the paths in it are those of its copies."""
    from neuronmm_ops.cli import main

    place = tmp_path_factory.mktemp("finished")
    workplace(place)
    write_paper(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["reproduce", "paper.toml", "-o", "out"]) == 0
    return place


@pytest.fixture
def again(run, finished, tmp_path, monkeypatch):
    """Goes on in a copy of it, in which one is."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return lambda: run("reproduce", "paper.toml", "-o", "out", "--json")


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text.format(root=path.parent))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def states(document: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in document["counts"].items() if count}


def cells_with(document: dict[str, Any], status: str) -> list[str]:
    return [cell["cell"] for cell in document["cells"] if cell["status"] == status]


def files_of(directory: Path) -> dict[str, bytes]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def told(err: str, words: str) -> list[str]:
    return [line for line in err.splitlines() if words in line]


@pytest.mark.slow
def test_the_whole_road(run, reproduce, paper, tmp_path):
    append(paper, WITH_TASK)
    out = tmp_path / "out"
    document = reproduce("--json").document()
    assert list(document) == [
        *("output", "title", "model", "rows", "published", "left_out", "counts", "cells"),
        "settings",
    ]
    assert states(document) == {"cells": 8, "computed": 8}
    assert [row["name"] for row in document["rows"]] == ["dense", "svd-llm 0.3", "plain 0.3"]
    text = str(tmp_path / "text.txt")
    perplexities = [row["ppl"][text] for row in document["rows"]]
    assert perplexities == pytest.approx([perplexities[0]] * 3, rel=0.1)
    assert len(set(perplexities)) == 3
    single = run("eval", tmp_path / "dense", "--text", text, "--seqlen", "64", "--json").document()
    assert single["ppl_token"] == perplexities[0]
    for row in document["rows"]:
        assert row["mean_accuracy"] == row["accuracy"]["colours"]
        assert row["accuracy"]["colours"] * 6 == pytest.approx(round(row["mean_accuracy"] * 6))
    saved = json.loads((out / "results.json").read_text())
    assert {"output": str(out), **saved} == document
    assert sorted(path.name for path in out.iterdir()) == [
        *("cells", "models", "report.html", "results.json", "table.md")
    ]
    assert len(list((out / "models").iterdir())) == 2
    assert len(list((out / "cells").iterdir())) == 8

    page = reproduce().page()
    assert "8 cells: 8 reused" in page
    assert "svd-llm: method whiten, allocation uniform, ranks in blocks of 8" in page


KILLED = """
import os, signal, sys
from pathlib import Path
from neuronmm_ops.hf import saving
from neuronmm_ops.reproduce import cells

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

point = sys.argv.pop(1)
written = []
if point == "between":
    write = cells.Store.write
    cells.Store.write = lambda *a: (write(*a), written.append(0), len(written) == 2 and kill())
elif point == "writing":
    move = Path.replace
    Path.replace = lambda path, to: (kill if path.parent.name == "cells" else move)(path, to)
else:
    saving._open_to_others = kill
from neuronmm_ops.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_run_loses_at_most_the_cell_in_work(run, forked, reproduce, paper, tmp_path):
    whole = run("reproduce", paper, "-o", tmp_path / "whole", "--json").document()
    out = tmp_path / "out"
    kept = 0
    for point, finished in (("between", 2), ("writing", 0), ("saving", 1)):
        outcome = forked(KILLED, point, "reproduce", paper, "-o", out)
        assert outcome.code == -signal.SIGKILL, outcome.err
        kept += finished
        left = [path.name for path in (out / "cells").iterdir() if path.name.startswith(".")]
        assert len(left) == (point == "writing")  # the next run removes it
        done = [path for path in (out / "cells").iterdir() if not path.name.startswith(".")]
        assert len(done) == kept
        for path in done:
            json.loads(path.read_text())
    resumed = reproduce("--json").document()
    assert resumed["rows"] == whole["rows"]
    assert states(resumed) == {"cells": 5, "computed": 5 - kept, "reused": kept}
    whole_files, files = files_of(tmp_path / "whole"), files_of(out)
    assert files.keys() == whole_files.keys()
    for name in (name for name in files if name.endswith(".safetensors")):
        assert files[name] == whole_files[name]


@pytest.mark.slow
def test_a_changed_file_recomputes_what_changed(again, tmp_path):
    paper = tmp_path / "paper.toml"
    replace(paper, "ratios = [0.3]", "ratios = [0.3, 0.5]")
    assert cells_with(again().document(), "computed") == [
        f"{kind} {method} 0.5{text}"
        for method in ("svd-llm", "plain")
        for kind, text in (("compress", ""), ("perplexity", " ./text.txt"))
    ]
    # The calibration text is not plain's; the text that is evaluated is another file's.
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "other.txt").write_text(text.replace("quick", "slow"))
    replace(paper, 'calibration = "./text.txt"', 'calibration = "./other.txt"')
    computed = cells_with(again().document(), "computed")
    assert {name.split()[1] for name in computed} == {"svd-llm"}
    # A text's content counts, not its path; nor does what a method is called.
    replace(paper, "[methods.plain]", "[methods.svd]")
    (tmp_path / "moved.txt").write_text(text)
    replace(paper, 'texts = ["./text.txt"]', 'texts = ["./moved.txt"]')
    assert cells_with(again().document(), "computed") == []
    # Other weights under the same path.
    append(tmp_path / "dense" / "config.json", "\n")
    assert cells_with(again().document(), "reused") == []


@pytest.mark.slow
def test_damaged_and_foreign_cells_are_done_again(again, tmp_path):
    first, second, *_ = sorted((tmp_path / "out" / "cells").glob("perplexity-*"))
    first.write_text(first.read_text()[:40])
    second.write_text("[]")
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    document = again().document()
    assert states(document) == {"cells": 5, "computed": 2, "reused": 3}
    assert document["rows"] == rows


@pytest.mark.slow
def test_checkpoints_are_dropped_and_made_again(reproduce, paper, tmp_path):
    replace(paper, "samples = 8", "samples = 8\nkeep = false")
    reproduce("--json").document()
    assert list((tmp_path / "out" / "models").iterdir()) == []
    replace(paper, "[evaluate]\n", "[measured]\nprompt = 4\nnew = 2\nrounds = 1\n[evaluate]\n")
    document = reproduce("--json").document()
    assert list((tmp_path / "out" / "models").iterdir()) == []
    assert cells_with(document, "computed") == [
        *("compress svd-llm 0.3", "measured svd-llm 0.3"),
        *("compress plain 0.3", "measured plain 0.3"),
    ]
    measured = document["rows"][1]["measured"]
    assert measured["tokens"] == {"prefill": 4, "decode": 2, "end_to_end": 6}
    assert measured["speedup"]["end_to_end"] > 0


@pytest.mark.slow
def test_recovery_and_storages(reproduce, paper):
    replace(paper, "block = 8", 'block = 8\nstorages = ["native", "int8"]')
    recovery = '[recovery]\ndata = "{root}/text.txt"\nsteps = 2\nseqlen = 32\nbatch_tokens = 64\n'
    append(paper, recovery)
    document = reproduce("--json").document()
    assert [row["name"] for row in document["rows"]] == [
        "dense",
        *("svd-llm 0.3", "svd-llm 0.3 recovered", "svd-llm 0.3 int8"),
        *("plain 0.3", "plain 0.3 recovered", "plain 0.3 int8"),
    ]
    assert document["left_out"] == [
        "svd-llm 0.3 int8 recovered: factors in one byte are not recovered here",
        "plain 0.3 int8 recovered: factors in one byte are not recovered here",
    ]
    _, native, recovered, one_byte, *_ = document["rows"]
    assert recovered["recovered"]
    assert recovered["effective_ratio"] == native["effective_ratio"]
    assert one_byte["bytes"] < 0.3 * native["bytes"]
    assert cells_with(reproduce("--json").document(), "computed") == []


@pytest.mark.slow
def test_a_failed_cell_is_one_line_and_the_others_go_on(reproduce, tmp_path, monkeypatch):
    compress = measure.compress

    def failing(asked: Any, config: Any, *rest: Any) -> Any:
        if config.method == "whiten":
            raise RuntimeError("the sun\nhas set")
        return compress(asked, config, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "compress", failing)
        outcome = reproduce("--json")
    document = outcome.document(code=1)
    assert told(outcome.err, "failed") == ["compress svd-llm 0.3 failed: the sun has set"]
    assert states(document) == {"cells": 5, "computed": 3, "failed": 1, "not run": 1}
    assert document["cells"][1]["error"] == "the sun has set"
    assert document["rows"][1]["ppl"] == {str(tmp_path / "text.txt"): None}
    assert "the sun has set" in (tmp_path / "out" / "table.md").read_text()
    assert states(reproduce("--json").document()) == {"cells": 5, "computed": 2, "reused": 3}


def test_interrupted(reproduce, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "compress", interrupt)
    reproduce().interrupted()
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert states(document) == {"cells": 5, "computed": 1, "to do": 4}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(run, name, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished)
    # Without lm-eval's own tasks, which take ten seconds to read.
    few = SimpleNamespace(all_tasks=["colours"])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: few)
    old, new, *words = MISTAKES[name]
    replace(write_paper(tmp_path), old, new)
    refused(run("reproduce", tmp_path / "paper.toml", "-o", "other"), *words)
    assert not (finished / "other").exists()


def test_mistakes_of_the_output(run, reproduce, paper, tmp_path):
    out = tmp_path / "out"
    refused(run("reproduce", paper), "-o OUT are needed")
    refused(run("reproduce", tmp_path / "no.toml", "-o", out), "no such file")
    refused(run("reproduce", "demmo", "-o", out), "unknown reproduction", "demo")
    refused(run("reproduce", tmp_path, "-o", out), str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    dense = files_of(tmp_path / "dense")
    for name, *words in (
        ("text.txt", "text.txt is a file"),
        ("dense", "holds config.json"),
        ("link", "link cannot be made: File exists"),
        (os.fsdecode(b"\xff"), "'", r"/\udcff", "must be text in UTF-8"),
        (os.fsdecode(b"\xff/out"), "'", r"/\udcff", "must be text in UTF-8"),
    ):
        refused(run("reproduce", paper, "-o", tmp_path / name), *words)
    assert not list(tmp_path.glob("*/cells"))
    (out / "cells").mkdir(parents=True)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        refused(reproduce(), "another run works in")
    finally:
        os.close(descriptor)
    assert files_of(tmp_path / "dense") == dense
    assert files_of(out) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_output(reproduce, tmp_path):
    out = tmp_path / "out"
    (out / "cells").mkdir(parents=True)
    out.chmod(0o500)
    refused(reproduce(), "no permission")
    out.chmod(0o700)


@pytest.mark.slow
def test_the_demo_file(run, tmp_path, monkeypatch):
    """The shipped file, on a model of the demo's sizes and a text of sentences."""
    monkeypatch.chdir(tmp_path)
    demo = Path("out/demo")
    Path("tasks").mkdir()  # not the file's own
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    tiny_directory(demo / "dense", **sizes, **heads)
    for start, name in enumerate(("calibration", "held_out")):
        sentences = (" ".join(WORDS[(n * n + start) % 11 :] + WORDS[n % 7 :]) for n in range(50))
        (demo / f"{name}.txt").write_text(". ".join(sentences))
    document = run("reproduce", "demo", "-o", "out/reproduce", "--json").document()
    names = [row["name"] for row in document["rows"]]
    methods = ("svd-llm 0.6", "kfac-drift 0.6")
    assert names == ["dense", *(n + end for n in methods for end in ("", " recovered"))]
    for row in document["rows"]:
        assert row["ppl"]["out/demo/held_out.txt"] > 1
        assert 0 <= row["accuracy"]["demo_ends"] <= 1
        assert row["modelled"]["end_to_end_ms"] > 0
        assert (row["measured"] is None) == (row["method"] is None)
    assert cells_with(document, "failed") == []
    page = Path("out/reproduce/report.html").read_text()
    assert page.count("<tr>") == 6
    assert "our reading" in page


def test_list(run):
    assert list(run("reproduce", "--list", "--json").document()["shipped"]) == [
        *("demo", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b"),
        *("qwen3-1.7b", "qwen3-4b", "qwen3-8b"),
    ]
    assert "qwen3-4b" in run("reproduce", "--list").out


@pytest.mark.slow
def test_a_checkpoint_made_again_with_other_weights_is_told(again, tmp_path):
    cells = tmp_path / "out" / "cells"
    for path in cells.glob("compress-*.json"):
        document = json.loads(path.read_text())
        document["result"]["weights_sha256"] = "0" * 64
        document["result_sha256"] = key_of(document["result"])
        path.write_text(json.dumps(document))
    for path in (tmp_path / "out" / "models").iterdir():
        shutil.rmtree(path)
    for path in cells.glob("perplexity-*.json"):
        path.unlink()
    assert told(again().err, "made again") == [
        f"warning: compress {method} 0.3 was made again and has other weights; what was measured "
        "of the former is kept"
        for method in ("svd-llm", "plain")
    ]


@pytest.mark.slow
def test_what_was_changed_since_is_done_again_and_told(again, tmp_path):
    out = Path("out")
    number = next((out / "cells").glob("perplexity-*.json"))
    right = json.loads(number.read_text())
    number.write_text(json.dumps(right | {"result": {**right["result"], "ppl_token": 1.0}}))
    model = next((out / "models").glob("compress-*")) / "model.safetensors"
    written = model.read_bytes()
    model.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    for path in (out / "cells").glob("perplexity-*.json"):
        if path != number:
            path.unlink()
    lines = told(again().err, "is not what was written; ")
    assert len(lines) == 2
    assert str(number) in lines[0]
    assert str(model.parent) in lines[1]
    assert json.loads(number.read_text())["result"] == right["result"]
    assert model.read_bytes() == written


@pytest.mark.slow
def test_what_a_killed_compression_was_writing_is_removed(again, tmp_path):
    models = tmp_path / "out" / "models"
    for name in (".compress-0123456789abcdef.host.12.x.tmp", "mine", ".mine.tmp"):
        (models / name).mkdir()
    again().document()
    names = {path.name for path in models.iterdir()}
    assert names >= {"mine", ".mine.tmp"}
    assert len(names) == 4


def test_a_binary_text_leaves_no_output(reproduce, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\0\1")
    refused(reproduce(), "must be UTF-8 text")
    assert not (tmp_path / "out").exists()
