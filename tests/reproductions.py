"""A tiny model, a text, a task and the TOML file of a reproduction of them."""

import json
from pathlib import Path

from tiny import tiny_directory

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 100
TASK = """task: colours
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
metadata:
  version: 1
"""
FILE = """title = "Tiny | <b>models</b>"
[model]
id = "{root}/dense"
[compress]
ratios = [0.3]
block = 8
calibration = "{root}/text.txt"
samples = 8
seqlen = 64
[methods.svd-llm]
method = "whiten"
allocation = "uniform"
[methods.plain]
method = "plain"
[evaluate]
texts = ["{root}/text.txt"]
seqlen = 64
"""
WITH_TASK = 'tasks = ["colours"]\ninclude = "{root}/tasks"\n'


def workplace(root: Path) -> Path:
    """Write model, text, task and `paper.toml` into an existing directory; return the last."""
    tiny_directory(root / "dense")
    (root / "text.txt").write_text(TEXT)
    (root / "tasks").mkdir()
    rows = [
        {"question": f"Number {n}:", "choices": ["red", "green", "blue"], "answer": n % 3}
        for n in range(6)
    ]
    data = root / "colours.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "tasks" / "colours.yaml").write_text(TASK.format(data=data))
    path = root / "paper.toml"
    path.write_text(FILE.format(root=root))
    return path
