"""`python neuroncore/tasks [NAME ...]`: judge every kernel here, and write par and the baselines.

Names of tasks or files judge these alone, print them and write nothing. The kernels of
`kernels/own.py` need neuronmm-ops. The baselines are those of the first target.
"""

import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import neuroncore
from neuroncore.checks.lint_source import Sources
from neuroncore.cli.files import FunctionPath
from neuroncore.judge import judging
from neuroncore.judge.task import KernelTask
from neuroncore.judge.tasks import TASKS

HERE = Path(__file__).parent
TARGETS = ("trn2", "trn3")
GRADES = ("naive", "tiled")
MARKS = "<!-- baselines: written by `python neuroncore/tasks` -->", "<!-- /baselines -->"


def kernels() -> list[tuple[KernelTask, str, Path, str]]:
    """Task, grade, file and name of each kernel: `softmax_naive` is the naive one of softmax."""
    tasks = {task.name: task for task in TASKS}
    found: list[tuple[KernelTask, str, Path, str]] = []
    for path in sorted((HERE / "kernels").glob("*.py")):
        for _, kernel in Sources("0.7").read(str(path)).kernels():
            name, _, end = kernel.name.rpartition("_")
            grade = end if end in GRADES else "own" if path.stem == "own" else "best"
            found.append((tasks[name if end in GRADES else kernel.name], grade, path, kernel.name))
    return found


def judged(task: KernelTask, path: Path, name: str, target: str) -> dict:
    """The judge's document; a kernel of ours that breaks something ends this program."""
    limits = replace(judging.LIMITS, seconds=300.0)
    document = judging.judge(task, FunctionPath(path, name), target, 0, limits)
    if document["problem"]:
        sys.exit(f"{path.name}:{name} on {target}: {document['problem']}")
    print(f"{target} {path.name}:{name}", [case["time_ms"] for case in document["cases"]])
    return document


def times(document: dict) -> list[list[float]]:
    """Least, assumed and greatest ms of each case."""
    ends = [(case["time_range_ms"], case["time_ms"]) for case in document["cases"]]
    return [[low, time, high] for (low, high), time in ends]


def main() -> None:
    """Judge, and write."""
    every = kernels()
    if sys.argv[1:]:
        for task, _, path, name in every:
            if {task.name, path.stem} & set(sys.argv[1:]):
                print(judged(task, path, name, TARGETS[0])["score"])
        return
    par: dict[str, dict[str, list[list[float]]]] = {}
    rows: list[dict] = []
    for target in TARGETS:
        among = [k for k in every if target == TARGETS[0] or k[1] not in GRADES]
        found = [(*kernel, times(judged(kernel[0], *kernel[2:], target))) for kernel in among]
        best = {task.name: ms for task, grade, _, _, ms in found if grade == "best"}
        par[target] = best | {task.name: ms for task, grade, _, _, ms in found if grade == "own"}
        rows = rows or [
            row(task, grade, f"{path.name}:{name}", ms, par[target][task.name])
            for task, grade, path, name, ms in found
        ]
    sources = b"".join(path.read_bytes() for path in sorted((HERE / "kernels").glob("*.py")))
    made_by = {
        "neuroncore": neuroncore.__version__,
        "kernels": hashlib.sha256(sources).hexdigest()[:16],
    }
    write(judging.PAR, {**made_by, "targets": par})
    write(
        HERE / "baselines.json", {"modelled": True, "target": TARGETS[0], **made_by, "rows": rows}
    )
    readme = HERE / "README.md"
    pattern = f"{re.escape(MARKS[0])}.*{re.escape(MARKS[1])}"
    text = f"{MARKS[0]}\n\n{table(rows)}\n{MARKS[1]}"
    readme.write_text(re.sub(pattern, lambda _: text, readme.read_text(), flags=re.DOTALL))


def row(task: KernelTask, grade: str, kernel: str, ms: list, par: list) -> dict:
    """A row of the baselines."""
    cases = [
        {"time_range_ms": [low, high], "time_ms": time, "par_ms": best}
        for (low, time, high), best in zip(ms, par, strict=True)
    ]
    score, *ends = judging.score_of(cases)
    return {"task": task.name, "grade": grade, "kernel": kernel, "score": score,
            "score_range": ends, "times_ms": ms}  # fmt: skip


def table(rows: list[dict]) -> str:
    """A line a task: the score of each grade."""
    lines = ["| level | task | naive | tiled | best | own | par, us (modelled) |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for task in sorted(TASKS, key=lambda task: task.level):
        found = {row["grade"]: row for row in rows if row["task"] == task.name}
        scores = [
            f"{found[g]['score']:.2f}" if g in found else "" for g in (*GRADES, "best", "own")
        ]
        best = found.get("own") or found["best"]
        us = ", ".join(f"{1e3 * time:.1f}" for _, time, _ in best["times_ms"])
        lines.append(f"| {task.level} | `{task.name}` | {' | '.join(scores)} | {us} |")
    return "\n".join(lines) + "\n"


def write(path: Path, document: dict) -> None:
    """As JSON, the numbers of a list on one line."""
    text = json.dumps(document, indent=1)
    text = re.sub(r"\[\s+([-\d.e,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    path.write_text(text + "\n")


if __name__ == "__main__":
    main()
