"""What a user asks for, wrongly: texts, options, TOML files, names, and state to go on from."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from harness import DONE, EITHER, REFUSED, Fault
from inputs import compress, recovery
from kinds_of_files import BOMB, BYTES, NO_FILES, replaced, rewrite
from reproductions import MISTAKES
from safetensors.torch import load_file, save_file


def faults(_: Path) -> Iterator[Fault]:
    """Yield all of them."""
    for kinds in (_texts, _options, _papers, _names, _states):
        yield from kinds()


# --- texts


CALIBRATE = compress("{dense}", "{out}", "--method", "whiten")
EVAL = ("eval", "{low}", "--text", "{text.txt}", "--seqlen", "64", "--json")
COMPARE = ("compare", "{low}", "--text", "{text.txt}", "--seqlen", "64", "--dense", "{dense}")
RECOVER = recovery("{low}", "{text.txt}", "{out}", "{dense}")
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\t\n" * 100,
    "NUL": b"text\0text" * 100,
    "latin-1": "é".encode("latin-1") * 500,
    "half a character": "text €".encode()[:-1],
    "surrogate": b"text \xed\xa0\x80 text" * 100,
    "UTF-16": ("text " * 200).encode("utf-16"),
    "one token": b"x",
    "a word of 20 MB": b"a" * 20_000_000,
    "gzip": b"\x1f\x8b\x08" + bytes(range(256)) * 4,
}


def _texts() -> Iterator[Fault]:
    for command in (CALIBRATE, EVAL, COMPARE, RECOVER):
        for name, text in TEXTS.items():
            damage = partial(rewrite, "text.txt", lambda _, text=text: text)
            yield Fault("text", f"{name}, {command[0]}", command, damage, expect=REFUSED)
        for name, damage in NO_FILES.items():
            damage = partial(replaced, "text.txt", damage)
            yield Fault("text", f"{name}, {command[0]}", command, damage)


# --- options


COMPRESS = ("compress", "{dense}", "-o", "{out}", "--calibration", "{text.txt}")
NUMBERS = ("0", "-1", "nan", "inf", "1e400", "two", "", "1.5", "9" * 30, "0x10", "१")
WRONG: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "compress": (
        COMPRESS,
        {
            "--ratio": ("0", "1", "-0.1", "nan", "inf", "x", "", "2"),
            "--block": ("0", "-8", "7", "nan", "9" * 30, "x"),
            "--samples": ("0", "-1", "x", "1.5"),
            "--seqlen": ("0", "-1", "x", "129", "10000000"),
            "--dtype": ("int8", "", "float8"),
            "--device": ("", "gpu", "cuda:99", "cpu:x", "\x1b[31m", "meta", "mps"),
            "--method": ("", "magic", "../x", "\x1b[2J", "KFAC"),
            "--targets": ("", "(", "nothing", BOMB, ".*" * 30 + "x", "[", "*", "x" * 5000),
            "--allocation": ("", "greed"),
            "--importance": ("", "x", "-1"),
            "--budget": ("", "time", "bits"),
            "--storage": ("", "int3", "fp16", "bf16"),
            "--tokens": ("0", "-1", "x", "1:", ":1", "1:0", "1:inf", "1:1,1:1", "0:1", ","),
            "--target": ("trn9", "", "trn2"),
            "--layer-ratio": ("", "x", "x=", "=0.5", "x=2", "x=nan", "x=.5:.2", "x=-1:1", "(=.5"),
            "--max-shard-size": ("", "0", "5", "5XB", "-5GB", "nanGB", "1e3GB", "GB"),
            "--from": ("", "/dev/zero", "nowhere", "/"),
            "--calibration": ("", "/", "/dev/zero", "nowhere", "\x1b[31m"),
        },
    ),
    "generate": (
        ("generate", "{low}", "--prompt", "The"),
        {
            "--new-tokens": NUMBERS,
            "--dtype": ("int8", ""),
            "--device": ("", "gpu", "cuda:99", "xla:x"),
            "--prompt": ("", "x " * 5000),
        },
    ),
    "eval": (
        ("eval", "{low}", "--text", "{text.txt}"),
        {
            "--seqlen": ("0", "-1", "1", "x", "129", "99999999"),
            "--ppl": ("nothing", "\x1b[31m"),
            "--tasks": ("no_such_task", "\x1b[31m"),
            "--compute": ("", "fp8", "int8"),
            "--include-path": (),
        },
    ),
    "export": (
        ("export", "nxdi", "{low}", "-o", "{out}"),
        {"--tp": ("0", "-1", "7", "x", "9" * 30), "--divide": ("", "x"), "--dtype": ("", "int8")},
    ),
    "plan": (
        ("plan", "--model", "{dense}/config.json", "--tokens", "1"),
        {
            "--model": ("", "Nope-1B", "Llama", "/", "/dev/zero", "\x1b[31m", "x" * 5000),
            "--tokens": ("0", "-1", "x", "1,,2", "9" * 30),
            "--ratio": ("0", "1", "nan", "x"),
            "--target": ("trn9", ""),
            "--tp": ("0", "-1", "3", "x"),
            "--lnc": ("0", "3", "x"),
            "--dtype": ("int3", ""),
            "--storage": ("int3", ""),
            "--compute": ("int8", ""),
        },
    ),
    "recover": (
        RECOVER,
        {
            "--minutes": ("0", "-1", "nan", "inf", "x"),
            "--seqlen": ("0", "1", "-1", "999"),
            "--method": ("", "magic"),
            "--learning-rate": ("0", "-1", "nan", "x"),
            "--lora-order": ("", "x"),
            "--seed": ("x", "1.5", "-1"),
            "--dense": ("", "/", "nowhere", "{text.txt}", "{low}"),
        },
    ),
    "simulate": (
        ("simulate", "{kernels.py}:scale", "--arg", "x=f32[128,512]"),
        {
            "--arg": ("", "x", "x=", "y=1", "x=f32[128,", "x=f99[1]", "x=f32[-1,2]", "x=f32[]",
                      "x=nowhere.npy", "x=/dev/zero.npy", "x=\x1b[31m", "x=" + "(" * 500,
                      "x=f32[99999999,99999999]"),
            "--target": ("trn9", "", "\x1b[2J"),
            "--cores-busy": ("0", "-1", "99", "x"),
            "--seed": ("-1", "x"),
            "--lnc": ("3", "0"),
            "--sweep": ("", "x", "NOTHING=1,2", "x="),
            "--reference": ("", "nowhere.py:f", "{kernels.py}:nothing", "{kernels.py}"),
            "--save": ("out.txt", "", "nowhere/out.npy", "/", "{case}"),
            "--timeline": ("", "/", "nowhere/t.html"),
            "--perfetto": ("", "/", "nowhere/t.json"),
            "--plot": ("out.doc", "/", ""),
        },
    ),
}  # fmt: skip
# Values that are right after all: the model has float32 as its own, negative seeds are seeds.
RIGHT = {("generate", "--new-tokens", "१"), ("recover", "--seed", "-1")}


def _options() -> Iterator[Fault]:
    for command, (arguments, options) in WRONG.items():
        for option, values in options.items():
            for value in values:
                is_right = (command, option, value) in RIGHT
                yield Fault(
                    f"options of {command}",
                    f"{option} {value!r:.40}",
                    (*arguments, f"{option}={value}"),
                    expect=EITHER if is_right else REFUSED,
                    codes=(1, 2) if command == "simulate" else (2,),
                )


# --- reproduce


REPRODUCE = ("reproduce", "{paper.toml}", "-o", "{out}")


def _papers() -> Iterator[Fault]:
    needed = ("dense", "text.txt")
    toml = partial(Fault, "TOML", arguments=REPRODUCE, inputs=needed, expect=REFUSED)
    for name, (old, new, *_) in MISTAKES.items():
        yield toml(name, damage=partial(_paper, old, new))
    for name, change in BYTES.items():
        damage = partial(rewrite, "paper.toml", change)
        # Without its last digit the seqlen is another.
        expect = EITHER if name == "last byte gone" else REFUSED
        yield toml(f"bytes, {name}", damage=damage, expect=expect)
    for name, damage in NO_FILES.items():
        yield toml(name, damage=partial(replaced, "paper.toml", damage))


def _paper(old: str, new: str, case: Path) -> None:
    text = (case / "paper.toml").read_text()
    assert old in text
    (case / "paper.toml").write_text(text.replace(old, new, 1))


# --- names


OUTPUTS = {
    "escapes": ("{case}/\x1b[31mred\x07", DONE),
    "line break": ("{case}/a\nneuronmm: b", DONE),
    "right to left": ("{case}/\u202etxt.exe", DONE),
    "no text": ("{case}/" + os.fsdecode(b"\xff\xfe"), REFUSED),
    "emoji": ("{case}/🙂 ü", DONE),
    "quotes": ("{case}/a'b\"c $(id) ;", DONE),
    "dash": ("{case}/-o", DONE),
    "230 characters": ("{case}/" + "n" * 230, REFUSED),
    "255 characters": ("{case}/" + "n" * 255, REFUSED),
    "300 characters": ("{case}/" + "n" * 300, REFUSED),
    "a path of 5,000": ("{case}/" + "n/" * 2500, REFUSED),
    "NUL": ("{case}/a\0b", REFUSED),
    "empty": ("", REFUSED),
    "dot": (".", REFUSED),
    "root": ("/", REFUSED),
    "below a file": ("{text.txt}/out", REFUSED),
    "/dev/null": ("/dev/null", REFUSED),
    "/proc": ("/proc/x", REFUSED),
    "the model": ("{dense}", REFUSED),
    "above the model": ("{dense}/..", REFUSED),
}


def _names() -> Iterator[Fault]:
    text = ("--calibration", "{text.txt}")
    for name, (output, expect) in OUTPUTS.items():
        commands = {
            "compress": compress("{dense}", output, "--method", "plain"),
            "stream": compress("{dense}", output, "--method", "plain", "--stream"),
            "export": ("export", "nxdi", "{low}", "-o", output),
            "reproduce": ("reproduce", "{paper.toml}", "-o", output),
        }
        for command, arguments in commands.items():
            if command == "export" and name in ("the model", "above the model"):
                continue
            is_long = command == "reproduce" and name in ("230 characters", "255 characters", "dot")
            yield Fault(
                "names of outputs",
                f"{name}, {command}",
                arguments,
                expect=EITHER if is_long else expect,
                inputs=("dense", "text.txt"),
            )
    for name in ("\x1b[31mred", "a\nb", "../x", "x" * 5000, "\udcff", "a\0b", "-x", "~", "*"):
        for command in (
            ("inspect", name),
            ("generate", name, "--prompt", "x"),
            ("compress", name, "-o", "{out}", *text),
            ("eval", name, "--text", "{text.txt}"),
            ("plan", "--model", name),
            ("reproduce", name, "-o", "{out}"),
            ("simulate", f"{name}:f"),
        ):
            yield Fault("names of inputs", f"{name!r:.30}, {command[0]}", command, expect=REFUSED)


# --- state to go on from


STREAM = compress("{dense}", "{out}", "--stream")


def _states() -> Iterator[Fault]:
    stream = partial(Fault, "state of --stream", arguments=STREAM, inputs=("unfinished",))
    yield stream("as it was left", damage=_resumed)
    for seed in range(24):
        yield stream(f"value {seed}", damage=partial(_in_a_set, partial(_one_value, seed), seed))
    for seed in range(8):
        yield stream(f"NaN {seed}", damage=partial(_in_a_set, _not_finite, seed))
    for name, change in BYTES.items():
        damage = partial(_bytes, change)
        for seed in (0, 3):
            yield stream(f"{name}, file {seed}", damage=partial(_in_a_set, damage, seed))
        yield stream(f"{name}, state.json", damage=partial(_in_state_json, damage))
    for name, damage in NO_FILES.items():
        damage = partial(_in_a_set, partial(_instead, damage), 1)
        yield stream(f"{name}, a set", damage=damage)
    yield stream("another model", damage=_other, expect=REFUSED)
    yield stream("another text", damage=_other_text, expect=REFUSED)

    recover = partial(Fault, "state of recover", arguments=RECOVER, inputs=("training",))
    for name, change in BYTES.items():
        damage = partial(_in_training, partial(_bytes, change))
        yield recover(name, damage=damage, expect=EITHER)
    for seed in range(6):
        damage = partial(_in_training, partial(_one_value, seed))
        yield recover(f"value {seed}", damage=damage, expect=REFUSED)
    yield recover("NaN", damage=partial(_in_training, _not_finite), expect=REFUSED)

    arguments, needed = ("reproduce", "{paper.toml}", "-o", "{kept}"), ("dense", "text.txt")
    again = partial(Fault, "cells of reproduce", arguments=arguments, inputs=needed, expect=EITHER)
    for name, change in BYTES.items():
        for which in ("perplexity", "compress"):
            damage = partial(_in_cells, which, partial(_bytes, change))
            yield again(f"{name}, {which}", damage=damage)
    for seed in range(6):
        yield again(f"value {seed}", damage=partial(_in_models, seed))


def _resumed(case: Path) -> None:
    (case / "unfinished").rename(case / ".out.stream")


def _in_a_set(damage: Callable[[Path], None], number: int, case: Path) -> None:
    _resumed(case)
    paths = sorted((case / ".out.stream").glob("*.safetensors"))
    damage(paths[number % len(paths)])


def _in_state_json(damage: Callable[[Path], None], case: Path) -> None:
    _resumed(case)
    damage(case / ".out.stream" / "state.json")


def _bytes(change: Callable[[bytes], bytes], path: Path) -> None:
    path.write_bytes(change(path.read_bytes()))


def _instead(damage: Callable[[Path], None], path: Path) -> None:
    path.unlink()
    damage(path)


def _one_value(seed: int, path: Path) -> None:
    """Change one number, and keep the file's metadata."""
    _change(path, seed, lambda value: value * 1.5 + 1)


def _not_finite(path: Path) -> None:
    _change(path, 1, lambda value: value * float("nan"))


def _change(path: Path, seed: int, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    size = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + size]).get("__metadata__")
    tensors, draw = load_file(path), random.Random(seed)  # noqa: S311
    floats = sorted(name for name, t in tensors.items() if t.is_floating_point() and t.numel())
    tensor = tensors[draw.choice(floats)].view(-1)
    place = draw.randrange(tensor.numel())
    tensor[place] = change(tensor[place])
    save_file(tensors, path, metadata)


def _other(case: Path) -> None:
    _resumed(case)
    _change(case / "dense" / "model.safetensors", 5, lambda value: value + 1)


def _other_text(case: Path) -> None:
    _resumed(case)
    (case / "text.txt").write_text("Another text, as long as it must be. " * 200)


def _in_training(damage: Callable[[Path], None], case: Path) -> None:
    shutil.move(case / "training", case / "out.recovery")
    damage(case / "out.recovery" / "state.safetensors")


def _in_cells(which: str, damage: Callable[[Path], None], case: Path) -> None:
    damage(next((case / "kept" / "cells").glob(f"{which}-*.json")))


def _in_models(seed: int, case: Path) -> None:
    path = next((case / "kept" / "models").glob("*/model.safetensors"))
    _change(path, seed, lambda value: value + 1)
    if seed % 2:
        shutil.rmtree(case / "kept" / "cells")
