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
from kinds_of_files import BOMB, BYTES, NO_FILES, rewrite
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
            yield Fault("text", f"{name}, {command[0]}", command, partial(_text_is, damage))


def _text_is(damage: Callable[[Path], None], case: Path) -> None:
    (case / "text.txt").unlink()
    damage(case / "text.txt")


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
            "--storage": ("", "int4", "fp16", "bf16"),
            "--tokens": ("0", "-1", "x"),
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
            "--storage": ("int4", ""),
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
PAPERS: dict[str, tuple[str, str]] = {
    "published unknown": ('title = "Tiny"', 'title = "Tiny"\npublished = "Nope-1B"'),
    "title a number": ('title = "Tiny"', "title = 3"),
    "data nowhere": ('title = "Tiny"', 'title = "Tiny"\ndata = "nowhere"'),
    "unknown key": ('title = "Tiny"', 'titel = "Tiny"'),
    "model nowhere": ('id = "dense"', 'id = "nowhere"'),
    "model with escapes": ('id = "dense"', 'id = "\\u001b[31m"'),
    "model a text file": ('id = "dense"', 'id = "text.txt"'),
    "device": ('id = "dense"', 'id = "dense"\ndevice = "gpu"'),
    "device not there": ('id = "dense"', 'id = "dense"\ndevice = "cuda:7"'),
    "dtype": ('id = "dense"', 'id = "dense"\ndtype = "int3"'),
    "ratios a text": ("ratios = [0.3]", 'ratios = "0.2"'),
    "ratios of texts": ("ratios = [0.3]", 'ratios = ["0.2"]'),
    "ratios empty": ("ratios = [0.3]", "ratios = []"),
    "ratios nan": ("ratios = [0.3]", "ratios = [nan]"),
    "ratios twice": ("ratios = [0.3]", "ratios = [0.3, 0.3]"),
    "ratios beyond": ("ratios = [0.3]", "ratios = [0.3, 1.0]"),
    "block": ("block = 8", "block = 7"),
    "block huge": ("block = 8", "block = 99999999999999999999"),
    "samples": ("samples = 8", "samples = 0"),
    "seqlen": ("seqlen = 64\n[methods", "seqlen = 0\n[methods"),
    "storage": ("block = 8", 'block = 8\nstorages = ["int4"]'),
    "storage of another dtype": ("block = 8", 'block = 8\nstorages = ["bf16"]'),
    "targets": ("block = 8", 'block = 8\ntargets = ["nothing"]'),
    "targets a bomb": ("block = 8", f"block = 8\ntargets = ['{BOMB}']"),
    "text nowhere": ('calibration = "text.txt"', 'calibration = "nowhere.txt"'),
    "text a device": ('calibration = "text.txt"', 'calibration = "/dev/zero"'),
    "method unknown": ('method = "plain"', 'method = "magic"'),
    "method named nothing": ("[methods.plain]", '[methods.""]'),
    "method named ../../x": ("[methods.plain]", '[methods."../../x"]'),
    "method with escapes": ("[methods.plain]", '[methods."\\u001b[31mx"]'),
    "method named dense": ("[methods.plain]", "[methods.dense]"),
    "methods equal": ("[methods.plain]", '[methods.other]\nmethod = "plain"\n[methods.plain]'),
    "methods none": ('[methods.plain]\nmethod = "plain"', "[methods]"),
    "tasks unknown": ("[evaluate]", '[evaluate]\ntasks = ["no_such"]'),
    "tasks a path": ("[evaluate]", '[evaluate]\ntasks = ["../../x.yaml"]'),
    "include nowhere": ("[evaluate]", '[evaluate]\ninclude = "nowhere"'),
    "texts nowhere": ('texts = ["text.txt"]', 'texts = ["nowhere.txt"]'),
    "evaluate's seqlen": ("seqlen = 64\n", "seqlen = 64\n"),
    "limit": ("[evaluate]", "[evaluate]\nlimit = 0"),
    "batch size": ("[evaluate]", "[evaluate]\nbatch_size = -1"),
    "modelled tp": ("[evaluate]", "[modelled]\ntp = 3\n[evaluate]"),
    "modelled batch": ("[evaluate]", "[modelled]\nbatch = 1000\n[evaluate]"),
    "modelled target": ("[evaluate]", '[modelled]\ntarget = "trn9"\n[evaluate]'),
    "modelled lnc": ("[evaluate]", "[modelled]\nlnc = 3\n[evaluate]"),
    "modelled prompt": ("[evaluate]", "[modelled]\nprompt = 0\n[evaluate]"),
    "measured rounds": ("[evaluate]", "[measured]\nrounds = 0\n[evaluate]"),
    "measured new beyond": ("[evaluate]", "[measured]\nnew = 100000\n[evaluate]"),
    "recovery without data": ("[evaluate]", "[recovery]\nminutes = 1\n[evaluate]"),
    "recovery minutes": ("[evaluate]", '[recovery]\ndata = "text.txt"\nminutes = -1\n[evaluate]'),
}
del PAPERS["evaluate's seqlen"]


def _papers() -> Iterator[Fault]:
    needed = ("dense", "text.txt")
    for name, (old, new) in PAPERS.items():
        damage = partial(_paper, old, new)
        yield Fault("TOML", name, REPRODUCE, damage, expect=REFUSED, inputs=needed)
    for name, change in BYTES.items():
        damage = partial(rewrite, "paper.toml", change)
        # Without its last digit the seqlen is another.
        expect = EITHER if name == "last byte gone" else REFUSED
        yield Fault("TOML", f"bytes, {name}", REPRODUCE, damage, expect=expect, inputs=needed)
    for name, damage in NO_FILES.items():
        replace = partial(_paper_is, damage)
        yield Fault("TOML", name, REPRODUCE, replace, expect=REFUSED, inputs=needed)


def _paper(old: str, new: str, case: Path) -> None:
    text = (case / "paper.toml").read_text()
    assert old in text
    (case / "paper.toml").write_text(text.replace(old, new, 1))


def _paper_is(damage: Callable[[Path], None], case: Path) -> None:
    (case / "paper.toml").unlink()
    damage(case / "paper.toml")


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
    yield Fault("state of --stream", "as it was left", STREAM, _resumed, inputs=("unfinished",))
    for seed in range(24):
        damage = partial(_in_a_set, partial(_one_value, seed), seed)
        yield Fault("state of --stream", f"value {seed}", STREAM, damage, inputs=("unfinished",))
    for seed in range(8):
        damage = partial(_in_a_set, _not_finite, seed)
        yield Fault("state of --stream", f"NaN {seed}", STREAM, damage, inputs=("unfinished",))
    for name, change in BYTES.items():
        for seed in (0, 3):
            damage = partial(_in_a_set, partial(_bytes, change), seed)
            full = f"{name}, file {seed}"
            yield Fault("state of --stream", full, STREAM, damage, inputs=("unfinished",))
        damage = partial(_in_state_json, change)
        yield Fault(
            "state of --stream", f"{name}, state.json", STREAM, damage, inputs=("unfinished",)
        )
    for name, damage in NO_FILES.items():
        put = partial(_in_a_set, partial(_instead, damage), 1)
        yield Fault("state of --stream", f"{name}, a set", STREAM, put, inputs=("unfinished",))
    yield Fault("state of --stream", "another model", STREAM, _other, inputs=("unfinished",),
                expect=REFUSED)  # fmt: skip
    yield Fault("state of --stream", "another text", STREAM, _other_text, inputs=("unfinished",),
                expect=REFUSED)  # fmt: skip
    for name, change in BYTES.items():
        damage = partial(_in_training, partial(_bytes, change))
        yield Fault("state of recover", name, RECOVER, damage, inputs=("training",), expect=EITHER)
    for seed in range(6):
        damage = partial(_in_training, partial(_one_value, seed))
        name = f"value {seed}"
        yield Fault("state of recover", name, RECOVER, damage, inputs=("training",), expect=REFUSED)
    damage = partial(_in_training, _not_finite)
    yield Fault("state of recover", "NaN", RECOVER, damage, inputs=("training",), expect=REFUSED)
    again = ("reproduce", "{paper.toml}", "-o", "{kept}")
    needed = ("dense", "text.txt")
    for name, change in BYTES.items():
        for which in ("perplexity", "compress"):
            damage = partial(_in_cells, which, change)
            full = f"{name}, {which}"
            yield Fault("cells of reproduce", full, again, damage, inputs=needed, expect=EITHER)
    for seed in range(6):
        damage = partial(_in_models, seed)
        name = f"value {seed}"
        yield Fault("cells of reproduce", name, again, damage, inputs=needed, expect=EITHER)


def _resumed(case: Path) -> None:
    (case / "unfinished").rename(case / ".out.stream")


def _sets(case: Path) -> list[Path]:
    return sorted((case / ".out.stream").glob("*.safetensors"))


def _in_a_set(damage: Callable[[Path], None], number: int, case: Path) -> None:
    _resumed(case)
    paths = _sets(case)
    damage(paths[number % len(paths)])


def _in_state_json(change: Callable[[bytes], bytes], case: Path) -> None:
    _resumed(case)
    path = case / ".out.stream" / "state.json"
    path.write_bytes(change(path.read_bytes()))


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


def _in_cells(which: str, change: Callable[[bytes], bytes], case: Path) -> None:
    path = next((case / "kept" / "cells").glob(f"{which}-*.json"))
    path.write_bytes(change(path.read_bytes()))


def _in_models(seed: int, case: Path) -> None:
    path = next((case / "kept" / "models").glob("*/model.safetensors"))
    _change(path, seed, lambda value: value + 1)
    if seed % 2:
        shutil.rmtree(case / "kept" / "cells")
