"""`neuronmm reproduce`: the whole road, runs that are killed, files that change, and mistakes."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outcomes import Outcome, Run, refused
from reproductions import WITH_TASK, workplace
from tiny import tiny_directory

from neuronmm_ops.reproduce import measure
from neuronmm_ops.reproduce.cells import key_of

WORDS = ("a", "the", "reads", "file", "returns", "value", "object", "of", "method", "when", "is")


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """A TOML file beside all that it names."""
    return workplace(tmp_path)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text.format(root=path.parent))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def document_of(outcome: Outcome, code: int = 0) -> dict[str, Any]:
    assert outcome.code == code, outcome.err
    return json.loads(outcome.out, parse_constant=lambda name: pytest.fail(name))


def states(document: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in document["counts"].items() if count}


def cells_with(document: dict[str, Any], status: str) -> list[str]:
    return [cell["cell"] for cell in document["cells"] if cell["status"] == status]


def files_of(directory: Path) -> dict[str, bytes]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_the_whole_road(run: Run, paper: Path, tmp_path: Path) -> None:
    append(paper, WITH_TASK)
    out = tmp_path / "out"
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
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
    single = json.loads(
        run("eval", tmp_path / "dense", "--text", text, "--seqlen", "64", "--json").out
    )
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

    again = run("reproduce", paper, "-o", out)
    assert again.code == 0, again.err
    assert "8 cells: 8 reused" in again.out
    assert "svd-llm: method whiten, allocation uniform, ranks in blocks of 8" in again.out


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
def test_a_killed_run_loses_at_most_the_cell_in_work(run: Run, paper: Path, tmp_path: Path) -> None:
    whole = document_of(run("reproduce", paper, "-o", tmp_path / "whole", "--json"))
    out = tmp_path / "out"
    kept = 0
    for point, finished in (("between", 2), ("writing", 0), ("saving", 1)):
        command = (sys.executable, "-c", KILLED, point, "reproduce", str(paper), "-o", str(out))
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == -signal.SIGKILL, result.stderr
        kept += finished
        left = [path.name for path in (out / "cells").iterdir() if path.name.startswith(".")]
        assert len(left) == (point == "writing")  # the next run removes it
        done = [path for path in (out / "cells").iterdir() if not path.name.startswith(".")]
        assert len(done) == kept
        for path in done:
            json.loads(path.read_text())
    resumed = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert resumed["rows"] == whole["rows"]
    assert states(resumed) == {"cells": 5, "computed": 5 - kept, "reused": kept}
    whole_files, files = files_of(tmp_path / "whole"), files_of(out)
    assert files.keys() == whole_files.keys()
    for name in (name for name in files if name.endswith(".safetensors")):
        assert files[name] == whole_files[name]


@pytest.mark.slow
def test_a_changed_file_recomputes_what_changed(run: Run, paper: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document_of(run("reproduce", paper, "-o", out, "--json"))

    replace(paper, "ratios = [0.3]", "ratios = [0.3, 0.5]")
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert cells_with(document, "computed") == [
        f"{kind} {method} 0.5{text}"
        for method in ("svd-llm", "plain")
        for kind, text in (("compress", ""), ("perplexity", f" {tmp_path / 'text.txt'}"))
    ]
    # The calibration text is not plain's; the text that is evaluated is another file's.
    other = tmp_path / "other.txt"
    other.write_text((tmp_path / "text.txt").read_text().replace("quick", "slow"))
    replace(paper, f'calibration = "{tmp_path}/text.txt"', f'calibration = "{other}"')
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert {name.split()[1] for name in cells_with(document, "computed")} == {"svd-llm"}
    # A text's content counts, not its path.
    # Nor does what a method is called.
    replace(paper, "[methods.plain]", "[methods.svd]")
    (tmp_path / "moved.txt").write_text((tmp_path / "text.txt").read_text())
    replace(paper, f'texts = ["{tmp_path}/text.txt"]', f'texts = ["{tmp_path}/moved.txt"]')
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert cells_with(document, "computed") == []
    # Other weights under the same path.
    (tmp_path / "dense" / "config.json").write_text(
        (tmp_path / "dense" / "config.json").read_text() + "\n"
    )
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert cells_with(document, "reused") == []


@pytest.mark.slow
def test_damaged_and_foreign_cells_are_done_again(run: Run, paper: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = document_of(run("reproduce", paper, "-o", out, "--json"))
    first, second, *_ = sorted((out / "cells").glob("perplexity-*"))
    first.write_text(first.read_text()[:40])
    second.write_text("[]")
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert states(document) == {"cells": 5, "computed": 2, "reused": 3}
    assert document["rows"] == whole["rows"]


@pytest.mark.slow
def test_checkpoints_are_dropped_and_made_again(run: Run, paper: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    replace(paper, "samples = 8", "samples = 8\nkeep = false")
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert list((out / "models").iterdir()) == []
    replace(paper, "[evaluate]\n", "[measured]\nprompt = 4\nnew = 2\nrounds = 1\n[evaluate]\n")
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert list((out / "models").iterdir()) == []
    assert cells_with(document, "computed") == [
        *("compress svd-llm 0.3", "measured svd-llm 0.3"),
        *("compress plain 0.3", "measured plain 0.3"),
    ]
    measured = document["rows"][1]["measured"]
    assert measured["tokens"] == {"prefill": 4, "decode": 2, "end_to_end": 6}
    assert measured["speedup"]["end_to_end"] > 0


@pytest.mark.slow
def test_recovery_and_storages(run: Run, paper: Path, tmp_path: Path) -> None:
    replace(paper, "block = 8", 'block = 8\nstorages = ["native", "int8"]')
    recovery = '[recovery]\ndata = "{root}/text.txt"\nsteps = 2\nseqlen = 32\nbatch_tokens = 64\n'
    append(paper, recovery)
    document = document_of(run("reproduce", paper, "-o", tmp_path / "out", "--json"))
    names = [row["name"] for row in document["rows"]]
    assert names == [
        "dense",
        *("svd-llm 0.3", "svd-llm 0.3 recovered", "svd-llm 0.3 int8"),
        *("plain 0.3", "plain 0.3 recovered", "plain 0.3 int8"),
    ]
    assert document["left_out"] == [
        "svd-llm 0.3 int8 recovered: factors in one byte are not trained",
        "plain 0.3 int8 recovered: factors in one byte are not trained",
    ]
    _, native, recovered, one_byte, *_ = document["rows"]
    assert recovered["recovered"]
    assert recovered["effective_ratio"] == native["effective_ratio"]
    assert one_byte["bytes"] < 0.3 * native["bytes"]
    again = document_of(run("reproduce", paper, "-o", tmp_path / "out", "--json"))
    assert cells_with(again, "computed") == []


@pytest.mark.slow
def test_a_failed_cell_is_one_line_and_the_others_go_on(
    run: Run, paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, compress = tmp_path / "out", measure.compress

    def failing(asked: Any, config: Any, *rest: Any) -> Any:
        if config.method == "whiten":
            raise RuntimeError("the sun\nhas set")
        return compress(asked, config, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "compress", failing)
        outcome = run("reproduce", paper, "-o", out, "--json")
    document = document_of(outcome, code=1)
    told = [line for line in outcome.err.splitlines() if "failed" in line]
    assert told == ["compress svd-llm 0.3 failed: the sun has set"]
    assert states(document) == {"cells": 5, "computed": 3, "failed": 1, "not run": 1}
    assert document["cells"][1]["error"] == "the sun has set"
    assert document["rows"][1]["ppl"] == {str(tmp_path / "text.txt"): None}
    assert "the sun has set" in (out / "table.md").read_text()
    document = document_of(run("reproduce", paper, "-o", out, "--json"))
    assert states(document) == {"cells": 5, "computed": 2, "reused": 3}


def test_interrupted(
    run: Run, paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measure, "compress", interrupted)
        outcome = run("reproduce", paper, "-o", tmp_path / "out")
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err.endswith("neuronmm: interrupted\n")
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert states(document) == {"cells": 5, "computed": 1, "to do": 4}


def change(old: str, new: str) -> Callable[[Path], None]:
    return lambda path: replace(path, old, new)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change("ratios =", "ratio ="), ("unknown key of compress 'ratio'", "ratios")),
        (change("[compress]", "[compres]"), ("unknown key 'compres'", "compress")),
        (change("[model]", "[modell]"), ("unknown key 'modell'", "model")),
        (change("samples = 8", 'samples = "8"'), ("compress.samples must be an integer", "'8'")),
        (change("block = 8", "block = true"), ("compress.block must be an integer", "True")),
        (change("block = 8", "block = 12"), ("methods.svd-llm", "multiple of 8, got 12")),
        (change("[0.3]", "[1.5]"), ("ratio must be in (0, 1)", "1.5")),
        (change("[0.3]", "[nan]"), ("ratio must be in (0, 1)", "nan")),
        (change("[0.3]", "[0.3, 0.3]"), ("compress.ratios must not hold a value twice",)),
        (change("[0.3]", "[]"), ("compress.ratios", "must not be empty")),
        (change("block = 8", 'storages = ["fp4"]'), ("unknown storage 'fp4'", "fp8")),
        (change('"whiten"', '"whitten"'), ("methods.svd-llm: method must be one of", "whitten")),
        (change("/dense", "/absent"), ("absent is no directory",)),
        (change('calibration = "', 'calibration = "no'), ("compress.calibration: cannot read",)),
        (change('texts = ["', 'texts = ["wikitext", "'), ("unknown text of evaluate.texts",)),
        (change("[evaluate]", "[evaluate]\nlimit = 0"), ("evaluate.limit must be at least 1",)),
        (change("[evaluate]", '[evaluate]\ninclude = "no"'), ("include no is no directory",)),
        (change("[evaluate]", '[evaluate]\nprotocol = "x"'), ("one of standard, svd-llm",)),
        (change("[evaluate]", '[modelled]\ntarget = "trn9"\n[evaluate]'), ("trn9",)),
        (change("[evaluate]", "[modelled]\nnew = 1\n[evaluate]"), ("at least 2 tokens",)),
        (change("[evaluate]", "[recovery]\n[evaluate]"), ("recovery.data must be",)),
        (change("[model]", 'device = "x"\n[model]'), ("unknown key 'device'",)),
        (change("/dense", '/dense"\ndevice = "toaster'), ("device must be cpu",)),
        (change("[model]", "[model"), ("paper.toml",)),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_line(
    run: Run, paper: Path, tmp_path: Path, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    damage(paper)
    refused(run("reproduce", paper, "-o", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_unknown_task_is_one_line(run: Run, paper: Path, tmp_path: Path) -> None:
    append(paper, WITH_TASK.replace("colours", "colors"))
    outcome = run("reproduce", paper, "-o", tmp_path / "out")
    refused(outcome, "unknown task of evaluate.tasks 'colors'", "colours")
    assert not (tmp_path / "out").exists()


def test_mistakes_of_the_output(run: Run, paper: Path, tmp_path: Path) -> None:
    refused(run("reproduce", paper), "-o OUT are needed")
    refused(run("reproduce", tmp_path / "no.toml", "-o", tmp_path / "out"), "no such file")
    refused(run("reproduce", "demmo", "-o", tmp_path / "out"), "unknown reproduction", "demo")
    refused(run("reproduce", tmp_path, "-o", tmp_path / "out"), str(tmp_path))
    refused(run("reproduce", paper, "-o", tmp_path / "text.txt"), "text.txt is a file")
    refused(run("reproduce", paper, "-o", tmp_path / "dense"), "holds config.json")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    refused(run("reproduce", paper, "-o", tmp_path / "link"), "link cannot be made: File exists")
    for name in (b"\xff", b"\xff/out"):
        output = tmp_path / os.fsdecode(name)
        refused(run("reproduce", paper, "-o", output), "'", r"/\udcff", "must be text in UTF-8")
    assert not list(tmp_path.glob("*/cells"))
    before = files_of(tmp_path / "dense")
    out = tmp_path / "out"
    out.mkdir()
    (out / "cells").mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        refused(run("reproduce", paper, "-o", out), "another run works in")
    finally:
        os.close(descriptor)
    assert files_of(tmp_path / "dense") == before
    assert files_of(out) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_output(run: Run, paper: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "cells").mkdir(parents=True)
    out.chmod(0o500)
    refused(run("reproduce", paper, "-o", out), "no permission")
    out.chmod(0o700)


@pytest.mark.slow
def test_the_demo_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    document = document_of(run("reproduce", "demo", "-o", "out/reproduce", "--json"))
    names = [row["name"] for row in document["rows"]]
    methods = ("svd-llm 0.6", "kfac 0.6")
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


def test_list(run: Run) -> None:
    shipped = document_of(run("reproduce", "--list", "--json"))["shipped"]
    assert list(shipped) == [
        *("demo", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b"),
        *("qwen3-1.7b", "qwen3-4b", "qwen3-8b"),
    ]
    assert "qwen3-4b" in run("reproduce", "--list").out


@pytest.mark.slow
def test_a_checkpoint_made_again_with_other_weights_is_told(
    run: Run, paper: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    document_of(run("reproduce", paper, "-o", out, "--json"))
    for path in (out / "cells").glob("compress-*.json"):
        document = json.loads(path.read_text())
        document["result"]["weights_sha256"] = "0" * 64
        document["result_sha256"] = key_of(document["result"])
        path.write_text(json.dumps(document))
    for path in (out / "models").iterdir():
        shutil.rmtree(path)
    for path in (out / "cells").glob("perplexity-*.json"):
        path.unlink()
    outcome = run("reproduce", paper, "-o", out, "--json")
    assert [line for line in outcome.err.splitlines() if "made again" in line] == [
        f"warning: compress {method} 0.3 was made again and has other weights; what was measured "
        "of the former is kept"
        for method in ("svd-llm", "plain")
    ]


@pytest.mark.slow
def test_what_was_changed_since_is_done_again_and_told(
    run: Run, paper: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    document_of(run("reproduce", paper, "-o", out, "--json"))
    number = next((out / "cells").glob("perplexity-*.json"))
    right = json.loads(number.read_text())
    number.write_text(json.dumps(right | {"result": {**right["result"], "ppl_token": 1.0}}))
    model = next((out / "models").glob("compress-*")) / "model.safetensors"
    written = model.read_bytes()
    model.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    for path in (out / "cells").glob("perplexity-*.json"):
        if path != number:
            path.unlink()
    outcome = run("reproduce", paper, "-o", out, "--json")
    told = [line for line in outcome.err.splitlines() if "is not what was written; " in line]
    assert len(told) == 2
    assert str(number) in told[0]
    assert str(model.parent) in told[1]
    assert json.loads(number.read_text())["result"] == right["result"]
    assert model.read_bytes() == written


@pytest.mark.slow
def test_what_a_killed_compression_was_writing_is_removed(
    run: Run, paper: Path, tmp_path: Path
) -> None:
    models = tmp_path / "out" / "models"
    (tmp_path / "out" / "cells").mkdir(parents=True)
    for name in (".compress-0123456789abcdef.host.12.x.tmp", "mine", ".mine.tmp"):
        (models / name).mkdir(parents=True)
    document_of(run("reproduce", paper, "-o", tmp_path / "out", "--json"))
    names = {path.name for path in models.iterdir()}
    assert names >= {"mine", ".mine.tmp"}
    assert len(names) == 4


def test_a_binary_text_leaves_no_output(run: Run, paper: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"\0\1")
    refused(run("reproduce", paper, "-o", tmp_path / "out"), "must be UTF-8 text")
    assert not (tmp_path / "out").exists()
