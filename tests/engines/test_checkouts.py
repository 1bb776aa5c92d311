"""Which commits of the engines' sources are taken, and what is said where they are not there."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from commands import run

sys.path.append(str(Path(__file__).with_name("sources")))

from checkouts import CHECKOUTS, missing

SOURCES = Path(__file__).with_name("sources")


def test_a_folder_is_the_commit_or_its_problem_is_one_line(tmp_path):
    wanted = replace(CHECKOUTS["nxd"], folder="made")
    assert "there is none" in (wanted.problem(tmp_path) or "")
    made = tmp_path / "made"
    git = ("git", "-C", made, "-c", "user.name=a", "-c", "user.email=a@b.c")
    made.mkdir()
    run(*git, "init", "-q")
    assert "must be at" in (wanted.problem(tmp_path) or "")
    (made / "a.py").write_text("a")
    run(*git, "add", ".")
    run(*git, "commit", "-q", "-m", "a")
    head = run(*git, "rev-parse", "HEAD").strip()
    assert head[:12] in (wanted.problem(tmp_path) or "")
    assert replace(wanted, commit=head).problem(tmp_path) is None
    (made / "a.py").write_text("b")
    assert "must be unchanged, a.py is not" in (
        replace(wanted, commit=head).problem(tmp_path) or ""
    )
    assert len(missing(tmp_path)) == len(CHECKOUTS)


def test_without_sources_the_commands_are_said(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SOURCES), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"checkouts.py {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr
    listed = run(sys.executable, SOURCES / "checkouts.py", tmp_path)
    for checkout in CHECKOUTS.values():
        assert f"github.com/{checkout.repository} {tmp_path / checkout.folder}" in listed
        assert f"checkout --detach {checkout.commit}" in listed


EQUAL = '{"case": "a", "ranks": 1, "new_tokens": 4, "equal": true, "error": 1e-7}'


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (f"print('noise'); print('{EQUAL}')", (1, 1)),
        (f"print('{EQUAL.replace('true', 'false')}'); raise SystemExit(1)", (1, 0)),
        (f"print('{EQUAL}'); raise KeyError('x')", "ended after 1 cases: KeyError: 'x'"),
        ("", "ended after 0 cases: no message"),
    ],
)
def test_an_engines_rows_are_counted_and_an_early_end_is_no_success(
    body, outcome, tmp_path, monkeypatch
):
    spec = spec_from_file_location("engines_in_sources", SOURCES / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (tmp_path / "script.py").write_text(body)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "PYTHON", sys.executable)
    engine = module.Engine("E", "script.py", {"nxd": "src"}, {1: ("a",)}, "models")
    if isinstance(outcome, str):
        with pytest.raises(RuntimeError, match=outcome):
            engine.run(tmp_path)
        return
    row = engine.run(tmp_path)
    assert (row["cases"], row["equal"]) == outcome
    assert f"tokens of {outcome[1]} of 1 cases equal" in module.said(row)
    assert row["sources"] == {CHECKOUTS["nxd"].repository: ["0.18.0", CHECKOUTS["nxd"].commit]}
