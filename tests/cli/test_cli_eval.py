"""`neuronmm eval`: texts, the papers' data sets and lm-eval's tasks."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from mktestdocs import check_md_file, grab_code_blocks
from outcomes import COMPRESS, TEXT, Run, refused

from neuronmm_ops import hf
from neuronmm_ops.eval.tasks import run_tasks

PAGE = Path(__file__).parents[2] / "docs" / "evaluate.md"

TASK = """task: quiz
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_target: gold
doc_to_choice: "{{{{a}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "ptb.test.txt").write_text(" no it was n't black monday \n" * 30)
    return folder


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"q": f"{n}?", "a": ["yes", "no"], "gold": n % 2} for n in range(4)]
    (folder / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "quiz.yaml").write_text(TASK.format(data=folder / "quiz.jsonl"))
    return folder


def test_one_text_keeps_its_fields(run: Run, dense: Path, text: Path) -> None:
    document = json.loads(run("eval", dense, "--text", text, "--json").out)
    assert list(document) == [
        *("model", "text", "ppl_token", "tokens", "seqlen"),
        *("dtype", "compute_dtype", "compute"),
    ]
    assert document["text"] == str(text)
    # The option's files may stand before the model.
    assert json.loads(run("eval", "--text", text, dense, "--json").out) == document
    assert "ppl_token " in run("eval", dense, "--text", text).out


@pytest.mark.parametrize("form", ["one option", "two options", "model last"])
def test_several_texts(run: Run, dense: Path, text: Path, tmp_path: Path, form: str) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    arguments = {
        "one option": (dense, "--text", text, other),
        "two options": (dense, "--text", text, "--text", other),
        "model last": ("--text", text, other, dense),
    }[form]
    document = json.loads(run("eval", *arguments, "--json").out)
    assert [row["text"] for row in document["perplexities"]] == [str(text), str(other)]
    one = json.loads(run("eval", dense, "--text", other, "--json").out)
    assert document["perplexities"][1]["ppl_token"] == one["ppl_token"]


def test_everything_at_once(run: Run, dense: Path, text: Path, data: Path, tasks: Path) -> None:
    arguments = ("--text", text, "--ppl", "ptb", "--data-dir", data, "--protocol", "svd-llm")
    arguments += ("--tasks", "quiz", "--include-path", tasks, "--limit", 3, "--batch-size", 2)
    outcome = run("eval", dense, *arguments, "--json")
    document = json.loads(outcome.out)
    ptb, own = document["perplexities"]
    assert (ptb["dataset"], ptb["protocol"], own["text"]) == ("ptb", "svd-llm", str(text))
    assert document["tasks"]["n-samples"]["quiz"] == {"original": 4, "effective": 3}
    assert set(document["tasks"]["results"]["quiz"]) >= {"acc,none", "acc_norm,none"}
    table = run("eval", dense, *arguments).out
    for words in ("ptb", f"{ptb['ppl_token']:.4f}", "svd-llm", "whole text", "quiz", "acc_norm"):
        assert words in table
    assert outcome.err == ""


def test_a_compressed_checkpoint(run: Run, dense: Path, text: Path, tasks: Path, tmp_path: Path):
    small = tmp_path / "small"
    assert run("compress", dense, "-o", small, "--calibration", text, *COMPRESS).code == 0
    outcome = run("eval", small, "--tasks", "quiz", "--include-path", tasks, "--json")
    found = json.loads(outcome.out)["tasks"]["results"]
    model, tokenizer = hf.load(small), hf.load_tokenizer(small)
    assert run_tasks(model, tokenizer, ["quiz"], include_path=tasks)["results"] == found


def test_lm_eval_s_model_type(run: Run, dense: Path, tasks: Path) -> None:
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
    expected = run("eval", dense, "--tasks", "quiz", "--include-path", tasks, "--json").out
    assert found["results"] == json.loads(expected)["tasks"]["results"]
    assert found["config"]["model"] == "neuronmm"
    assert issubclass(lm_eval.api.registry.get_model("neuronmm"), ours.CheckedLM)


@pytest.mark.slow
def test_lm_eval_s_command_line(
    dense: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import neuronmm_ops.hf.lm_eval as ours

    arguments = ["--model_args", f"pretrained={dense}", "--include_path", str(tasks)]
    arguments += ["--tasks", "quiz", "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", "--model", "neuronmm", *arguments])
    ours.main()
    assert "neuronmm ({'pretrained'" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert "acc,none" in json.loads(written.read_text())["results"]["quiz"]


def test_a_mistake_on_lm_eval_s_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import neuronmm_ops.hf.lm_eval as ours

    monkeypatch.setattr(
        "lm_eval.__main__.cli_evaluate", lambda: ours.NeuronMM(pretrained="nowhere")
    )
    with pytest.raises(SystemExit) as stop:
        ours.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lm_eval: nowhere is no directory")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--text FILE", "--ppl", "--tasks")),
        (("--ppl", ","), ("give what to evaluate on",)),
        (("--ppl", "wikitext"), ("unknown data set 'wikitext'", "wikitext2")),
        (("--ppl", "ptb", "--protocol", "gptq"), ("unknown protocol 'gptq'", "standard")),
        (("--ppl", "ptb"), ("ptb-text-only/ptb_text_only", "penn_treebank/test/0000.parquet")),
        (("--ppl", "c4", "--data-dir", "DATA"), ("allenai/c4", "c4-validation.00000-of-00008")),
        (("--ppl", "ptb", "--data-dir", "DATA", "--seqlen", "129"), ("limit of 128",)),
        (("--tasks", "quiz", "--include-path", "nowhere"), ("include_path", "nowhere")),
        (("--tasks", "quiz", "--limit", "-1"), ("limit must be at least 1, got -1",)),
        (("--tasks", "quiz", "--batch-size", "x"), ("--batch-size",)),
        (("--text", "nowhere.txt"), ("cannot read text nowhere.txt",)),
    ],
)
def test_mistakes_are_one_line(
    run: Run, dense: Path, data: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    named = [str(data) if argument == "DATA" else argument for argument in arguments]
    refused(run("eval", dense, *named), *words)


def test_the_help_text_says_that_task_files_are_code(run: Run) -> None:
    assert "!function" in run("eval", "--help").out.split("--include-path DIR ")[1]


def test_the_model_must_be_given(run: Run, text: Path) -> None:
    refused(run("eval", "--text", text), "give the MODEL")
    refused(run("eval", "--ppl", "ptb"), "give the MODEL")


@pytest.mark.parametrize("package", ["datasets", "lm_eval.evaluator"])
def test_a_missing_package_names_the_extra(
    run: Run,
    dense: Path,
    data: Path,
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    arguments = ("--ppl", "ptb", "--data-dir", data, "--tasks", "quiz", "--include-path", tasks)
    refused(run("eval", dense, *arguments), "is not installed", "'neuronmm-ops[eval]'")


@pytest.mark.slow
def test_the_page_s_commands(
    run: Run, dense: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
