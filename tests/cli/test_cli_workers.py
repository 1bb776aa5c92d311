"""Commands on many workers: one result, one line for what ends them, and no hang."""

import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from fleet import CLI, run_fleet
from mktestdocs import grab_code_blocks
from outcomes import COMPRESS, process
from tiny import tiny_directory, tiny_tokenizer

from neuronmm_ops.cli import parser
from neuronmm_ops.hf.provenance import RUN_FILE, ModelSource, read_run
from neuronmm_ops.manifest import tensor_hashes, weights_sha256

pytestmark = pytest.mark.slow

# Run before the command, in each worker: what calls an action before the calibration, or at the
# tenth product of a divided model.
BEFORE = """
import errno, os, signal, sys, time, torch
from neuronmm_ops.compress import calibrate, source
from neuronmm_ops.hf import provenance, saving
from neuronmm_ops.parallel import ShardedLinear

INDEX = int(os.environ["RANK"])

def before(place, name, action, calls=1):
    function, count = getattr(place, name), 0
    def call(*arguments, **options):
        nonlocal count
        count += 1
        if count == calls:
            action()
        return function(*arguments, **options)
    setattr(place, name, call)

def stop(index, number):
    def action():
        if INDEX == index or index is None:
            os.kill(os.getpid(), number)
            time.sleep(1)
    before(source, "moments_or_none", action)
    before(ShardedLinear, "forward", action, 10)
"""
ANSWER = ("--prompt", "The quick brown", "--new-tokens", "8", "--json")


@pytest.fixture
def fleet(tmp_path):
    """Runs a command on some workers, after the code."""

    def call(count, *command, code="", agent=True):
        code = BEFORE + code + "\n" + CLI
        return run_fleet(tmp_path / "fleet", count, code, *command, agent=agent)

    return call


@pytest.fixture
def compress(dense, text, tmp_path):
    """A command that compresses with three batches to `out`."""
    samples = ("--calibration", text, *COMPRESS, "--samples", "160", "--json")
    return ("compress", dense, "-o", tmp_path / "out", *samples)


def said(outcomes, *codes):
    """What all workers printed on stderr but progress, no traceback; stdout is empty."""
    assert [outcome.code for outcome in outcomes] == [*codes], outcomes
    assert all(outcome.out == "" for outcome in outcomes)
    lines = [line for outcome in outcomes for line in outcome.err.splitlines()]
    assert not any("Traceback" in line for line in lines), lines
    return [line for line in lines if not re.match(r"warning:|\w+ \d+/\d+, ", line)]


def document_of(outcomes):
    """The one document that worker 0 prints, and nothing else."""
    first, *others = outcomes
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), outcomes
    assert not any(outcome.out or outcome.err for outcome in others)
    return json.loads(first.out)


def torchrun(*program):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    return process(*launcher, *program)


def test_torchrun_ends_with_the_name_of_a_killed_worker(compress, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{BEFORE}stop(1, signal.SIGKILL)\n{CLI}")
    done = torchrun(script, *compress)
    assert done.code == 1
    lines = [line for line in done.err.splitlines() if line.startswith("neuronmm")]
    assert lines == ["neuronmm: worker 1 of 2 was killed, or does not answer"]
    assert not (tmp_path / "out").exists()


def test_the_line_of_the_documentation_is_understood():
    page = (Path(__file__).parents[2] / "docs" / "compress.md").read_text()
    blocks = grab_code_blocks(page, lang="bash")
    (line,) = [line for block in blocks for line in block.splitlines() if "torchrun" in line]
    launcher, _, command = line.partition(" -m neuronmm_ops ")
    assert launcher == "OMP_NUM_THREADS=4 torchrun --nproc-per-node 2"
    assert parser().parse_args(shlex.split(command)).output == Path("small")


def test_torchrun_gives_what_one_process_gives(run, compress, text, tmp_path):
    found = torchrun("-m", "neuronmm_ops", *compress).document()
    many = (tmp_path / "out").rename(tmp_path / "many")
    expected = run(*compress).document()
    ranks = [[layer["r"] for layer in each.pop("layers")] for each in (found, expected)]
    assert ranks[0] == ranks[1]
    assert found == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "out"]
    options = ("--text", text, "--seqlen", "64", "--json")
    perplexities = [
        run("eval", path, *options).document()["ppl_token"] for path in (many, tmp_path / "out")
    ]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)


def test_worker_0_alone_reads_the_model_to_describe_it(fleet, compress, dense, tmp_path):
    code = "if INDEX: provenance.tensor_hashes = lambda directory: sys.exit(f'read {directory}')"
    document_of(fleet(2, *compress, code=code))
    run = read_run(tmp_path / "out" / RUN_FILE)
    assert run.model == ModelSource.of(dense)
    assert run.weights_sha256 == weights_sha256(tensor_hashes(tmp_path / "out"))


def test_three_workers_of_another_family_in_bfloat16(fleet, run, text, tmp_path):
    dense = tiny_directory(tmp_path / "dense", "qwen2", dtype=torch.bfloat16)
    options = ("--method", "drift", "--targets", "all-linear", "--samples", "160", "--json")
    command = ("compress", dense, "--calibration", text, *COMPRESS, *options, "-o")
    many = document_of(fleet(3, *command, tmp_path / "many"))["layers"]
    one = run(*command, tmp_path / "one").document()["layers"]
    assert [layer["r"] for layer in many] == [layer["r"] for layer in one]
    losses = [layer["loss"] for layer in one]
    assert [layer["loss"] for layer in many] == pytest.approx(losses, rel=1e-3, abs=1e-6)
    record = json.loads((tmp_path / "many" / "config.json").read_text())
    assert record["dtype"] == "bfloat16"


SICK = """
gram = calibrate._MomentHooks._gram
if INDEX == 1:
    calibrate._MomentHooks._gram = lambda self, name, side, x: gram(self, name, side, x * torch.nan)
"""
FULL = """
def full(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")
saving._save_pretrained = full
"""
NOT_THERE = pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")


@pytest.mark.parametrize(
    ("code", "options", "words"),
    [
        (FULL, (), ["neuronmm: worker 0 of 2: ", "No space left"]),
        (SICK, (), ["neuronmm: worker 1 of 2: model.layers.0.mlp", "activations must be finite"]),
        ("", ("--device", "cuda:0"), ["of many workers must be cpu or cuda, one each; got cuda:0"]),
        pytest.param(
            "",
            ("--device", "cuda"),
            ["--device cuda needs a CUDA device for each of 2 workers here, there are 0"],
            marks=NOT_THERE,
        ),
    ],
)
def test_what_one_worker_cannot_do_ends_all(code, options, words, fleet, compress, tmp_path):
    (line,) = said(fleet(2, *compress, *options, code=code), 2, 2)
    assert [word for word in words if word not in line] == []
    assert [path.name for path in tmp_path.iterdir()] == ["fleet"]


def test_a_read_only_place_ends_all_before_any_work(fleet, text, tmp_path):
    options = ("-o", text / "out", "--calibration", text)
    (line,) = said(fleet(2, "compress", tmp_path / "no model", *options), 2, 2)
    assert line.startswith("neuronmm: worker 0 of 2: output")
    assert "is a file" in line


def test_mistakes_and_other_commands_are_told_once(fleet, dense, small):
    assert len(said(fleet(2, "compress", dense), 2, 2)) == 1
    for command, words in (
        (("inspect", dense), "inspect runs in one process; start it without torchrun"),
        (
            ("eval", small, "--tasks", "piqa"),
            "--tasks runs in one process; start it without torchrun, or use --text",
        ),
    ):
        (line,) = said(fleet(2, *command), 2, 2)
        assert re.sub(r"worker [01] of 2: ", "", line) == f"neuronmm: {words}"


@pytest.mark.parametrize(("count", "victim", "agent"), [(2, 1, True), (3, 0, True), (2, 0, False)])
def test_a_killed_worker_ends_the_others_by_name(count, victim, agent, fleet, compress, tmp_path):
    began = time.monotonic()
    outcomes = fleet(count, *compress, code=f"stop({victim}, signal.SIGKILL)", agent=agent)
    assert time.monotonic() - began < 120  # gloo would wait for half an hour
    codes = [1] * count
    codes[victim] = -signal.SIGKILL
    lines = said(outcomes, *codes)
    if agent:
        assert lines == [f"neuronmm: worker {victim} of {count} was killed, or does not answer"]
    else:  # nobody knows more: worker 0 kept the store
        assert lines[-1].startswith("neuronmm: worker 1 of 2 has lost another")
        assert len(lines[-1]) < 200
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("number", "index", "code", "word"),
    [
        (signal.SIGINT, None, 130, "interrupted"),
        (signal.SIGINT, 1, 130, "interrupted"),
        (signal.SIGTERM, None, 143, "terminated"),
    ],
)
def test_a_signal_to_all_or_one_is_one_line(number, index, code, word, fleet, compress):
    outcomes = fleet(2, *compress, code=f"stop({index}, {int(number)})")
    assert said(outcomes, code, code) == [f"neuronmm: {word}"]


# --- a model that workers divide


@pytest.mark.parametrize("name", ["small", "dense"])
def test_generate_on_two_workers(name, fleet, run, request):
    command = ("generate", request.getfixturevalue(name), *ANSWER)
    assert document_of(fleet(2, *command)) == run(*command).document()


def test_eval_on_four_workers(fleet, run, small, text):
    command = ("eval", small, "--text", text, "--seqlen", "64", "--json")
    found, expected = document_of(fleet(4, *command)), run(*command).document()
    assert found.pop("ppl_token") == pytest.approx(expected.pop("ppl_token"), rel=1e-5)
    assert found == expected


def test_a_model_without_a_plan(fleet, tmp_path):
    from causal_lms import family_model

    family_model("gpt2").save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    (line,) = said(fleet(2, "generate", tmp_path / "gpt2", *ANSWER), 2, 2)
    assert "GPT2LMHeadModel" in line


@pytest.mark.parametrize(
    ("number", "codes", "words"),
    [
        (signal.SIGKILL, (1, -9), "worker 1 of 2 was killed, or does not answer"),
        (signal.SIGINT, (130, 130), "interrupted"),
    ],
)
def test_a_worker_that_stops_while_it_answers_ends_all(number, codes, words, fleet, small):
    outcomes = fleet(2, "generate", small, *ANSWER, code=f"stop(1, {int(number)})")
    assert said(outcomes, *codes) == [f"neuronmm: {words}"]
