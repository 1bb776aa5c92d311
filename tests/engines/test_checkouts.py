"""Which commits of the engines' sources are taken, and what is said where they are not there."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
    run(*git, "commit", "-q", "--allow-empty", "-m", "a")
    head = run(*git, "rev-parse", "HEAD").strip()
    assert head[:12] in (wanted.problem(tmp_path) or "")
    assert replace(wanted, commit=head).problem(tmp_path) is None
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
