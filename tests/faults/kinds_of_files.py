"""Files of a model, damaged: config.json, weights, the index, the record, tokenizers, templates."""

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness import Fault
from inputs import compress

Damage = Callable[[Path], None]
INSPECT = ("inspect", "{low}", "--json")
GENERATE = ("generate", "{low}", "--prompt", "The quick", "--max-new-tokens", "4", "--json")
COMPRESS = compress("{dense}", "{out}", "--method", "plain")
EVAL = ("eval", "{low}", "--text", "{text.txt}", "--seqlen", "64", "--json")
EXPORT = ("export", "nxdi", "{low}", "-o", "{out}")
PLAN = ("plan", "--model", "{dense}/config.json", "--json", "--tokens", "1")
ODD = (0, -1, 10**9, 2**63, 1.5, "64", None, [], {}, True, float("nan"))
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)


def faults(_: Path) -> Iterator[Fault]:
    """Yield all of them."""
    yield from _outside()
    yield from _configs()


def _outside() -> Iterator[Fault]:
    """Files that are no files, in the place of every file that is read."""
    readers = {
        "low/config.json": (INSPECT, GENERATE, EVAL, EXPORT),
        "low/model.safetensors": (INSPECT, GENERATE, EXPORT),
        "low/tokenizer.json": (GENERATE, EVAL),
        "dense/config.json": (COMPRESS, PLAN),
        "dense/model.safetensors": (COMPRESS,),
        "text.txt": (EVAL, compress("{dense}", "{out}")),
    }
    for file, commands in readers.items():
        for command in commands:
            for name, damage in NO_FILES.items():
                yield Fault(
                    f"no file: {Path(file).name}",
                    f"{name}, {command[0]} {file}",
                    command,
                    partial(_replaced, file, damage),
                )


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(target: str, path: Path) -> None:
    path.symlink_to(target)


NO_FILES: dict[str, Damage] = {
    "fifo": _fifo,
    "/dev/zero": partial(_link, "/dev/zero"),
    "/dev/urandom": partial(_link, "/dev/urandom"),
    "dangling link": partial(_link, "nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "directory": Path.mkdir,
}


def _replaced(file: str, damage: Damage, case: Path) -> None:
    (case / file).unlink()
    damage(case / file)


# --- config.json


def edit_json(file: str, edit: Callable[[Any], Any], case: Path) -> None:
    """Change what a JSON file holds; an edit that returns None has changed it in place."""
    path = case / file
    values = json.loads(path.read_text())
    changed = edit(values)
    path.write_text(json.dumps(values if changed is None else changed))


def _set(key: str, value: Any) -> Callable[[Any], None]:
    return lambda values: values.__setitem__(key, value)


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "first half": lambda data: data[: len(data) // 2],
    "last byte gone": lambda data: data[:-2],
    "twice": lambda data: data + data,
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: random.Random(0).randbytes(len(data)),  # noqa: S311
    "UTF-16": lambda data: data.decode("latin-1").encode("utf-16"),
    "a page": lambda data: b"<!DOCTYPE html><html><body>404</body></html>",
    "git lfs pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "pickle": lambda data: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
    "list": lambda data: b"[]",
    "number": lambda data: b"1" * 5000,
    "deep": lambda data: b"[" * 100_000 + b"]" * 100_000,
    "deep objects": lambda data: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "escapes": lambda data: b'{"\x1b[31m": "\\u001b[2J"}',
}


def rewrite(file: str, change: Callable[[bytes], bytes], case: Path) -> None:
    """Change the bytes of a file."""
    path = case / file
    path.write_bytes(change(path.read_bytes()))


def _configs() -> Iterator[Fault]:
    for name, change in BYTES.items():
        for command in (INSPECT, GENERATE, EXPORT):
            damage = partial(rewrite, "low/config.json", change)
            yield Fault("config.json, bytes", f"{name}, {command[0]}", command, damage)
        for command in (COMPRESS, PLAN):
            damage = partial(rewrite, "dense/config.json", change)
            yield Fault("config.json, bytes", f"{name}, {command[0]}", command, damage)
    for key in SIZES:
        for value in ODD:
            for command, model in ((GENERATE, "low"), (COMPRESS, "dense"), (PLAN, "dense")):
                damage = partial(edit_json, f"{model}/config.json", _set(key, value))
                name = f"{key} {value!r}, {command[0]}"
                yield Fault("config.json, sizes", name, command, damage)
