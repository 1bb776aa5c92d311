"""The action for GitHub: its inputs are documented, and its steps run as bash would run them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from neuroncore.cli import parser

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / ".github/actions/neuroncore/action.yml").read_text())
PAGE = (ROOT / "neuroncore/docs/ci.md").read_text()
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
(WORKFLOW,) = map(
    yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
)
KERNEL = """\
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def copied(x, extra=0):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile[0 : x.shape[0] + extra])
    return out
"""
TEST = """\
import numpy as np
from kernels import copied
from neuroncore.testing import assert_kernel

def test_it():
    assert_kernel(copied, (np.ones((4, 8), np.float32),), lambda x: 2 * x)
"""


def step(name: str, folder: Path, **variables: str) -> int:
    """Run a step's script as GitHub does, and return its exit code."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]]
    # its step Install puts the commands of these tests' environment on the path
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False
    ).returncode


def test_it_is_a_composite_action():
    assert ACTION["runs"]["using"] == "composite"
    assert ACTION["name"]
    assert ACTION["description"]
    for each in STEPS.values():
        assert ("run" in each) != ("uses" in each)
        assert each.get("shell", "bash") == "bash" if "uses" in each else each["shell"] == "bash"
        assert "${{" not in each.get("run", ""), "an input is no code of a script"
        assert re.fullmatch(r"[\w-]+(/[\w-]+)+@v\d+", each.get("uses", "a/b@v1"))
        variables = set(re.findall(r"\$([A-Z]+)", each.get("run", "")))
        assert variables == each.get("env", {}).keys()


def test_inputs_are_documented_and_used():
    documented = re.findall(r"^\| `(\w+)` \| ", PAGE, re.MULTILINE)
    assert documented == list(ACTION["inputs"])
    used = set(re.findall(r"inputs\.(\w+)", json.dumps(ACTION["runs"])))
    assert used == set(documented)
    assert all(each["description"] for each in ACTION["inputs"].values())


def test_the_workflow_of_the_page_gives_inputs_that_exist():
    (*_, last) = WORKFLOW["jobs"]["kernels"]["steps"]
    assert last["uses"].endswith("/.github/actions/neuroncore@main")
    assert last["with"].keys() <= ACTION["inputs"].keys()
    lines = last["with"]["check"].splitlines()
    assert len(lines) == 2
    for line in lines:
        options = parser().parse_args(["check", "--strict", "--sarif", "a", *shlex.split(line)])
        assert options.strict


@pytest.mark.parametrize(
    ("lines", "strict", "code", "files"),
    [
        ("kernels.py\n\n  kernels.py:copied --arg 'x=f32[4,8]'", "", 0, 2),
        ("kernels.py --arg x=f32[4,8] --arg extra=4\nkernels.py", "", 1, 2),
        ("kernels.py:copied --arg x=f32[4,8]; touch made", "--strict", 1, 0),
        ("$(touch made) `touch made`", "", 1, 0),
        ("gone.py", "", 1, 0),
    ],
)
@pytest.mark.slow
def test_its_check_runs_every_line(tmp_path, lines, strict, code, files):
    (tmp_path / "kernels.py").write_text(KERNEL)
    assert step("Check", tmp_path, CHECK=lines, STRICT=strict) == code
    logs = sorted((tmp_path / "neuroncore-findings").iterdir())
    assert len(logs) == files
    assert [json.loads(log.read_text())["version"] for log in logs] == ["2.1.0"] * files
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_its_tests_keep_pages_of_what_fails(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNEL)
    (tmp_path / "test_kernels.py").write_text(TEST)
    assert step("Test", tmp_path, TESTS="test_kernels.py --rootdir .") != 0
    (page,) = (tmp_path / "neuroncore-timelines").iterdir()
    assert page.name == "copied-x-4-8-float32-on-trn2.html"
    (tmp_path / "test_kernels.py").write_text(TEST.replace("2 * x", "x"))
    assert step("Test", tmp_path, TESTS="test_kernels.py --rootdir .") == 0
