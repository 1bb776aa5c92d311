"""`judge`: a submitted kernel on a task's inputs, in a process of its own, as one score."""

from __future__ import annotations

import argparse
import difflib
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroncore.cli.console import show_table, stdout
from neuroncore.cli.parser import add_command
from neuroncore.hardware import resolve_target

if TYPE_CHECKING:
    from neuroncore.cli.files import FunctionPath
    from neuroncore.judge.task import KernelTask

_DESCRIPTION = """\
Judge a kernel: run it on a task's inputs and print whether its values and rules hold, its modelled
time next to that of our kernel (par), and one score: par's time over the kernel's, 0 where a value
or a rule is broken. The file's code runs in a process of its own, with limits. Exit code 1 at score
0."""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    description = "score a kernel on a task; time is modelled"
    example = "softmax kernel.py --json"
    command = add_command(commands, "judge", _judge, _show, description, example=example)
    command.description = _DESCRIPTION
    command.add_argument(
        "task", nargs="?", metavar="TASK", help="name, or FILE.py[:NAME] that makes Tasks"
    )
    command.add_argument(
        "kernel", nargs="?", metavar="KERNEL.py[:NAME]", help="one file; its code runs limited"
    )
    command.add_argument("--list", action="store_true", help="list the tasks")
    command.add_argument("--target", default="trn2", help="trn1, trn2 or trn3 (default: trn2)")
    command.add_argument(
        "--seed", type=int, default=0, help="of the values, with the program (default 0)"
    )
    for name, kind, value, text in (
        ("seconds", float, 60.0, "wall and CPU seconds of the process (default 60)"),
        ("bytes", int, 4 << 30, "address space of the process (default 4 GiB)"),
        (
            "instructions",
            int,
            100_000,
            "instructions and tensors of a core in one case (default 100,000)",
        ),
    ):
        command.add_argument(f"--max-{name}", type=kind, default=value, metavar="N", help=text)
    command.set_defaults(
        exit_code=lambda document: int("score" in document and document["score"] == 0)
    )


def _judge(options: argparse.Namespace) -> dict[str, Any]:
    from neuroncore import Budget
    from neuroncore.cli.files import reported
    from neuroncore.judge.judging import judge

    target = resolve_target(options.target).target
    if options.list:
        return _tasks(target)
    if options.kernel is None:
        raise ValueError("judge takes a TASK and a KERNEL.py; --list names the tasks")
    if options.seed < 0:
        raise ValueError(f"--seed must not be negative, got {options.seed}")
    limits = Budget(options.max_instructions, options.max_seconds, options.max_bytes)
    with reported(Path(options.task)):  # the task may be a file of the user's
        task, submission = _task(options.task), _submission(options.kernel)
        return judge(task, submission, target, options.seed, limits)


def _tasks(target: str) -> dict[str, Any]:
    from neuroncore.judge.judging import par_of
    from neuroncore.judge.tasks import TASKS

    par = par_of(target)
    listed = [
        {
            "name": task.name, "level": task.level, "text": task.text, "cases": list(task.cases),
            "lnc": task.lnc, "ranks": task.ranks, "par_ms": par.get(task.name),
        }
        for task in TASKS
    ]  # fmt: skip
    return {"modelled": True, "target": target, "tasks": listed}


def _task(text: str) -> KernelTask:
    from neuroncore.judge.task import KernelTask
    from neuroncore.judge.tasks import TASKS

    file, _, name = text.partition(":") if ".py:" in text else (text, "", "")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise ValueError(f"{file} is no file")
        made = {v.name: v for v in runpy.run_path(file).values() if isinstance(v, KernelTask)}
        if name not in made and (name or len(made) != 1):
            raise ValueError(
                f"{file} makes the tasks {', '.join(made) or 'none'}; name one of them"
            )
        return made[name] if name else next(iter(made.values()))
    known = {task.name: task for task in TASKS}
    if text not in known:
        close = difflib.get_close_matches(text, known, 3)
        meant = f"did you mean {' or '.join(close)}?" if close else "--list names them"
        raise ValueError(f"there is no task {text!r}; {meant}")
    return known[text]


def _submission(text: str) -> FunctionPath:
    from neuroncore.checks.lint_source import Sources
    from neuroncore.cli.files import FunctionPath, place_of, python_file

    if text.endswith(".py"):
        path = python_file(text)
        try:
            kernels = [kernel.name for _, kernel in Sources("0.7").read(str(path)).kernels()]
        except ValueError:
            kernels = [""]  # no Python: so says the process that compiles it
        if len(kernels) == 1:
            return FunctionPath(path, kernels[0])
    return place_of(text)


def _show(document: dict[str, Any]) -> None:
    if "tasks" in document:
        columns = ("level", "task", "what", "cases", "par, us (modelled)")
        rows = [
            (*map(t.get, ("level", "name", "text")), "; ".join(t["cases"]), _us(t["par_ms"] or []))
            for t in document["tasks"]
        ]
        show_table(columns, rows, left=columns[1:4])
        return
    for row in document["cases"]:
        if row["time_ms"] is None:
            continue
        low, high = row["time_range_ms"]
        times = f"{_us([[low, row['time_ms'], high]])} us, range {1e3 * low:.4g}-{1e3 * high:.4g}"
        par = f", par {_us([row['par_ms']])}" if row["par_ms"] else ""
        stdout.print(f"{row['case']}: {times}{par} (modelled), bound by {row['bound']}")
        stdout.print(f"  {row['what_would_help']}")
    score, ends = document["score"], document["score_range"]
    if document["problem"]:
        stdout.print(f"problem: {document['problem']}")
    between = f" ({ends[0]:.3f} to {ends[1]:.3f} over what is not known)" if ends else ""
    stdout.print(f"score {'none: no par' if score is None else f'{score:.3f}'}{between}")


def _us(times: list[list[float]]) -> str:
    return ", ".join(f"{1e3 * time:.4g}" for _, time, _ in times)
