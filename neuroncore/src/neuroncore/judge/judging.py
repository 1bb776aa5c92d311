"""From a task and a file to a score: the submission gives a program, and all else is done here.

The values are drawn when the program is known, from a seed and the program's own bytes. So none of
it can depend on them.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from neuroncore import Budget, NkiValidationError, Profile, lint
from neuroncore import kernel as kernels
from neuroncore.boundary import PerRank
from neuroncore.checks.base import PACKAGE
from neuroncore.cli.console import one_line
from neuroncore.cli.files import FunctionPath
from neuroncore.documents import read_document, read_json
from neuroncore.dtypes import from_numpy
from neuroncore.judge.program import replayed
from neuroncore.judge.task import TOLERANCES, KernelTask, TaskCase

PAR = Path(__file__).with_name("par.json")
LIMITS = Budget(instructions=100_000, seconds=60.0, bytes=4 << 30)
"""Of a submission: instructions and tensors of a core in one case, wall and CPU seconds, bytes of
address space."""
_ANSWER_BYTES = 32 << 20
_DIGITS = 6
_ROW = (
    *("refused", "wrong", "warnings", "error_share", "time_ms", "time_range_ms", "bound"),
    *("what_would_help", "instructions", "hbm_bytes"),
)
"""What a document has of each case, None where the kernel did not run."""


@cache
def par_of(target: str) -> dict[str, list[list[float]]]:
    """By task, for each case the least, the assumed and the greatest modelled ms of our kernel."""
    return read_json(PAR)["targets"].get(target, {})


def judge(
    task: KernelTask, submission: FunctionPath, target: str, seed: int, limits: Budget
) -> dict[str, Any]:
    """Judge a kernel; returns a document of plain types.

    `score` is that of `score_of`, 0 where a value or a rule is broken, and None without a par.
    Raises OSError or ValueError for a file that cannot be read.
    """
    cases = [TaskCase(text) for text in task.cases]
    try:
        source = read_document(submission.path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{submission.path.name} is no text: {error}") from error
    request = {
        "file": submission.path.name, "source": source,
        "name": submission.name, "target": target, "lnc": task.lnc, "ranks": task.ranks,
        "cases": [task.shapes(case) for case in cases], **asdict(limits),
    }  # fmt: skip
    programs = list(_programs(request, limits))
    drawn = json.dumps([seed, target, task.name, programs], sort_keys=True).encode()
    digest = hashlib.sha256(drawn).digest()
    par = par_of(target).get(task.name, [])
    rows: list[dict[str, Any]] = []
    for at, (case, program) in enumerate(zip(cases, programs, strict=True)):
        random = np.random.default_rng([at, *digest])
        row = _run(task, case, program, random, target, limits)
        rows.append({"case": case.text, **row, "par_ms": par[at] if par else None})
    findings = [asdict(finding) for finding in _findings(submission.path)]
    problems = [row["refused"] or row["wrong"] for row in rows]
    problems += [f"{f['rule']}: {f['message']} [line {f['line']}]" for f in findings]
    problem = next(filter(None, problems), None)
    score, *ends = score_of(rows) if par and not problem else [None]
    return {
        "modelled": True, "task": task.name, "level": task.level,
        "kernel": str(submission), "target": target, "seed": seed,
        "score": 0.0 if problem else score, "score_range": ends or None, "problem": problem,
        "legal": not findings and not any(row["refused"] for row in rows),
        "correct": not any(row["refused"] or row["wrong"] for row in rows),
        "findings": findings, "values_drawn_from": digest.hex(), "cases": rows,
    }  # fmt: skip


def score_of(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
    """The score of cases that are right, and the least and the greatest at known ends.

    Each is the geometric mean of par's time over the kernel's: in the middle of their ranges, and
    with all at the least, at the assumed, or at the greatest of what is not known.
    """
    ratios: list[list[float]] = []
    for row in rows:
        low, high = row["time_range_ms"]
        par_low, par, par_high = row["par_ms"]
        middle = math.sqrt(par_low * par_high / low / high)
        ratios.append([middle, par_low / low, par / row["time_ms"], par_high / high])
    means = [_rounded(math.prod(r) ** (1 / len(r))) for r in zip(*ratios, strict=True)]
    return means[0], min(means), max(means)


def _findings(path: Path) -> list[Any]:
    try:
        return [finding for finding in lint(path) if finding.severity == "error"]
    except ValueError:  # no Python: so says the process that runs it
        return []


def _run(
    task: KernelTask,
    case: TaskCase,
    program: Any,
    random: np.random.Generator,
    target: str,
    limits: Budget,
) -> dict[str, Any]:
    """Run a program on the values that it now gets; its row of the document."""
    row: dict[str, Any] = dict.fromkeys(_ROW)
    try:
        if "refused" in program:
            return {**row, "refused": one_line(program["refused"])}
        row["warnings"] = [one_line(text) for text in program["warnings"]]
        values = task.values(case, random)
        inputs = [PerRank(v) if task.ranks else v[0] for v in copy.deepcopy(values).values()]
        budget = Budget(seconds=limits.seconds, bytes=limits.bytes)  # steps were counted
        settings = kernels.RunSettings(target, ranks=task.ranks, budget=budget)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = replayed(program, task.inputs, task.lnc)
            done = kernels.run(kernel, tuple(inputs), {}, settings)
    except NkiValidationError as error:
        return {**row, "refused": one_line(error)}
    except Exception as error:  # of what is no program: it may raise anything
        return {**row, "refused": one_line(f"no program: {type(error).__name__}: {error}")}
    outputs = done.outputs if task.ranks else (done.outputs,)
    error, wrong = _compared(task, case, outputs, task.expected(case, values))
    profile: Profile = done.profile
    low, high = profile.time_range_ms
    return {
        **row, "wrong": wrong, "error_share": error and _rounded(error),
        "time_ms": _rounded(profile.time_ms), "time_range_ms": [_rounded(low), _rounded(high)],
        "bound": profile.bound, "what_would_help": profile.what_would_help,
        "instructions": profile.instructions, "hbm_bytes": profile.hbm_bytes,
    }  # fmt: skip


@np.errstate(all="ignore")
def _compared(
    task: KernelTask, case: TaskCase, outputs: Any, expected: list[list[Any]]
) -> tuple[float | None, str | None]:
    """The largest error as a share of what is allowed, and what is wrong, if anything."""
    worst = 0.0
    for rank, (got, exact) in enumerate(zip(outputs, expected, strict=True)):
        where = f" of rank {rank}" if task.ranks else ""
        if len(got) != len(exact):
            return None, f"it returns {len(got)} tensors{where}; the task has {len(exact)}"
        for i, (a, e, dtype) in enumerate(zip(got, exact, task.outputs, strict=True)):
            actual, asked = from_numpy(a.dtype), dtype or case.dtype
            if actual != asked or a.shape != e.shape:
                seen = f"{actual} {list(a.shape)}, it must be {asked} {list(e.shape)}"
                return None, f"output {i}{where} is {seen}"
            difference = np.abs(a.astype(np.float64) - e)
            size = np.abs(e) + np.sqrt(np.mean(np.square(e, dtype=np.float64)))
            limit = max(TOLERANCES[case.dtype], TOLERANCES.get(actual, 0.0))
            allowed = limit * size if actual.is_float else 0.5
            share = float(np.max(np.where(difference == 0, 0.0, difference / allowed)))
            if not share <= 1:
                at = np.unravel_index(np.argmax(np.nan_to_num(difference, nan=np.inf)), e.shape)
                seen = f"{a[at]!s} for {e[at]:.6g} at {[int(n) for n in at]}"
                return (share if math.isfinite(share) else None), f"output {i}{where} has {seen}"
            worst = max(worst, share)
    return worst, None


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


# --- the process of the submission


def _programs(request: dict[str, Any], limits: Budget) -> Iterator[Any]:
    """What the submission's process answers for each case, or why it does not."""
    root = str(Path(PACKAGE).parent)
    here = os.path.realpath(".")
    path = [root, *[p for p in sys.path if p and os.path.realpath(p) not in (here, root)]]
    folders = [*path, *sysconfig.get_paths().values()]
    answers, problem = _ask({**request, "path": path, "folders": folders}, limits)
    for at in range(len(request["cases"])):
        try:
            yield json.loads(answers[at]) if answers[at] else {"refused": problem}
        except (ValueError, RecursionError):
            yield {"refused": "its process sent what is no program"}
        except IndexError:
            yield {"refused": problem}


def _ask(request: dict[str, Any], limits: Budget) -> tuple[list[bytes], str]:
    """Lines that the process writes, and why it ended before it had written all."""
    command = [sys.executable, "-s", "-B", str(Path(__file__).with_name("child.py"))]
    environment = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    answer, end, problem = bytearray(), time.monotonic() + limits.seconds, ""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as asked:
        asked.write(json.dumps(request).encode())
        asked.seek(0)
        process = subprocess.Popen(  # noqa: S603 - this Python, and this package's file
            command, stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
            env=environment, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            while not problem:
                left = end - time.monotonic()
                if left < 0 or not select.select([process.stdout], [], [], left)[0]:
                    problem = f"it ran for more than {limits.seconds:g} s and was stopped"
                elif not (chunk := os.read(process.stdout.fileno(), 1 << 20)):
                    break
                elif len(answer := answer + chunk) > _ANSWER_BYTES:
                    problem = f"its program is larger than {_ANSWER_BYTES >> 20} MiB"
            if not problem:
                process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            problem = "its process closed its output and went on"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            code = process.wait()
    if not problem and code == -signal.SIGXCPU:
        problem = f"it used more than {limits.seconds:g} CPU seconds and was stopped"
    how = f"by signal {-code}" if code < 0 else f"with code {code}"
    return bytes(answer).split(b"\n"), problem or f"its process ended {how} without a program"
