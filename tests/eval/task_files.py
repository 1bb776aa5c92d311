"""Task files of lm-eval, and data in the formats of the papers' tasks, a few rows each."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval

OWN_TASKS = Path(lm_eval.__file__).parent / "tasks"
LETTERS = ("A", "B", "C", "D")

# Where lm-eval keeps the task, and rows as its data set has them.
PAPER_DATA: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "arc_easy": (
        "arc/arc_easy.yaml",
        [
            {
                "question": f"Which of these has {n} legs?",
                "choices": {"text": ["a spider", "a cat", "a snail", "a stone"], "label": LETTERS},
                "answerKey": LETTERS[n % 4],
            }
            for n in range(5)
        ],
    ),
    "openbookqa": (
        "openbookqa/openbookqa.yaml",
        [
            {
                "question_stem": f"In {n} days the sun will",
                "choices": {"text": ["rise", "stop for good", "wait", "cool"], "label": LETTERS},
                "answerKey": f" {LETTERS[n % 2]}",
            }
            for n in range(4)
        ],
    ),
    "winogrande": (
        "winogrande/default.yaml",
        [
            {
                "sentence": f"The cup fell on the mat {n} times, and _ broke soon.",
                "option1": "the cup",
                "option2": "the mat",
                "answer": str(1 + n % 2),
            }
            for n in range(4)
        ],
    ),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        [
            {
                "ctx_a": f"A man opens {n} doors.",
                "ctx_b": "he",
                "activity_label": "Opening",
                "endings": ["walks in.", "flies [title] away.", "sings.", "melts."],
                "label": str(n % 4),
            }
            for n in range(4)
        ],
    ),
    "piqa": (
        "piqa/piqa.yaml",
        [
            {"goal": f"boil {n} eggs", "sol1": "use hot water", "sol2": "use a pen", "label": n % 2}
            for n in range(4)
        ],
    ),
    "mathqa": (
        "mathqa/mathqa.yaml",
        [
            {
                "Problem": f"what is {n} plus one ?",
                "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) none of these",
                "correct": "abcde"[n],
            }
            for n in range(3)
        ],
    ),
}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_task(folder: Path, name: str, rows: Sequence[dict[str, Any]], text: str) -> None:
    """Write a task on local rows, also its training data: `text` is the rest of its file."""
    data = write_rows(folder / f"{name}.jsonl", rows)
    (folder / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_name: null\ndataset_kwargs:\n"
        f"  data_files:\n    test: {data}\n    train: {data}\ntest_split: test\n{text}",
        encoding="utf-8",
    )


def write_paper_task(folder: Path, name: str) -> str:
    """Write one of lm-eval's own tasks with local rows in its data's format; return its name."""
    file, rows = PAPER_DATA[name]
    own = f"include: {OWN_TASKS / file}\ntraining_split: null\nvalidation_split: null\n"
    write_task(folder, f"local_{name}", rows, own)
    return f"local_{name}"
