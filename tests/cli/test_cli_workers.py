"""`neuronmm compress` on many workers: one result, one line for what ends them, and no hang."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fleet import CLI, Outcome, run_fleet
from mktestdocs import grab_code_blocks
from outcomes import Run
from tiny import tiny_directory

from neuronmm_ops.cli import parser
from neuronmm_ops.hf.provenance import RUN_FILE, ModelSource, read_run
from neuronmm_ops.manifest import tensor_hashes, weights_sha256

pytestmark = pytest.mark.slow

# Three batches.
COMPRESS = ("--block", "8", "--seqlen", "64", "--samples", "160")

# Runs before the command, in each worker.
AT_CALIBRATION = """
import os, signal, sys, time
from neuronmm_ops.compress import source
from neuronmm_ops.cli import workers

INDEX = int(os.environ["RANK"])

def before(name, action):
    function = getattr(source, name)
    def call(*arguments, **options):
        action()
        return function(*arguments, **options)
    setattr(source, name, call)
"""


def arguments(dense: Path, text: Path, out: Path) -> tuple[object, ...]:
    return ("compress", dense, "-o", out, "--calibration", text, *COMPRESS, "--json")


def said(outcomes: list[Outcome]) -> list[str]:
    """What all workers printed on stderr but progress, no traceback; stdout is empty."""
    assert all(outcome.out == "" for outcome in outcomes)
    lines = [line for outcome in outcomes for line in outcome.err.splitlines()]
    assert not any("Traceback" in line for line in lines), lines
    return [line for line in lines if not re.match(r"warning:|\w+ \d+/\d+, ", line)]


def torchrun(*program: object) -> subprocess.CompletedProcess[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    command = [str(part) for part in (*launcher, *program)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_torchrun_ends_with_the_name_of_a_killed_worker(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    kill = """
def kill():
    if INDEX == 1:
        os.kill(os.getpid(), signal.SIGKILL)
before("moments_or_none", kill)
"""
    script.write_text(AT_CALIBRATION + kill + CLI)
    done = torchrun(script, *arguments(dense, text, tmp_path / "o"))
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("neuronmm")]
    assert lines == ["neuronmm: worker 1 of 2 was killed, or does not answer"]
    assert not (tmp_path / "o").exists()


def test_the_line_of_the_documentation_is_understood() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compress.md").read_text()
    blocks = grab_code_blocks(page, lang="bash")
    (line,) = [line for block in blocks for line in block.splitlines() if "torchrun" in line]
    launcher, _, command = line.partition(" -m neuronmm_ops ")
    assert launcher == "OMP_NUM_THREADS=4 torchrun --nproc-per-node 2"
    assert parser().parse_args(shlex.split(command)).output == Path("small")


def test_a_disk_that_fills_up_ends_all(dense: Path, text: Path, tmp_path: Path) -> None:
    patch = """
import errno
from neuronmm_ops.hf import saving
def full(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")
saving._save_pretrained = full
"""
    command = arguments(dense, text, tmp_path / "o")
    outcomes = run_fleet(tmp_path / "fleet", 2, patch + CLI, *command)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    (line,) = said(outcomes)
    assert line.startswith("neuronmm: worker 0 of 2: ")
    assert [path.name for path in tmp_path.iterdir()] == ["fleet"]


def test_torchrun_gives_what_one_process_gives(
    run: Run, dense: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "many"
    done = torchrun("-m", "neuronmm_ops", *arguments(dense, text, out))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    single = run(*arguments(dense, text, tmp_path / "one"))
    expected = json.loads(single.out)
    ranks = [[layer["r"] for layer in each.pop("layers")] for each in (told, expected)]
    assert ranks[0] == ranks[1]
    assert {**told, "output": ""} == {**expected, "output": ""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "one"]
    perplexities = [
        json.loads(run("eval", tmp_path / name, "--text", text, "--seqlen", "64", "--json").out)
        for name in ("many", "one")
    ]
    assert perplexities[0]["ppl_token"] == pytest.approx(perplexities[1]["ppl_token"], rel=1e-4)


def test_worker_0_alone_reads_the_model_to_describe_it(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    patch = """
import os
from neuronmm_ops.hf import provenance
def unread(directory):
    raise AssertionError(f"read {directory}")
if os.environ["RANK"] != "0":
    provenance.tensor_hashes = unread
"""
    command = arguments(dense, text, tmp_path / "o")
    outcomes = run_fleet(tmp_path / "fleet", 2, patch + CLI, *command)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    run = read_run(tmp_path / "o" / RUN_FILE)
    assert run.model == ModelSource.of(dense)
    assert run.weights_sha256 == weights_sha256(tensor_hashes(tmp_path / "o"))


def test_a_read_only_place_ends_all_before_any_work(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    command = arguments(tmp_path / "no model", text, file / "o")
    outcomes = run_fleet(tmp_path / "fleet", 2, CLI, *command)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    (line,) = said(outcomes)
    assert line.startswith("neuronmm: worker 0 of 2: output")
    assert "is a file" in line


def test_mistakes_and_other_commands_are_told_once(dense: Path, tmp_path: Path) -> None:
    outcomes = run_fleet(tmp_path / "usage", 2, CLI, "compress", dense)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert len(said(outcomes)) == 1
    outcomes = run_fleet(tmp_path / "other", 2, CLI, "inspect", dense)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    assert said(outcomes) == ["neuronmm: inspect runs in one process; start it without torchrun"]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:0", "--device of many workers must be cpu or cuda, one each; got cuda:0"),
        pytest.param(
            "cuda",
            "--device cuda needs a CUDA device for each of 2 workers here, there are 0",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices"),
        ),
    ],
)
def test_a_device_that_not_all_can_have_is_refused(
    dense: Path, text: Path, tmp_path: Path, device: str, words: str
) -> None:
    command = (*arguments(dense, text, tmp_path / "o"), "--device", device)
    outcomes = run_fleet(tmp_path / "fleet", 2, CLI, *command)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    (line,) = said(outcomes)
    assert words in line


SICK = """
import torch
from neuronmm_ops.compress import calibrate
if INDEX == 1:
    gram = calibrate._MomentHooks._gram
    calibrate._MomentHooks._gram = lambda self, name, side, x: gram(self, name, side, x * torch.nan)
"""


def test_not_a_number_on_one_worker_ends_all_with_one_line(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    command = arguments(dense, text, tmp_path / "o")
    outcomes = run_fleet(tmp_path / "fleet", 2, AT_CALIBRATION + SICK + CLI, *command)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    (line,) = said(outcomes)
    assert line.startswith("neuronmm: worker 1 of 2: model.layers.0.mlp")
    assert "activations must be finite" in line
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("count", "victim", "agent"), [(2, 1, True), (3, 0, True), (2, 0, False)])
def test_a_killed_worker_ends_the_others_by_name(
    dense: Path, text: Path, tmp_path: Path, count: int, victim: int, agent: bool
) -> None:
    code = f"""
def kill():
    if INDEX == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
before("moments_or_none", kill)
"""
    command = arguments(dense, text, tmp_path / "o")
    began = time.monotonic()
    code = AT_CALIBRATION + code + CLI
    outcomes = run_fleet(tmp_path / "fleet", count, code, *command, agent=agent)
    assert time.monotonic() - began < 120  # gloo would wait for half an hour
    codes = [outcome.code for outcome in outcomes]
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [1] * (count - 1)
    lines = said(outcomes)
    if agent:
        assert lines == [f"neuronmm: worker {victim} of {count} was killed, or does not answer"]
    else:  # nobody knows more: worker 0 kept the store
        assert lines[-1].startswith("neuronmm: worker 1 of 2 has lost another")
        assert len(lines[-1]) < 200
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("number", "who", "code", "line"),
    [
        (signal.SIGINT, "INDEX >= 0", 130, "interrupted"),
        (signal.SIGINT, "INDEX == 1", 130, "interrupted"),
        (signal.SIGTERM, "INDEX >= 0", 143, "terminated"),
    ],
)
def test_a_signal_to_all_or_one_is_one_line(
    dense: Path, text: Path, tmp_path: Path, number: int, who: str, code: int, line: str
) -> None:
    patch = f"""
def stop():
    if {who}:
        os.kill(os.getpid(), {int(number)})
        time.sleep(1)
before("moments_or_none", stop)
"""
    command = arguments(dense, text, tmp_path / "o")
    outcomes = run_fleet(tmp_path / "fleet", 2, AT_CALIBRATION + patch + CLI, *command)
    assert [outcome.code for outcome in outcomes] == [code, code]
    assert said(outcomes) == [f"neuronmm: {line}"]


def test_three_workers_of_another_family_in_bfloat16(run: Run, text: Path, tmp_path: Path) -> None:
    dense = tiny_directory(tmp_path / "dense", "qwen2", dtype=torch.bfloat16)
    options = ("--method", "drift", "--targets", "all-linear")
    outcomes = run_fleet(
        tmp_path / "fleet", 3, CLI, *arguments(dense, text, tmp_path / "many"), *options
    )
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], outcomes
    assert [outcome.out for outcome in outcomes[1:]] == ["", ""]
    assert [outcome.err for outcome in outcomes[1:]] == ["", ""]
    many = json.loads(outcomes[0].out)
    one = json.loads(run(*arguments(dense, text, tmp_path / "one"), *options).out)
    assert [layer["r"] for layer in many["layers"]] == [layer["r"] for layer in one["layers"]]
    losses = [layer["loss"] for layer in one["layers"]]
    assert [layer["loss"] for layer in many["layers"]] == pytest.approx(losses, rel=1e-3, abs=1e-6)
    record = json.loads((tmp_path / "many" / "config.json").read_text())
    assert record["dtype"] == "bfloat16"
