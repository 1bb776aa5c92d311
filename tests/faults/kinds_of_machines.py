"""What goes wrong around a command: disks, limits, streams, environment; and kernels that run."""

import os
import resource
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from harness import DONE, EITHER, REFUSED, Fault
from inputs import compress, recovery

NOBODY = 65534
SIMULATE = ("simulate", "{kernels.py}:scale", "--arg", "x=f32[128,512]")
WRITING = {
    "compress": compress("{dense}", "{out}", "--method", "plain"),
    "stream": compress("{dense}", "{out}", "--method", "plain", "--stream"),
    "sharded": compress("{sharded}", "{out}", "--method", "plain", "--max-shard-size", "50KB"),
    "export": ("export", "nxdi", "{low}", "-o", "{out}"),
    "recover": recovery("{low}", "{text.txt}", "{out}", "{dense}"),
    "save npy": (*SIMULATE, "--save", "out.npy"),
    "save safetensors": (*SIMULATE, "--save", "out.safetensors"),
    "timeline": (*SIMULATE, "--timeline", "out.html"),
    "perfetto": (*SIMULATE, "--perfetto", "out.json"),
    "reproduce": ("reproduce", "{paper.toml}", "-o", "{out}"),
}
READING = {
    "inspect": ("inspect", "{low}", "--json"),
    "generate": ("generate", "{low}", "--prompt", "The quick", "--new-tokens", "4", "--json"),
    "eval": ("eval", "{low}", "--text", "{text.txt}", "--seqlen", "64", "--json"),
    "plan": ("plan", "--model", "{dense}/config.json", "--json", "--tokens", "1"),
    "simulate": SIMULATE,
    "doctor": ("doctor",),
}


def faults(_: Path) -> Iterator[Fault]:
    """Yield all of them."""
    for kinds in (_disks, _processes, _streams, _environments, _kernels):
        yield from kinds()


def _disks() -> Iterator[Fault]:
    unwritable = REFUSED if os.geteuid() == 0 else EITHER
    for command, arguments in WRITING.items():
        inputs = ("dense", "text.txt") if command == "reproduce" else ()
        # What a report of cells is: a failed cell is one, and the run goes on.
        codes = (1, 2) if command == "reproduce" else (2,)
        for limit in (600, 1000, 8000, 60_000, 150_000):
            inside = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
            yield Fault("disk full", f"files of {limit} bytes, {command}", arguments,
                        inside=inside, codes=codes, expect=EITHER, inputs=inputs)  # fmt: skip
        yield Fault("no permission", f"to write, {command}", arguments, _readable_by_all,
                    partial(_as_nobody, 0o555), unwritable, inputs=inputs)  # fmt: skip
    for command, arguments in READING.items():
        if command != "doctor":
            yield Fault("no permission", f"to read, {command}", arguments, _unreadable,
                        partial(_as_nobody, 0o777), unwritable)  # fmt: skip


def _readable_by_all(case: Path) -> None:
    for path in (case, *case.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _unreadable(case: Path) -> None:
    _readable_by_all(case)
    for path in case.rglob("*"):
        if path.is_file():
            path.chmod(0)


def _as_nobody(mode: int) -> None:
    """Give up root's rights, which pass over permissions and limits."""
    Path.cwd().chmod(mode)
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _processes() -> Iterator[Fault]:
    limits: dict[str, Callable[[], None]] = {
        "one process": partial(_limited, resource.RLIMIT_NPROC, 1),
        "no further file": partial(_limited, resource.RLIMIT_NOFILE, 3),
        "five files": partial(_limited, resource.RLIMIT_NOFILE, 8),
        "no core, no lock": partial(_limited, resource.RLIMIT_MEMLOCK, 0),
    }
    for command, arguments in (READING | {"compress": WRITING["compress"]}).items():
        for name, inside in limits.items():
            yield Fault("limits", f"{name}, {command}", arguments, inside=inside, expect=EITHER,
                        damage=_readable_by_all)  # fmt: skip


def _limited(what: int, value: int) -> None:
    if what == resource.RLIMIT_NPROC:
        _as_nobody(0o777)
    resource.setrlimit(what, (value, value))


def _streams() -> Iterator[Fault]:
    def closed() -> None:
        sys.stdout.close()
        os.close(1)

    def full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    def gone() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)

    def ascii_alone() -> None:
        sys.stdout.reconfigure(encoding="ascii", errors="strict")  # pyright: ignore

    streams = {"closed": closed, "full": full, "gone": gone, "ASCII": ascii_alone}
    for command, arguments in READING.items():
        for name, inside in streams.items():
            expect = DONE if name == "ASCII" else EITHER
            yield Fault("stdout", f"{name}, {command}", arguments, inside=inside, expect=expect,
                        codes=(2, 141))  # fmt: skip
    prompt = ("generate", "{low}", "--prompt", "Füße 🙂", "--new-tokens", "4")
    yield Fault("stdout", "ASCII, a prompt", prompt, inside=ascii_alone, expect=DONE)


FIRST = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "RANK 5 of 2": {"RANK": "5", "WORLD_SIZE": "2"},
    "RANK 2 of 2": {"RANK": "2", "WORLD_SIZE": "2"},
    "RANK -1": {"RANK": "-1", "WORLD_SIZE": "2"},
    "RANK a word": {"RANK": "one", "WORLD_SIZE": "2"},
    "RANK empty": {"RANK": "", "WORLD_SIZE": "2"},
    "WORLD_SIZE 0": {"RANK": "0", "WORLD_SIZE": "0"},
    "WORLD_SIZE -3": {"RANK": "0", "WORLD_SIZE": "-3"},
    "WORLD_SIZE a word": {"RANK": "0", "WORLD_SIZE": "two"},
    "no WORLD_SIZE": {"RANK": "0"},
    "no RANK": {"WORLD_SIZE": "2"},
    "no MASTER_ADDR": {"RANK": "0", "WORLD_SIZE": "2"},
    "no MASTER_PORT": FIRST,
    "MASTER_PORT a word": FIRST | {"MASTER_PORT": "http"},
    "MASTER_PORT beyond": FIRST | {"MASTER_PORT": "99999"},
    "LANG": {"LANG": "xx_YY.nothing", "LC_ALL": "xx"},
    "HOME nowhere": {"HOME": "/nowhere", "HF_HOME": "/nowhere/hf"},
    "TMPDIR nowhere": {"TMPDIR": "/nowhere"},
    "OMP_NUM_THREADS": {"OMP_NUM_THREADS": "many"},
    "COLUMNS": {"COLUMNS": "0"},
    "COLUMNS 1": {"COLUMNS": "1"},
    "no environment": {},
}


def _environments() -> Iterator[Fault]:
    for name, values in ENVIRONMENTS.items():
        for command in ("inspect", "generate", "compress"):
            arguments = (READING | WRITING)[command]
            # Groups of one process, and what only a further process would need, change nothing.
            yield Fault("environment", f"{name}, {command}", arguments,
                        inside=partial(_environment, values), expect=EITHER)  # fmt: skip


def _environment(values: dict[str, str]) -> None:
    if not values:
        os.environ.clear()
    os.environ.update(values)


# --- kernels


HEAD = """import os, sys, time
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def kernel(x):
"""
TENSOR = "    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)\n"
COPY = TENSOR + "    nisa.dma_copy(out, x)\n"
BODIES: dict[str, str] = {
    "BaseException": "    raise BaseException('no')\n",
    "GeneratorExit": "    raise GeneratorExit\n",
    "own BaseException": "    class Odd(BaseException): pass\n    raise Odd('\\x1b[31mred')\n",
    "SystemExit": "    raise SystemExit(0)\n",
    "sys.exit text": "    sys.exit('bye')\n",
    "recursion": "    return kernel(x)\n",
    "escapes": "    raise ValueError('\\x1b[31mred\\x1b]0;owned\\x07')\n",
    "line breaks": "    raise ValueError('a\\nb\\r\\nTraceback (most recent call last):')\n",
    "bytes": "    raise ValueError(b'\\xff')\n",
    "no message": "    raise ValueError\n",
    "message raises": "    class Odd(Exception):\n        def __str__(self): return 1 // 0\n"
    "    raise Odd\n",
    "name error": "    return nothing\n",
    "import": "    import nothing_there\n",
    "returns a text": "    return '\\x1b[31m'\n",
    "returns a dict": "    return {'x': x}\n",
    "returns itself": "    return kernel\n",
    "returns a generator": "    yield x\n",
    "memory": "    return [0] * 10**12\n",
    "a long error": "    raise ValueError('x' * 10**7)\n",
    "StopIteration": "    raise StopIteration\n",
    "MemoryError": "    raise MemoryError\n",
    "wrong copy": TENSOR + "    nisa.dma_copy(out, x[:, :7])\n",
    "beyond": TENSOR + "    nisa.dma_copy(out[:, 500:600], x[:, 500:600])\n",
    "unknown instruction": "    nisa.nothing(x)\n",
    "a tensor of a terabyte": "    nl.ndarray((128, 2**33), x.dtype)\n",
}
ENDLESS: dict[str, str] = {
    "infinite loop": "    while True:\n        pass\n",
    "infinite instructions": TENSOR + "    while True:\n        nisa.dma_copy(out, x)\n",
    "a million tensors": "    for i in range(10**6):\n        nl.ndarray((1, 1), x.dtype, "
    "buffer=nl.shared_hbm)\n" + COPY,
    "sleep": "    time.sleep(10**6)\n",
    "reading stdin": "    input()\n",
}
FOREIGN: dict[str, str] = {
    "closes stdout": "    sys.stdout.close()\n" + COPY,
    "closes stderr": "    sys.stderr.close()\n" + COPY,
    "closes descriptor 1": "    os.close(1)\n" + COPY,
    "chdir": "    os.chdir('/')\n" + COPY,
    "prints": "    print('hello')\n" + COPY,
    "os.write(1)": "    os.write(1, b'hello')\n" + COPY,
    "sys.stdout = None": "    sys.stdout = None\n" + COPY,
    "changes os.environ": "    os.environ.clear()\n" + COPY,
    "warns": "    import warnings\n    warnings.warn('\\x1b[31mred')\n" + COPY,
    "a thread that stays": "    import threading\n"
    "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n" + COPY,
}
FILES: dict[str, bytes] = {
    "no Python": b"\x80\x81\x82",
    "NUL": b"def kernel(x): pass\0",
    "syntax": b"def kernel(x:\n",
    "empty": b"",
    "tabs": b"def kernel(x):\n\treturn x\n        return x\n",
    "deep": b"x = " + b"(" * 5000 + b")" * 5000,
    "exits": b"import sys\nsys.exit(0)\n",
    "raises": b"raise BaseException('\x1b[31m')\n",
    "a coding of none": b"# coding: nothing\n",
    "million lines": b"a = 1\n" * 300_000,
    "kernel is a number": b"kernel = 3\n",
    "kernel is a class": b"class kernel: pass\n",
    "kernel takes nothing": b"def kernel(): return None\n",
    "async": b"async def kernel(x): return x\n",
}
RUN = ("simulate", "kernel.py:kernel", "--arg", "x=f32[128,512]")


def _kernels() -> Iterator[Fault]:
    for name, body in {**BODIES, **ENDLESS}.items():
        for options in ((), ("--trace-only",), ("--json",)):
            if name in ENDLESS and options == ("--trace-only",):
                continue
            if name in ENDLESS:
                options = (*options, "--max-seconds", "3")
            expect = EITHER if name == "a million tensors" else REFUSED
            damage = partial(_file, f"{HEAD}{body}    return x\n".encode())
            full = " ".join((name, *options))
            yield Fault("kernels", full, (*RUN, *options), damage, expect=expect, codes=(1, 2))
    for name, body in FOREIGN.items():
        damage = partial(_file, f"{HEAD}{body}    return out\n".encode())
        for options in (("--json",), ("--json", "--timeline", "out.html")):
            full = " ".join((name, *options[1:]))
            yield Fault("kernels that meddle", full, (*RUN, *options), damage, expect=EITHER,
                        codes=(1, 2))  # fmt: skip
    for name, data in FILES.items():
        damage = partial(_file, data)
        yield Fault("kernels' files", name, RUN, damage, expect=REFUSED, codes=(1, 2))


def _file(data: bytes, case: Path) -> None:
    (case / "kernel.py").write_bytes(data)
