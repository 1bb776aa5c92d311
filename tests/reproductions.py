"""A tiny model, a text, a task and the TOML file of a reproduction of them."""

import json
from pathlib import Path

from tiny import tiny_directory

TEXT = "The quick brown fox jumps over the lazy dog. 0123456789\n" * 100
TASK = """task: {name}
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
{metrics}
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

# What is put in the place of a text of `FILE` whose root is ".", and words of the refusal.
MISTAKES: dict[str, tuple[str, ...]] = {
    "no TOML": ("[model]", "[model", "paper.toml"),
    "published unknown": ("title =", 'published = "Nope-1B"\ntitle ='),
    "title a number": ("title =", "title = 3 #"),
    "data nowhere": ("title =", 'data = "nowhere"\ntitle ='),
    "unknown key": ("title =", "titel ="),
    "unknown table": ("[compress]", "[compres]", "unknown key 'compres'", "compress"),
    "unknown table of a model": ("[model]", "[modell]", "unknown key 'modell'", "model"),
    "unknown key of a table": ("ratios =", "ratio =", "unknown key of compress 'ratio'", "ratios"),
    "device outside of the model": ("[model]", 'device = "x"\n[model]', "unknown key 'device'"),
    "model nowhere": ('id = "./dense"', 'id = "./absent"', "absent is no directory"),
    "model with escapes": ('id = "./dense"', 'id = "\\u001b[31m"'),
    "model a text file": ('id = "./dense"', 'id = "text.txt"'),
    "device": ('id = "./dense"', 'id = "dense"\ndevice = "toaster"', "device must be cpu"),
    "device not there": ('id = "./dense"', 'id = "dense"\ndevice = "cuda:7"'),
    "dtype": ('id = "./dense"', 'id = "dense"\ndtype = "int3"'),
    "ratios a text": ("ratios = [0.3]", 'ratios = "0.2"'),
    "ratios of texts": ("ratios = [0.3]", 'ratios = ["0.2"]'),
    "ratios empty": ("[0.3]", "[]", "compress.ratios", "must not be empty"),
    "ratios nan": ("[0.3]", "[nan]", "ratio must be in (0, 1)", "nan"),
    "ratios twice": ("[0.3]", "[0.3, 0.3]", "compress.ratios must not hold a value twice"),
    "ratios beyond": ("[0.3]", "[0.3, 1.5]", "ratio must be in (0, 1)", "1.5"),
    "block": ("block = 8", "block = 12", "methods.svd-llm", "multiple of 8, got 12"),
    "block a truth": ("block = 8", "block = true", "compress.block must be an integer", "True"),
    "block huge": ("block = 8", "block = 99999999999999999999"),
    "samples": ("samples = 8", "samples = 0"),
    "samples a text": ("samples = 8", 'samples = "8"', "compress.samples must be an int", "'8'"),
    "seqlen": ("seqlen = 64\n[methods", "seqlen = 0\n[methods"),
    "storage": ("block = 8", 'block = 8\nstorages = ["fp4"]', "unknown storage 'fp4'", "fp8"),
    "storage of another dtype": ("block = 8", 'block = 8\nstorages = ["bf16"]'),
    "targets": ("block = 8", 'block = 8\ntargets = ["nothing"]'),
    "targets a bomb": ("block = 8", "block = 8\ntargets = ['([a-z0-9_.]+)+X']"),
    "text nowhere": ('n = "./text.txt"', 'n = "no.txt"', "compress.calibration: cannot read"),
    "text a device": ('calibration = "./text.txt"', 'calibration = "/dev/zero"'),
    "method unknown": ('"whiten"', '"whitten"', "methods.svd-llm: method must be one of"),
    "method named nothing": ("[methods.plain]", '[methods.""]'),
    "method named ../../x": ("[methods.plain]", '[methods."../../x"]'),
    "method with escapes": ("[methods.plain]", '[methods."\\u001b[31mx"]'),
    "method named dense": ("[methods.plain]", "[methods.dense]"),
    "methods equal": ("[methods.plain]", '[methods.other]\nmethod = "plain"\n[methods.plain]'),
    "methods none": (FILE[FILE.index("[methods.svd") : FILE.index("[eval")], "[methods]\n"),
    "tasks unknown": ("[evaluate]", '[evaluate]\ntasks = ["no_such"]', "unknown task", "no_such"),
    "tasks a path": ("[evaluate]", '[evaluate]\ntasks = ["../../x.yaml"]'),
    "include nowhere": ("[evaluate]", '[evaluate]\ninclude = "no"', "include no is no directory"),
    "texts nowhere": ('texts = ["./text.txt"]', 'texts = ["nowhere.txt"]'),
    "texts unknown": ('texts = ["', 'texts = ["wikitext", "', "unknown text of evaluate.texts"),
    "limit": ("[evaluate]", "[evaluate]\nlimit = 0", "evaluate.limit must be at least 1"),
    "batch size": ("[evaluate]", "[evaluate]\nbatch_size = -1"),
    "protocol": ("[evaluate]", '[evaluate]\nprotocol = "x"', "one of standard, svd-llm"),
    "modelled tp": ("[evaluate]", "[modelled]\ntp = 3\n[evaluate]"),
    "modelled batch": ("[evaluate]", "[modelled]\nbatch = 1000\n[evaluate]"),
    "modelled target": ("[evaluate]", '[modelled]\ntarget = "trn9"\n[evaluate]', "trn9"),
    "modelled lnc": ("[evaluate]", "[modelled]\nlnc = 3\n[evaluate]"),
    "modelled prompt": ("[evaluate]", "[modelled]\nprompt = 0\n[evaluate]"),
    "modelled new": ("[evaluate]", "[modelled]\nnew = 1\n[evaluate]", "at least 2 tokens"),
    "measured rounds": ("[evaluate]", "[measured]\nrounds = 0\n[evaluate]"),
    "measured new beyond": ("[evaluate]", "[measured]\nnew = 100000\n[evaluate]"),
    "recovery without data": ("[evaluate]", "[recovery]\n[evaluate]", "recovery.data must be"),
    "recovery minutes": ("[evaluate]", '[recovery]\ndata = "text.txt"\nminutes = -1\n[evaluate]'),
}


def workplace(root: Path) -> Path:
    """Write model, text, task and `paper.toml` into an existing directory; return the last."""
    tiny_directory(root / "dense")
    (root / "text.txt").write_text(TEXT)
    write_task(root, "colours", 6, "acc")
    return write_paper(root, root)


def write_paper(folder: Path, root: Path | str = ".") -> Path:
    """Write `paper.toml` into a directory, of files below a root."""
    path = folder / "paper.toml"
    path.write_text(FILE.format(root=root))
    return path


def write_task(root: Path, name: str, rows: int, *metrics: str) -> Path:
    """Write data and, in a new directory `tasks`, a task of multiple choice; return the last."""
    choices = ["red", "green", "blue"]
    documents = [
        {"question": f"Number {n}:", "choices": choices, "answer": n % 3} for n in range(rows)
    ]
    data, tasks = root / f"{name}.jsonl", root / "tasks"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    tasks.mkdir()
    lines = "\n".join(f"  - metric: {metric}" for metric in metrics)
    (tasks / f"{name}.yaml").write_text(TASK.format(name=name, data=data, metrics=lines))
    return tasks
