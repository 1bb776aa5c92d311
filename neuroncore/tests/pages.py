"""The blocks of a page of the documentation, run in their order as its reader would.

A Python block runs, one that begins with `# name.py` is that file, in which `import nki` works.
Of a bash block each line of `neuroncore` runs, and exits with 0, or with 1 where a comment says
so. A text block after either is what it prints, in order, cut to what matters at `...`.
"""

import contextlib
import io
import re
import shlex
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import neuroncore as nc
from neuroncore.cli import main

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
Run = Callable[[list[str]], Any]


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    for found in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield found[1], found[2]


def check(page: Path, command: Run = main) -> int:
    """Run a page's blocks in the working directory; returns how many printed what they show."""
    namespace = vars(types.ModuleType("page"))
    printed, shown = "", 0
    for language, text in blocks(page):
        if language == "python":
            printed = _python(text, namespace)
        elif language == "bash":
            lines = [line for line in text.splitlines() if line.startswith("neuroncore ")]
            printed = "".join(_command(line, command) for line in lines)
        elif language == "text" and printed:
            at, whole = 0, _words(printed)
            for part in map(_words, text.split("...\n")):
                assert part in whole[at:], f"{page.name}: {part}\nnot in\n{printed}"
                at = whole.index(part, at) + len(part)
            shown, printed = shown + 1, ""
    return shown


def _python(text: str, namespace: dict[str, Any]) -> str:
    name = re.match(r"# (\w+\.py)\n", text)
    if name:
        Path(name[1]).write_text(text)
    output = io.StringIO()
    finds_nki = nc.as_nki() if name else contextlib.nullcontext()
    with contextlib.redirect_stdout(output), finds_nki:
        exec(compile(text, name[1] if name else "kernel.py", "exec"), namespace)  # noqa: S102
    return output.getvalue()


def _command(line: str, command: Run) -> str:
    """What a command prints, of both streams."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = command(shlex.split(line, comments=True)[1:])
    assert code == ("# exits with 1" in line), f"{line}: {code}\n{output.getvalue()}"
    return output.getvalue()


def _words(text: str) -> str:
    return " ".join(text.split())
