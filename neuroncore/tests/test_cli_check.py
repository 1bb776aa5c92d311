"""`neuroncore check`: what one run finds, as text, JSON and SARIF, and what it cannot take."""

import ast
import json
from pathlib import Path

import pytest
from outcomes import refused

import neuroncore
from neuroncore import isa
from neuroncore.checks import views
from neuroncore.checks.lint import RULES
from neuroncore.cli.findings import RUN_RULES, of_message

HEAD = """\
import nki
import nki.isa as nisa
import nki.language as nl
from nki.isa import memset

"""
MISTAKES = (
    HEAD
    + """\
@nki.jit
def wrong(x, w):
    K, M = x.shape
    y = nl.ndarray((M, w.shape[1]), x.dtype, nl.shared_hbm)
    for n in range(0, w.shape[1], 512):
        acc = nl.ndarray((M, 512), nl.float32, nl.psum)
        a, b = nl.ndarray((K, M), x.dtype), nl.ndarray((K, 512), x.dtype)
        nisa.dma_copy(a, x)
        nisa.dma_copy(b, w[:, n : n + 512])  # bounds
        nisa.nc_matmul(acc, a, b, accumulate=True)  # begin
        out = nl.ndarray((M, 512), x.dtype)
        nisa.tensor_copy(out, acc)
        nisa.dma_copy(y[:, 0:512], out)
    for _ in nl.affine_range(1):  # deprecated
        pass
    tile = nl.ndarray((128, 4), nl.float32)
    memset(tile[0:64], 0.0)
    nisa.tensor_copy(nl.ndarray((128, 4), nl.float32), tile)  # part
    nisa.tensor_copy(nl.ndarray((128, 4), nl.float32), nl.ndarray((128, 4), nl.float32))  # nothing
    large = nl.ndarray((128, 30000), nl.float32)  # large
    other = nl.ndarray((128, 30000), nl.float32)
    memset(large, 0.0), memset(other, 0.0)
    nisa.tensor_tensor(large, large, other, nl.add)
    memset(value=0.0, dst=nl.ndarray((128, 4), nl.float32)[8:16])  # quadrant
    nisa.tensor_copy(out[:, M - 1 + M], out[:, 0:1])  # fits
    return y  # half
"""
)
CLEAN = (
    HEAD
    + """\
def scaled(x, factor=2.0):
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_scalar(tile, tile, nl.multiply, factor)
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out

@nki.jit
def scale(x):
    return scaled(x)
"""
)
ARGUMENTS = ("--arg", "x=bf16[128,128]", "--arg", "w=bf16[128,600]")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def written(text, name="kernels.py"):
        Path(name).write_text(text)
        return name

    return written


def line_of(mark):
    (line,) = (n for n, text in enumerate(MISTAKES.splitlines(), 1) if f"# {mark}" in text)
    return line


def found_in(document):
    return [(f["line"], f["rule"], f["severity"]) for f in document["findings"]]


def test_one_run_finds_many_mistakes(run, write):
    before = {name: getattr(isa, name) for name in isa.__all__}, views.slice_of, views.index_of
    document = run("check", write(MISTAKES), *ARGUMENTS, "--json").document(1)
    first = next(n for n, text in enumerate(MISTAKES.splitlines(), 1) if "def wrong" in text) - 1
    assert found_in(document) == [
        (first, "kernel-output", "warning"),
        (line_of("bounds"), "out-of-bounds", "error"),
        (line_of("begin"), "psum-accumulate", "error"),
        (line_of("deprecated"), "deprecated-loop", "warning"),
        (line_of("part"), "partly-uninitialised-read", "warning"),
        (line_of("nothing"), "uninitialised-read", "error"),
        (line_of("large"), "capacity", "error"),
        (line_of("quadrant"), "partition", "error"),
    ]
    assert (document["kernel"], document["run"]) == ("kernels.py:wrong", "whole")
    assert {f["path"] for f in document["findings"]} == {"kernels.py"}
    for found in document["findings"]:
        assert len(found["message"]) > 40
        assert found["source"]
        assert "kernels.py:" not in found["message"]
    after = {name: getattr(isa, name) for name in isa.__all__}, views.slice_of, views.index_of
    assert after == before


def test_people_read_the_same(run, write):
    outcome = run("check", write(MISTAKES), *ARGUMENTS)
    assert outcome.code == 1
    *lines, last = outcome.out.splitlines()
    assert len(lines) == 8
    assert lines[2].startswith(f"kernels.py:{line_of('begin')}:1: error psum-accumulate: nc_matmul")
    assert lines[2].endswith("(nki.isa.nc_matmul, accumulation mode)")
    assert last == "kernels.py:wrong: 8 findings; run to its end"


def test_lint_alone_where_no_argument_is_given(run, write):
    outcome = run("check", write(MISTAKES + "    open('ran', 'w')\n"))
    assert (outcome.code, len(outcome.out.splitlines())) == (0, 2)
    assert "deprecated-loop" in outcome.out
    assert outcome.out.endswith("kernels.py: 1 finding; not run: it takes --arg\n")
    assert run("check", "kernels.py", "--strict").code == 1
    assert not Path("ran").exists()


@pytest.mark.parametrize("place", ["kernels.py", "kernels.py:scale", "kernels.py:scaled"])
def test_a_clean_kernel(run, write, place):
    write(CLEAN)
    outcome = run("check", place, "--arg", "x=f32[4,8]", "--strict")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith(": no findings; run to its end\n")


def test_a_named_function_is_linted_decorated_or_not(run, write):
    write("def helper(x):\n    return x @ x\n")
    outcome = run("check", "kernels.py:helper")
    assert (outcome.code, "error matmul-operator" in outcome.out) == (1, True)


@pytest.mark.parametrize(
    ("body", "rule", "words"),
    [
        ("    return x.no_such_thing\n", "python", "AttributeError"),
        ("    while True:\n        pass\n", "budget", "more than 0.3 s"),
        ("    return nl.load(x, dtype=3, other=1)\n", "instruction", "load() got an unexpected"),
        ("    import torch_xla_not_there\n", "python", "No module named"),
        ("    return x\n    return nl.load(y)\n", None, ""),
        ("    return nl.add(x[:, 0:9], x)\n", "out-of-bounds", "slices are not clamped"),
        ("    nisa.no_such_instruction(x)\n", "python", "no_such_instruction"),
        ("    raise SystemExit(3)\n", "python", "SystemExit"),
    ],
)
def test_what_ends_a_run(run, write, body, rule, words):
    write(HEAD + "@nki.jit\ndef kernel(x):\n" + body)
    command = ("check", "kernels.py", "--arg", "x=f32[4,8]", "--max-seconds", 0.3, "--json")
    document = run(*command).document(int(rule is not None))
    assert document["run"] == ("stopped" if rule else "whole")
    assert [f["rule"] for f in document["findings"]] == ([rule] if rule else [])
    for found in document["findings"]:
        assert words in found["message"]
        assert found["path"] == "kernels.py"
        assert found["line"] >= 8


def test_a_file_that_does_not_load_is_a_finding(run, write):
    write("1 / 0\n" + CLEAN)
    document = run("check", "kernels.py", "--arg", "x=f32[4,8]", "--json").document(1)
    assert found_in(document) == [(1, "python", "error")]


def test_findings_in_other_files(run, write):
    write(HEAD + "def helper(t):\n    nisa.tensor_copy(t[8:16], t[8:16])\n", "helpers.py")
    calls = CLEAN.replace("    out =", "    helper(tile)\n    out =", 1)
    write(calls + "from helpers import helper\n")
    document = run("check", "kernels.py", "--arg", "x=f32[64,8]", "--json").document(1)
    assert [(f["path"], f["line"]) for f in document["findings"]] == [("helpers.py", 7)]


RACE = (
    HEAD
    + """\
@nki.jit
def racing(x):
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    tile = nl.ndarray(x.shape, x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_scalar(tile, tile, nl.add, float(nl.program_id(0)))
    nisa.dma_copy(out, tile)  # race
    return out
"""
)


@pytest.mark.parametrize(("schedules", "rules"), [(0, 1), (8, 2)])
def test_races_between_cores(run, write, schedules, rules):
    """What both write is seen without another order; an order shows that values change."""
    command = ("check", write(RACE), "--arg", "x=f32[4,8]", "--lnc", 2, "--schedules", schedules)
    document = run(*command, "--json").document(1)
    found = document["findings"]
    assert {f["rule"] for f in found} == {"core-race"}
    assert {f["line"] for f in found} == {12}
    assert len(found) == rules
    assert run("check", "kernels.py", "--arg", "x=f32[4,8]", "--lnc", 1).code == 0


def test_a_loop_that_is_refused_for_ever_is_stopped(run, write):
    body = (
        "    t = nl.ndarray((128, 4), nl.float32)\n    while True:\n        memset(t[8:16], 0.0)\n"
    )
    write(HEAD + "@nki.jit\ndef kernel(x):\n" + body)
    command = ("check", "kernels.py", "--arg", "x=f32[4,8]", "--max-seconds", 0.3, "--json")
    assert [rule for _, rule, _ in found_in(run(*command).document(1))] == ["budget", "partition"]


ALIASED = (
    HEAD
    + """\
import numpy as np

@nki.jit
def kernel(x, y):
    tile, zero = nl.load(x), nl.ndarray(y.shape, y.dtype)
    memset(zero, 0.0)
    nisa.dma_copy(y, zero)  # race
    out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out

def inputs():
    x = np.ones((4, 8), np.float32)
    return {"x": x, "y": x}
"""
)


def test_an_array_that_is_two_arguments(run, write):
    write(ALIASED)
    command = ("check", "kernels.py", "--arg", "kernels.py:inputs", "--json")
    assert found_in(run(*command).document(1)) == [(12, "engine-race", "error")]
    assert run("check", "kernels.py", "--arg", "x=f32[4,8]", "--arg", "y=f32[4,8]").code == 0


BANKS = (
    HEAD
    + """\
@nki.jit
def kernel(x):
    tile = nl.load(x)
    acc = nl.ndarray((128, 512), nl.float32, nl.psum)
    nisa.nc_matmul(acc, tile[:, 0:128], tile)
    a, b = nl.ndarray((128, 512), nl.float32), nl.ndarray((128, 256), nl.float32)
    for _ in range(2):
        nisa.tensor_copy(a, acc, engine=nisa.engine.vector)
        nisa.activation(b, nl.exp, acc[:, 256:512])
    out = nl.ndarray((128, 512), nl.float32, nl.shared_hbm)
    nisa.dma_copy(out, a)
    nisa.dma_copy(out[:, 0:256], b)
    return out
"""
)


def test_a_note_is_no_failure(run, write):
    write(BANKS)
    shape = "x=f32[128,512]"
    document = run("check", "kernels.py", "--arg", shape, "--strict", "--json").document()
    assert {f["rule"] for f in document["findings"]} == {"psum-shared-bank"}
    assert {f["severity"] for f in document["findings"]} == {"note"}


def test_sarif_has_what_the_schema_requires(run, write):
    outcome = run("check", write(MISTAKES), *ARGUMENTS, "--sarif", "found.sarif")
    log = json.loads(Path("found.sarif").read_text())
    assert (log["version"], len(log["runs"])) == ("2.1.0", 1)
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (each,) = log["runs"]
    assert each["automationDetails"] == {"id": "neuroncore/kernels.py:wrong/"}
    driver = each["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("neuroncore", neuroncore.__version__)
    names = [rule["id"] for rule in driver["rules"]]
    assert names == sorted(set(names))
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["help"]["text"]
    assert len(each["results"]) == len(outcome.out.splitlines()) - 1 == 8
    for result in each["results"]:
        assert names[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert physical["artifactLocation"] == {"uri": "kernels.py"}
        assert physical["region"]["startLine"] >= 1
        assert physical["region"]["startColumn"] >= 1
    write(CLEAN, "a clean one.py")
    run("check", "a clean one.py", "--sarif", "found.sarif")
    assert json.loads(Path("found.sarif").read_text())["runs"][0]["results"] == []


def test_sarif_names_files_as_addresses(run, write, tmp_path):
    inner = tmp_path / "in ner"
    inner.mkdir()
    write("def helper(x):\n    return x @ x\n", "in ner/k.py")
    run("check", "in ner/k.py:helper", "--sarif", "found.sarif")
    (result,) = json.loads(Path("found.sarif").read_text())["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "in%20ner/k.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone.py"], ["gone.py is no file"]),
        (["kernels.ipynb"], ["notebook"]),
        (["kernels.py:gone", "--arg", "x=f32[4,8]"], ["no kernel gone"]),
        (["kernels.py", "--arg", "y=f32[4,8]"], ["no parameter y"]),
        (["kernels.py:scaled", "--arg", "factor=1"], ["needs --arg x"]),
        (["kernels.py", "--arg", "x"], ["NAME=VALUE"]),
        (["two.py", "--arg", "x=f32[4,8]"], ["name a kernel", "scale, other"]),
        (["kernels.py", "--sarif", "gone/out.sarif"], ["no directory"]),
        (["kernels.py", "--arg", "x=f32[4,8]", "--schedules", "-1"], ["schedules"]),
        (["kernels.py", "--arg", "x=f32[4,8]", "--max-seconds", "0"], ["must be positive"]),
        (["broken.py"], ["not Python"]),
    ],
)
def test_bad_input_is_one_line(run, write, arguments, words):
    write(CLEAN)
    write(CLEAN + "@nki.jit\ndef other(x):\n    return x\n", "two.py")
    write("def :\n", "broken.py")
    refused(run("check", *arguments), *words)


def texts():
    """Texts of the simulator's messages, with 7 and `t` for what is filled in."""
    root = Path(neuroncore.__file__).parent
    for path in [p for p in root.rglob("*.py") if p.parent.name != "cli"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                values = [v.value if isinstance(v, ast.Constant) else "7" for v in node.values]
                yield "".join(map(str, values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_rule_of_a_run_has_a_message():
    found = {of_message(text, True, ("", 1)).rule for text in texts() if len(text) < 400}
    assert RUN_RULES.keys() - found <= {"python"}
    assert not RUN_RULES.keys() & RULES.keys(), "names of lint's rules are others"
