"""`neuroncore lint`: findings by line of NKI, as text and JSON, and what is refused."""

import json

import pytest
from outcomes import refused

KERNELS = """\
import nki
import nki.language as nl

def helper(x):
    return [i for i in x]

@nki.jit
def kernel(x):
    for i in nl.dynamic_range(4):
        helper(x)
"""


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS + "    open('ran', 'w')\n")
    return path


def test_findings_of_each_line(run, kernels):
    outcome = run("lint", kernels)
    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.out == (
        f"{kernels}:9:14: error dynamic-loop: dynamic_range and while on a register are gone; use "
        "nl.fori_loop or nl.while_loop\n1 finding (NKI 0.7)\n"
    )
    outcome = run("lint", kernels, kernels, "--nki", "0.6", "--json")
    assert outcome.code == 1
    document = json.loads(outcome.out)
    assert document["nki"] == "0.6"
    found = [(f["line"], f["severity"], f["rule"]) for f in document["findings"]]
    assert found == [(5, "error", "comprehension"), (9, "warning", "deprecated-loop")]
    assert document["findings"][0] == {
        "path": str(kernels),
        "line": 5,
        "column": 12,
        "rule": "comprehension",
        "severity": "error",
        "remedy": "write a for loop",
        "message": "comprehensions are refused, allowed from NKI 0.7 on",
    }
    assert not kernels.with_name("ran").exists(), "nothing is run"


def test_no_finding(run, kernels):
    kernels.write_text("from nki import jit\n@jit\ndef kernel(x):\n    return x\n")
    assert run("lint", kernels, "--nki", "0.6") == (0, "no findings (NKI 0.6)\n", "")


def test_what_cannot_be_linted(run, kernels, tmp_path):
    kernels.write_text("def helper(x):\n    return x\n")
    refused(run("lint", kernels), "has no kernel: no function is decorated with nki.jit")
    refused(run("lint", tmp_path / "none.py"), "cannot read", "No such file")
    refused(run("lint", kernels, "--nki", "0.5"), "--nki", "0.6", "0.7")
