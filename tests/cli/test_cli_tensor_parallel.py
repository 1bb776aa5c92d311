"""`neuronmm generate` and `eval` on workers that divide the model: what one process says, once."""

import json
from pathlib import Path

import pytest
from fleet import CLI, Outcome, run_fleet
from outcomes import COMPRESS, Run

pytestmark = pytest.mark.slow

ANSWER = ("--prompt", "The quick brown", "--new-tokens", "8", "--json")

# Runs before the command, in each worker.
AT_FORWARD = """
import os, signal
from neuronmm_ops.parallel import ShardedLinear

forward = ShardedLinear.forward
calls = 0

def at_the_tenth(action):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == 10 and os.environ["RANK"] == "1":
            action()
        return forward(*arguments, **options)
    ShardedLinear.forward = call
"""


@pytest.fixture(scope="module")
def small(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from neuronmm_ops.cli import main

    out = tmp_path_factory.mktemp("compressed") / "small"
    command = ["compress", dense, "-o", out, "--calibration", text, *COMPRESS]
    assert main([str(part) for part in command]) == 0
    return out


def single_document(outcomes: list[Outcome]) -> dict[str, object]:
    """The one document that worker 0 prints, and nothing else."""
    first, *others = outcomes
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), outcomes
    assert not any(outcome.out or outcome.err for outcome in others)
    return json.loads(first.out)


def test_generate_on_two_workers(run: Run, small: Path, tmp_path: Path) -> None:
    outcomes = run_fleet(tmp_path / "fleet", 2, CLI, "generate", small, *ANSWER)
    assert single_document(outcomes) == json.loads(run("generate", small, *ANSWER).out)


def test_eval_on_four_workers(run: Run, small: Path, text: Path, tmp_path: Path) -> None:
    command = ("eval", small, "--text", text, "--seqlen", "64", "--json")
    found = single_document(run_fleet(tmp_path / "fleet", 4, CLI, *command))
    expected = json.loads(run(*command).out)
    assert found.pop("ppl_token") == pytest.approx(expected.pop("ppl_token"), rel=1e-5)
    assert found == expected


def test_a_dense_model_is_divided_too(run: Run, dense: Path, tmp_path: Path) -> None:
    outcomes = run_fleet(tmp_path / "fleet", 2, CLI, "generate", dense, *ANSWER)
    assert single_document(outcomes) == json.loads(run("generate", dense, *ANSWER).out)


def said_once(outcomes: list[Outcome], code: int) -> str:
    assert [outcome.code for outcome in outcomes] == [code] * len(outcomes), outcomes
    assert not any(outcome.out for outcome in outcomes)
    lines = [line for outcome in outcomes for line in outcome.err.splitlines()]
    lines = [line for line in lines if line.startswith("neuronmm") or "Traceback" in line]
    assert len(lines) == 1, lines
    return lines[0]


def test_tasks_are_for_one_process(small: Path, tmp_path: Path) -> None:
    outcomes = run_fleet(tmp_path / "fleet", 2, CLI, "eval", small, "--tasks", "piqa")
    line = said_once(outcomes, 2)
    assert line.endswith("--tasks runs in one process; start it without torchrun, or use --text")


def test_heads_that_three_workers_cannot_divide(small: Path, tmp_path: Path) -> None:
    outcomes = run_fleet(tmp_path / "fleet", 3, CLI, "generate", small, *ANSWER)
    assert "tp must divide the heads, got 4 heads and tp = 3" in said_once(outcomes, 2)


def test_a_model_without_a_plan(tmp_path: Path) -> None:
    from causal_lms import family_model
    from tiny import tiny_tokenizer

    family_model("gpt2").save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    outcomes = run_fleet(tmp_path / "fleet", 2, CLI, "generate", tmp_path / "gpt2", *ANSWER)
    assert "GPT2LMHeadModel" in said_once(outcomes, 2)


def test_a_worker_that_is_killed_ends_all(small: Path, tmp_path: Path) -> None:
    kill = "at_the_tenth(lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
    outcomes = run_fleet(tmp_path / "fleet", 2, AT_FORWARD + kill + CLI, "generate", small, *ANSWER)
    assert [outcome.code for outcome in outcomes] == [1, -9]
    lines = [line for line in outcomes[0].err.splitlines() if line.startswith("neuronmm")]
    assert lines == ["neuronmm: worker 1 of 2 was killed, or does not answer"]


def test_an_interrupt_ends_all(small: Path, tmp_path: Path) -> None:
    stop = "at_the_tenth(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    outcomes = run_fleet(tmp_path / "fleet", 2, AT_FORWARD + stop + CLI, "generate", small, *ANSWER)
    assert said_once(outcomes, 130) == "neuronmm: interrupted"
