"""`python -m benchmarks.library CLONE PATH...`: what others published, run and counted.

A path is a folder or file of pytest tests, run through `plugin`; or, with `--scripts`, a script
that runs as `neuroncore run` runs it, and is right if it exits with 0 and reports no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.library import mend

ROOT = Path(__file__).parents[2]
_ENDS = (0, 1, 5)  # pytest: passed, failed, no tests
_DIFFERS = re.compile(r"\b(differ|failed|mismatch)\b|matches\? False", re.IGNORECASE)


def main() -> int:
    """Run one part of one repository, print its counts, and put them into the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.library", description=__doc__)
    parser.add_argument("clone", type=Path, help="a clone of the repository; a copy of it runs")
    parser.add_argument("paths", nargs="+", help="tests or scripts in it")
    parser.add_argument("--scripts", action="store_true", help="the paths are scripts")
    parser.add_argument("--target", default="trn2", help="trn2 or trn3 (default: %(default)s)")
    parser.add_argument("--cases", type=int, help="cases of each test, evenly spread (default all)")
    parser.add_argument("--seconds", type=int, default=40, help="CPU time of a case (default 40)")
    parser.add_argument("--table", type=Path, help="JSON file; the row of these paths is replaced")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(options.clone, copy, ignore=shutil.ignore_patterns(".git"))
        results = _scripts(copy, options) if options.scripts else _tests(copy, options)
    if not results:
        sys.exit("no case ran; what pytest printed says why")
    row = _row(options, results)
    print(json.dumps(row, indent=2))
    if options.table:
        rows = json.loads(options.table.read_text()) if options.table.exists() else []
        same = ("repository", "paths", "target")
        rows = [old for old in rows if any(old[name] != row[name] for name in same)]
        options.table.write_text(json.dumps([*rows, row], indent=2) + "\n")
    return int(row["outcomes"].get("wrong", 0) > 0)


def _run(copy: Path, target: str, command: list[str], **options: Any) -> Any:
    """A command of this Python in the copy, whose modules it finds."""
    path = os.pathsep.join(map(str, (copy, copy / "src", ROOT, ROOT / "neuroncore/src")))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": target}
    whole = [sys.executable, *command]
    environment = {**os.environ, **own}
    return subprocess.run(whole, env=environment, check=False, **options)  # noqa: S603 - ours


def _tests(copy: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each case that pytest ran."""
    mend(copy / "src/nkilib_src/nkilib/core/mlp/mlp.py")
    results = copy.parent / "results"
    command = [
        *["-m", "pytest", "-q", "--continue-on-collection-errors", "--assert=plain"],
        *["-p", "no:cacheprovider", "-p", "benchmarks.library.plugin", "--rootdir", "."],
        f"--library-results={results}", f"--library-seconds={options.seconds}",
        f"--library-cases={options.cases or 0}",
    ]  # fmt: skip
    if (copy / "test/pytest.ini").exists():  # nki-library
        command += ["-c", "test/pytest.ini", f"--platform-target={options.target}"]
    results.touch()
    before, ended = -1, False
    while not ended and results.stat().st_size > before:  # an error of pytest's own ends a run
        before = results.stat().st_size
        run = [*command, *options.paths]
        ended = _run(copy, options.target, run, cwd=copy, stdout=sys.stderr).returncode in _ENDS
    return [json.loads(line) for line in results.read_text().splitlines()]


def _scripts(copy: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each script; `A.py+B.py` is A with B in the place that it has for a solution."""
    results: list[dict[str, Any]] = []
    for name in options.paths:
        script, *solution = [copy / part for part in name.split("+")]
        for part in solution:
            text = script.read_text().replace("# SUBSTITUTE HERE", part.read_text())
            script.write_text(text)
        limit = f"import resource as r, runpy; r.setrlimit(r.RLIMIT_CPU, ({options.seconds},) * 2)"
        run = ["-c", limit + "; runpy.run_module('neuroncore', run_name='__main__')", script.name]
        done = _run(copy, options.target, run, cwd=script.parent, capture_output=True, text=True)
        why = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("neuroncore: ")
        differs = [line for line in done.stdout.splitlines() if _DIFFERS.search(line)]
        if done.returncode < 0:
            outcome, why = "too big", f"longer than {options.seconds} CPU seconds"
        elif differs:
            outcome, why = "wrong", differs[-1]
        elif done.returncode == 0:
            outcome = "right"
        else:
            outcome = "other" if re.match(r"\w+Error: ", why) else "refused"
        results.append({"case": name, "outcome": outcome, "why": why})
    return results


def _row(options: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of a part, and why what is not right is not, with one case of each."""
    # a folder without a history of its own would answer with that of the repository around it
    git = ["git", f"--git-dir={options.clone}/.git", "rev-parse", "HEAD"]
    done = subprocess.run(git, check=False, capture_output=True, text=True)  # noqa: S603 - ours
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result["outcome"] not in ("right", "no values", "refused as expected", "skipped"):
            why = re.sub(r"\d+", "N", result["why"])[:200]
            reasons.setdefault((result["outcome"], why), []).append(result["case"])
    return {
        "repository": options.clone.resolve().name,
        "commit": done.stdout.strip() if done.returncode == 0 else None,
        "paths": options.paths,
        "target": options.target,
        "cases_of_a_test": options.cases,
        "cpu_seconds_of_a_case": options.seconds,
        "cases": len(results),
        "outcomes": dict(Counter(result["outcome"] for result in results)),
        "reasons": [
            {"outcome": outcome, "why": why, "cases": len(cases), "first": cases[0]}
            for (outcome, why), cases in reasons.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
