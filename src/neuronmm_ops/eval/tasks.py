"""lm-eval's tasks on a loaded model."""

import contextlib
import copy
import functools
import io
import json
import math
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from neuronmm_ops.compress.calibrate import Progress
from neuronmm_ops.compress.running import eval_mode
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.eval.extra import import_quietly, quiet, reason
from neuronmm_ops.eval.protocols import check_name

PAPER_TASKS = (
    *("openbookqa", "winogrande", "piqa", "hellaswag"),
    *("arc_easy", "arc_challenge", "mathqa"),
)

# Resampled means behind a perplexity's standard error, which is off by 1/sqrt(2 * 1000) then;
# lm-eval's 100,000 take a pool of processes. Accuracies have a closed form.
_BOOTSTRAPS = 1000

# What lm-eval raises where a task does not fit its data.
_BAD_TASK = (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError)


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    include_path: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run tasks of lm-eval's harness on a loaded causal LM.

    As lm-eval does, this seeds the generators of Python, NumPy and torch.

    Args:
        model: a Transformers causal LM, compressed or not.
        tokenizer: its tokenizer; not changed.
        tasks: names of tasks, groups or tags.
        num_fewshot: examples before each question; default the task's own number. A task that
            says 0 keeps it.
        limit: documents of each task, from the first; default all.
        batch_size: requests in a forward pass.
        include_path: a directory of task files, which are looked at first.
        progress: called with ("evaluate tasks", requests done, requests in all).

    Returns:
        The document that lm-eval writes: `results` by task, `configs`, `versions`, `n-shot`,
        `n-samples`, `config`, ... In `config`, `truncated_requests` says how many contexts were
        cut to the model's limit.

    Raises:
        ValueError: a task is unknown, its files or its data set are not to be had or malformed, a
            number is too small, or the tokenizer has neither BOS nor EOS.
        NonFiniteError: logits, or a metric, are NaN or Inf.
        ImportError: the extra `eval` is not installed.
    """
    _check_numbers(num_fewshot, limit, batch_size)
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path must be a directory of task files, got {include_path}")
    harness, evaluator = (
        import_quietly("neuronmm_ops.eval.harness"),
        import_quietly("lm_eval.evaluator"),
    )
    told = _heard(progress)
    with _talking_to_nobody(), eval_mode(model):
        # lm-eval gives the tokenizer a pad token.
        lm = harness.Harness(model, copy.deepcopy(tokenizer), told, batch_size=batch_size)
        manager = manager_of(tasks, include_path)
        loaded = [each for name in tasks for each in _load(manager, name)]
        try:
            results = evaluator.simple_evaluate(
                lm,
                tasks=loaded,
                task_manager=manager,
                num_fewshot=num_fewshot,
                batch_size=batch_size,
                limit=limit,
                bootstrap_iters=_BOOTSTRAPS,
                log_samples=False,
            )
        except NonFiniteError:
            raise
        except (*_BAD_TASK, import_quietly("jinja2").TemplateError) as error:
            raise ValueError(
                f"tasks {', '.join(tasks)} cannot be run ({reason(error)}); correct the task "
                "files, or ask for fewer shots"
            ) from error
    if results is None:  # what lm-eval gives every process of a launcher but the first
        raise ValueError("tasks run in one process, got LOCAL_RANK > 0; start without a launcher")
    results["config"]["truncated_requests"] = lm.truncated
    serialize = import_quietly("lm_eval.utils").handle_non_serializable
    document: dict[str, Any] = json.loads(json.dumps(results, default=serialize))
    _check_finite(document["results"])
    return document


def task_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of `run_tasks` as rows: `task`, `n_shot`, `samples`, `metric`, `filter`,
    `value`, `stderr` (None where lm-eval has none)."""
    rows: list[dict[str, Any]] = []
    for task, metrics in document["results"].items():
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{filter_name}")
            rows.append(
                {
                    "task": task,
                    "n_shot": document["n-shot"].get(task),
                    "samples": document["n-samples"].get(task, {}).get("effective"),
                    "metric": metric,
                    "filter": filter_name,
                    "value": value,
                    "stderr": stderr if isinstance(stderr, float) else None,
                }
            )
    return rows


def _check_numbers(num_fewshot: int | None, limit: int | None, batch_size: int) -> None:
    least = {"num_fewshot": (num_fewshot, 0), "limit": (limit, 1), "batch_size": (batch_size, 1)}
    for name, (value, smallest) in least.items():
        if value is not None and value < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {value}")


def manager_of(tasks: Sequence[str], include_path: str | Path | None) -> Any:
    """Return lm-eval's index of tasks.

    Raises:
        ValueError: it does not hold all of the names, or none is given.
    """
    if not tasks:
        raise ValueError(f"give at least one task, such as {', '.join(PAPER_TASKS)}")
    make = import_quietly("lm_eval.tasks").TaskManager
    if include_path is not None:
        # lm-eval's own files are many: reading them takes seconds, so only where they are needed.
        manager = make(include_path=str(include_path), include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return manager
        _check_files(set(tasks) - set(manager.all_tasks), Path(include_path))
    manager = _own_tasks() if include_path is None else make(include_path=str(include_path))
    for name in tasks:
        check_name("task", name, manager.all_tasks)
    return manager


@functools.cache
def _own_tasks() -> Any:
    return import_quietly("lm_eval.tasks").TaskManager()


def _check_files(unknown: set[str], folder: Path) -> None:
    """Raise ValueError where a task that lm-eval does not know has a file after all."""
    for name in sorted(unknown):
        if (folder / f"{name}.yaml").is_file():
            raise ValueError(f"{folder / name}.yaml defines no task {name}; correct the file")


def _load(manager: Any, name: str) -> list[Any]:
    """Return the group, or the tasks, of a name, with their data sets."""
    try:
        loaded = manager.load([name])
    except Exception as error:  # task files and data sets raise anything
        raise ValueError(_why_not(name, error)) from error
    groups = loaded.get("groups", {})
    return [groups[name]] if name in groups else list(loaded["tasks"].values())


def _why_not(name: str, error: Exception) -> str:
    # `datasets` raises ConnectionError, or FileNotFoundError for what the hub and its cache lack.
    if isinstance(error, ConnectionError):
        return (
            f"the data set of task {name} is neither cached nor to be had from the hub "
            f"({reason(error)}); run the task once where the hub can be reached and copy "
            "HF_HOME, or give task files of local data with --include-path"
        )
    return (
        f"task {name} cannot be loaded ({reason(error)}); correct its task file, or the files "
        "that it names"
    )


def _check_finite(results: dict[str, dict[str, Any]]) -> None:
    for task, metrics in results.items():
        for key, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise NonFiniteError(f"{key} of task {task} must be finite, got {value}")


@contextlib.contextmanager
def _talking_to_nobody() -> Generator[None, None, None]:
    """Silence lm-eval and what it uses: logs, warnings, prints, and every bar of tqdm's."""
    bar, evaluator = import_quietly("tqdm").tqdm, import_quietly("lm_eval.evaluator")
    begin = bar.__init__

    def begin_hidden(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **{**named, "disable": True})

    with (
        patch.object(bar, "__init__", begin_hidden),
        # It would run git, whose repository here is the caller's and not lm-eval's.
        patch.object(evaluator, "get_git_commit_hash", lambda: None),
        # It would fork: its processes would inherit this one's signal handlers.
        patch.dict(os.environ, DISABLE_MULTIPROC="1"),
        quiet(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        yield


def _heard(progress: Progress | None) -> Progress | None:
    """Return the function with the stdout of now."""
    stdout = sys.stdout

    def tell(stage: str, done: int, total: int) -> None:
        assert progress is not None
        with contextlib.redirect_stdout(stdout):
            progress(stage, done, total)

    return tell if progress else None
