"""Files of a model, damaged: config.json, weights, the index, the record, tokenizers, templates."""

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness import EITHER, NOTED, REFUSED, UNCHANGED, Fault
from inputs import compress
from safetensors.numpy import load_file, save_file

Damage = Callable[[Path], None]
INSPECT = ("inspect", "{low}", "--json")
GENERATE = ("generate", "{low}", "--prompt", "The quick", "--new-tokens", "4", "--json")
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
    for kinds in (_outside, _configs, _weights, _values, _indexes, _records, _runs, _tokenizers):
        yield from kinds()


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
                kind, each = f"no file: {Path(file).name}", f"{name}, {command[0]} {file}"
                yield Fault(kind, each, command, partial(replaced, file, damage))


NO_FILES: dict[str, Damage] = {
    "fifo": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/urandom": lambda path: path.symlink_to("/dev/urandom"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "directory": Path.mkdir,
}


def replaced(file: str, damage: Damage, case: Path) -> None:
    """Put something else in the place of a file."""
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
        for command in (INSPECT, GENERATE, EXPORT, COMPRESS, PLAN):
            model = "dense" if command in (COMPRESS, PLAN) else "low"
            damage = partial(rewrite, f"{model}/config.json", change)
            yield Fault("config.json, bytes", f"{name}, {command[0]}", command, damage)
    for key in SIZES:
        for value in ODD:
            for command, model in ((GENERATE, "low"), (COMPRESS, "dense"), (PLAN, "dense")):
                damage = partial(edit_json, f"{model}/config.json", _set(key, value))
                name = f"{key} {value!r}, {command[0]}"
                # Null has a meaning for two of them, which is not what the pristine file says.
                expect = EITHER if value is None else UNCHANGED
                yield Fault("config.json, sizes", name, command, damage, expect=expect)


# --- weights


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and the values."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(header: object, values: bytes) -> bytes:
    """Put a safetensors file together."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def _edited(edit: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        header, values = header_of(data)
        edit(header)
        return with_header(header, values)

    return change


def _first(header: dict[str, Any]) -> dict[str, Any]:
    return header[sorted(name for name in header if name != "__metadata__")[0]]


def _renamed(new: str) -> Callable[[dict[str, Any]], None]:
    def edit(header: dict[str, Any]) -> None:
        header[new] = header.pop(sorted(name for name in header if name != "__metadata__")[0])

    return edit


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dtype I64": lambda header: _first(header).update(dtype="I64"),
    "dtype unknown": lambda header: _first(header).update(dtype="F7"),
    "shape empty": lambda header: _first(header).update(shape=[]),
    "shape negative": lambda header: _first(header).update(shape=[-1, 64]),
    "shape huge": lambda header: _first(header).update(shape=[2**40, 2**40]),
    "shape transposed": lambda header: _first(header).update(
        shape=[*_first(header)["shape"][::-1]]
    ),
    "offsets beyond": lambda header: _first(header).update(data_offsets=[0, 10**12]),
    "offsets reversed": lambda header: _first(header).update(data_offsets=[64, 0]),
    "offsets text": lambda header: _first(header).update(data_offsets="all"),
    "one tensor less": lambda header: header.pop(sorted(header)[-1]),
    "name ../x": _renamed("../../x"),
    "name with escapes": _renamed("model.\x1b[31m\x1b]0;owned\x07.weight"),
    "name of a megabyte": _renamed("w" * 1_000_000),
    "name empty": _renamed(""),
    "name with line break": _renamed("a\nneuronmm: done\r"),
    "metadata number": lambda header: header.update(__metadata__=7),
    "metadata tf": lambda header: header.update(__metadata__={"format": "tf"}),
    "tensors none": lambda header: header.clear(),
}


def _truncated(share: float, data: bytes) -> bytes:
    return data[: int(len(data) * share)]


def _with_length(length: int, data: bytes) -> bytes:
    return length.to_bytes(8, "little") + data[8:]


def _flipped(seed: int, in_header: bool, data: bytes) -> bytes:
    """Flip one bit of the header, or of the values."""
    size, draw = int.from_bytes(data[:8], "little"), random.Random(seed)  # noqa: S311
    place = draw.randrange(8, 8 + size) if in_header else draw.randrange(8 + size, len(data))
    return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]


def _weights() -> Iterator[Fault]:
    changes: dict[str, Callable[[bytes], bytes]] = {
        **BYTES,
        **{name: _edited(edit) for name, edit in HEADERS.items()},
        **{f"cut at {share}": partial(_truncated, share) for share in (0.001, 0.1, 0.9, 0.999)},
        **{f"header of {n} bytes": partial(_with_length, n) for n in (0, 1, 10**8, 2**63)},
        "bytes behind": lambda data: data + b"\0" * 64,
        "list as header": lambda data: with_header([], b""),
    }
    for name, change in changes.items():
        for command, file in ((INSPECT, "low"), (GENERATE, "low"), (EXPORT, "int8")):
            arguments = tuple(text.replace("{low}", f"{{{file}}}") for text in command)
            damage = partial(rewrite, f"{file}/model.safetensors", change)
            yield Fault("weights, bytes", f"{name}, {command[0]} {file}", arguments, damage)
        damage = partial(rewrite, "dense/model.safetensors", change)
        yield Fault("weights, bytes", f"{name}, compress", COMPRESS, damage)
    for seed in range(40):
        command, model = ((INSPECT, "low"), (GENERATE, "low"), (COMPRESS, "dense"))[seed % 3]
        damage = partial(rewrite, f"{model}/model.safetensors", partial(_flipped, seed, True))
        yield Fault("weights, a bit of the header", f"{seed}, {command[0]}", command, damage)
    for seed in range(30):
        model = ("low", "int8", "fp8")[seed % 3]
        command = (GENERATE, EVAL, EXPORT)[seed // 3 % 3]
        arguments = tuple(text.replace("{low}", f"{{{model}}}") for text in command)
        damage = partial(rewrite, f"{model}/model.safetensors", partial(_flipped, seed, False))
        yield Fault("weights, a bit of a value", f"{seed}, {command[0]} {model}", arguments, damage)


def _values() -> Iterator[Fault]:
    """NaN and infinities, in factors and in what stays dense."""
    parts = ("embed_tokens.weight", "layers.1.self_attn.q_proj.weight", "norm.weight")
    factors = ("layers.0.mlp.gate_proj.u", "layers.1.mlp.down_proj.v")
    for value in (float("nan"), float("inf"), float("-inf")):
        for part in (*parts, *factors):
            for command in (GENERATE, EVAL, EXPORT):
                damage = partial(_poisoned, "low", f"model.{part}", value)
                name = f"{value} in {part}, {command[0]}"
                yield Fault("weights, not finite", name, command, damage, expect=REFUSED)
        for part in (*parts, "layers.0.mlp.up_proj.weight"):
            damage = partial(_poisoned, "dense", f"model.{part}", value)
            for method in ("plain", "whiten"):
                command = compress("{dense}", "{out}", "--method", method)
                name = f"{value} in {part}, {method}"
                yield Fault("weights, not finite", name, command, damage, expect=REFUSED)


def _poisoned(model: str, name: str, value: float, case: Path) -> None:
    path = case / model / "model.safetensors"
    tensors = load_file(path)
    tensors[name].reshape(-1)[7] = value
    save_file(tensors, path, {"format": "pt"})


# --- index, record, compression.json


INDEX = "sharded/model.safetensors.index.json"
FROM_SHARDS = compress("{sharded}", "{out}", "--method", "plain")


def _to_all(value: object) -> Callable[[Any], None]:
    return lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], value))


def _indexes() -> Iterator[Fault]:
    edits: dict[str, Callable[[Any], Any]] = {
        "no metadata": lambda index: index.pop("metadata"),
        "metadata list": _set("metadata", []),
        "no weight_map": lambda index: index.pop("weight_map"),
        "weight_map empty": _set("weight_map", {}),
        "weight_map list": _set("weight_map", ["a"]),
        "one entry less": lambda index: index["weight_map"].popitem(),
        "one entry more": lambda index: index["weight_map"].update(ghost="ghost.safetensors"),
        **{
            f"files {value!r}": _to_all(value)
            for value in ("../x.safetensors", "/etc/passwd", "x.bin", "", "\x1b[2J.safetensors")
        },
        "files numbers": _to_all(3),
        "swapped": lambda index: index["weight_map"].update(
            zip(index["weight_map"], reversed(index["weight_map"].values()), strict=True)
        ),
        "a million entries": lambda index: index["weight_map"].update(
            {f"ghost.{i}": "ghost.safetensors" for i in range(1_000_000)}
        ),
    }
    for name, edit in edits.items():
        yield Fault("index", name, FROM_SHARDS, partial(edit_json, INDEX, edit))
    for name, change in BYTES.items():
        yield Fault("index", f"bytes, {name}", FROM_SHARDS, partial(rewrite, INDEX, change))
    for name, damage in NO_FILES.items():
        yield Fault("index", name, FROM_SHARDS, partial(replaced, INDEX, damage))


def _in_record(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        edit(config["quantization_config"])

    return change


def _in_layer(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["layers"][0].__setitem__(key, value)


def _ghosts(record: dict[str, Any]) -> None:
    layer = record["layers"][0]
    record["layers"] += [{**layer, "name": f"ghost.{i}"} for i in range(100_000)]


BOMB = "([a-z0-9_.]+)+X"
RECORDED = ("format_version", "layers", "svd_config", "calibration", "provenance", "left_dense")


def _records() -> Iterator[Fault]:
    edits: dict[str, Callable[[dict[str, Any]], Any]] = {
        f"{key} {value!r:.20}": lambda record, key=key, value=value: record.update({key: value})
        for key in RECORDED
        for value in (None, 7, "x", [], {}, [7], {"\x1b[31m": 1})
    }
    edits |= {
        f"layer's {key} {value!r:.20}": _in_layer(key, value)
        for key in ("name", "K", "N", "r", "dense", "loss", "storage", "compute")
        for value in (None, -1, 10**9, 1.5, "x", [], "\x1b[2J", True)
    }
    edits |= {
        "ghost layers": _ghosts,
        "layers twice": lambda record: record["layers"].extend(record["layers"]),
        "unknown field": lambda record: record.update(surprise=1),
        "regex bomb": lambda record: record["svd_config"].update(targets=[BOMB]),
    }
    for name, edit in edits.items():
        for command in (INSPECT, GENERATE):
            damage = partial(edit_json, "low/config.json", _in_record(edit))
            # Provenance, losses and what was left dense are notes: nothing is computed of them.
            yield Fault("record", f"{name}, {command[0]}", command, damage, expect=NOTED)


def _runs() -> Iterator[Fault]:
    """`compression.json`, which --from runs again."""
    command = ("compress", "{dense}", "--from", "{low}/compression.json", "-o", "{out}")
    command += ("--calibration", "{text.txt}")
    file = "low/compression.json"
    for name, change in BYTES.items():
        yield Fault("compression.json", f"bytes, {name}", command, partial(rewrite, file, change))
    for name, damage in NO_FILES.items():
        yield Fault("compression.json", name, command, partial(replaced, file, damage))
    for key in ("format_version", "model", "config", "calibration", "dtype", "device", "versions",
                "max_shard_size", "threads", "weights_sha256"):  # fmt: skip
        for value in (None, 7, "\x1b[31mx", [], {}):
            damage = partial(edit_json, file, _set(key, value))
            yield Fault("compression.json", f"{key} {value!r}", command, damage, expect=EITHER)
    for key, value in (("targets", [BOMB]), ("ratio", 2), ("method", "../x"), ("block", -8),
                       ("targets", ["("]), ("targets", [".*" * 30 + "x"])):  # fmt: skip
        damage = partial(edit_json, file, lambda v, k=key, w=value: v["config"].update({k: w}))
        name = f"config's {key} {value!r:.30}"
        yield Fault("compression.json", name, command, damage, expect=REFUSED)


# --- tokenizers


CHAT = ("generate", "{chat}", "--chat", "--prompt", "The quick", "--new-tokens", "4", "--json")
TEMPLATES = {
    "range(10**9)": "{% for i in range(10**9) %}x{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "unknown filter": "{{ messages | nothing }}",
    "syntax": "{% if %}",
    "division": "{{ 1 // 0 }}",
    "escape from the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "import": "{{ cycler.__init__.__globals__.os.system('id') }}",
    "exception": "{{ raise_exception('no \x1b[31mred') }}",
    "attribute of undefined": "{{ nothing.there.at.all }}",
    "empty": "{{ '' }}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "a long text": "{{ 'x' * 10**8 }}",
    "include": "{% include '/etc/passwd' %}",
    "wrong call": "{{ messages[0]['content'](1) }}",
    "key": "{{ messages[7]['content'] }}",
}


def _ids(change: Callable[[int], int]) -> Callable[[Any], None]:
    def edit(tokenizer: Any) -> None:
        model = tokenizer["model"]
        model["vocab"] = {token: change(number) for token, number in model["vocab"].items()}

    return edit


def _split_by(pattern: str) -> Callable[[Any], None]:
    split = {"type": "Split", "pattern": {"Regex": pattern}}
    return _set("pre_tokenizer", {**split, "behavior": "Isolated", "invert": False})


def _tokenizers() -> Iterator[Fault]:
    for name, template in TEMPLATES.items():
        damage = partial(rewrite, "chat/chat_template.jinja", lambda _, t=template: t.encode())
        yield Fault("chat template", name, CHAT, damage, expect=REFUSED)
    for name, change in BYTES.items():
        for file in ("tokenizer.json", "tokenizer_config.json"):
            for command in (GENERATE, EVAL, compress("{dense}", "{out}")):
                model = "dense" if command[0] == "compress" else "low"
                damage = partial(rewrite, f"{model}/{file}", change)
                yield Fault("tokenizer", f"{file}, {name}, {command[0]}", command, damage)
    truncation = {"max_length": 1, "stride": 5, "strategy": "LongestFirst"}
    edits: dict[str, Callable[[Any], Any]] = {
        "no vocabulary": lambda t: t["model"].update(vocab={}),
        "ids beyond": _ids(lambda number: number + 10**6),
        "ids negative": _ids(lambda number: -number),
        "unknown model": lambda t: t["model"].update(type="Magic"),
        "merges of strangers": lambda t: t["model"].update(merges=["q u", "zz zzz"]),
        "regex bomb": _split_by("(?:(?:(?:a{1000}){1000}){1000}){1000}"),
        "regex of backtracking": _split_by("^(([a-zA-Z. 0-9]+)+)+#$"),
        "no decoder": lambda t: t.update(decoder=None),
        "added tokens of numbers": lambda t: t.update(added_tokens=[1, 2]),
        "truncation to 1": _set("truncation", truncation | {"direction": "Right"}),
    }
    for name, edit in edits.items():
        for command in (GENERATE, EVAL):
            damage = partial(edit_json, "low/tokenizer.json", edit)
            yield Fault("tokenizer", f"{name}, {command[0]}", command, damage, expect=EITHER)
