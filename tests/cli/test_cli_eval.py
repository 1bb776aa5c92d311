"""`neuronmm eval`: texts, the papers' data sets and lm-eval's tasks."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from mktestdocs import check_md_file, grab_code_blocks
from outcomes import TEXT, refused
from reproductions import write_task

from neuronmm_ops import hf
from neuronmm_ops.eval.tasks import run_tasks

pytestmark = pytest.mark.usefixtures("caches")
PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "ptb.test.txt").write_text(" no it was n't black monday \n" * 30)
    return folder


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_task(tmp_path, "quiz", 4, "acc", "acc_norm")


def test_one_text_keeps_its_fields(run, dense, text):
    document = run("eval", dense, "--text", text, "--json").document()
    assert list(document) == [
        *("model", "text", "ppl_token", "tokens", "seqlen"),
        *("dtype", "compute_dtype", "compute"),
    ]
    assert document["text"] == str(text)
    # The option's files may stand before the model.
    assert run("eval", "--text", text, dense, "--json").document() == document
    assert "ppl_token " in run("eval", dense, "--text", text).page()


@pytest.mark.parametrize("form", ["one option", "two options", "model last"])
def test_several_texts(run, dense, text, tmp_path, form):
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    arguments = {
        "one option": (dense, "--text", text, other),
        "two options": (dense, "--text", text, "--text", other),
        "model last": ("--text", text, other, dense),
    }[form]
    document = run("eval", *arguments, "--json").document()
    assert [row["text"] for row in document["perplexities"]] == [str(text), str(other)]
    one = run("eval", dense, "--text", other, "--json").document()
    assert document["perplexities"][1]["ppl_token"] == one["ppl_token"]


def test_everything_at_once(run, dense, text, data, tasks):
    arguments = ("--text", text, "--ppl", "ptb", "--data-dir", data, "--protocol", "svd-llm")
    arguments += ("--tasks", "quiz", "--include-path", tasks, "--limit", 3, "--batch-size", 2)
    outcome = run("eval", dense, *arguments, "--json")
    document = outcome.document()
    ptb, own = document["perplexities"]
    assert (ptb["dataset"], ptb["protocol"], own["text"]) == ("ptb", "svd-llm", str(text))
    assert document["tasks"]["n-samples"]["quiz"] == {"original": 4, "effective": 3}
    assert set(document["tasks"]["results"]["quiz"]) >= {"acc,none", "acc_norm,none"}
    table = run("eval", dense, *arguments).out
    for words in ("ptb", f"{ptb['ppl_token']:.4f}", "svd-llm", "whole text", "quiz", "acc_norm"):
        assert words in table
    assert outcome.err == ""


def test_a_compressed_checkpoint(run, small, tasks):
    options = ("--tasks", "quiz", "--include-path", tasks, "--json")
    found = run("eval", small, *options).document()["tasks"]["results"]
    model, tokenizer = hf.load(small), hf.load_tokenizer(small)
    assert run_tasks(model, tokenizer, ["quiz"], include_path=tasks)["results"] == found


def test_lm_eval_s_model_type(run, dense, tasks):
    import lm_eval

    import neuronmm_ops.hf.lm_eval as ours  # registers it

    manager = lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="neuronmm",
        model_args={"pretrained": str(dense), "device": "cuda:0"},
        tasks=["quiz"],
        task_manager=manager,
        batch_size=2,
    )
    options = ("--tasks", "quiz", "--include-path", tasks, "--json")
    assert found["results"] == run("eval", dense, *options).document()["tasks"]["results"]
    assert found["config"]["model"] == "neuronmm"
    assert issubclass(lm_eval.api.registry.get_model("neuronmm"), ours.CheckedLM)


@pytest.mark.slow
def test_lm_eval_s_command_line(
    dense, tasks, tmp_path, monkeypatch,
    capsys,
):  # fmt: skip
    from lm_eval.tasks import TaskManager

    import neuronmm_ops.hf.lm_eval as ours

    arguments = ["--model_args", f"pretrained={dense}", "--include_path", str(tasks)]
    arguments += ["--tasks", "quiz", "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", "--model", "neuronmm", *arguments])
    make = TaskManager.__init__  # without lm-eval's own tasks, which take ten seconds to read
    few = {"include_defaults": False}
    monkeypatch.setattr(TaskManager, "__init__", lambda *own, **named: make(*own, **named | few))
    ours.main()
    assert "neuronmm ({'pretrained'" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert "acc,none" in json.loads(written.read_text())["results"]["quiz"]


def test_a_mistake_on_lm_eval_s_command_line_is_one_line(capsys, monkeypatch):
    import neuronmm_ops.hf.lm_eval as ours

    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate", lambda: ours.NeuronMM(pretrained="nowhere")
    )
    with pytest.raises(SystemExit) as stop:
        ours.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lm_eval: nowhere is no directory")


def test_the_help_text_says_that_task_files_are_code(run):
    assert "!function" in run("eval", "--help").out.split("--include-path DIR ")[1]


@pytest.mark.parametrize("package", ["datasets", "lm_eval.evaluator"])
def test_a_missing_package_names_the_extra(run, dense, data, tasks, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = ("--ppl", "ptb", "--data-dir", data, "--tasks", "quiz", "--include-path", tasks)
    refused(run("eval", dense, *arguments), "is not installed", "'neuronmm-ops[eval]'")


@pytest.mark.slow
def test_the_page_s_commands(run, dense, monkeypatch, tmp_path):
    """Those on local files run; those that need the hub say what they miss."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(dense)
    for name in ("held_out.txt", "calibration.txt"):
        (tmp_path / name).write_text(TEXT)
    check_md_file(PAGE, memory=True)
    blocks = grab_code_blocks(PAGE.read_text(), lang="bash")
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    commands = [line[1:] for line in lines if line[0] == "neuronmm"]
    assert [run(*command).code for command in commands] == [0, 2, 2, 0, 0]
