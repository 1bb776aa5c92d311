"""`neuroncore migrate`: files of the Beta dialect of NKI, rewritten statement by statement."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from neuroncore.checks.lint import findings
from neuroncore.checks.lint_rules import LINES, RULES
from neuroncore.checks.lint_source import Sources
from neuroncore.migrate.file import File
from neuroncore.migrate.names import Names
from neuroncore.migrate.text import MARK, lines_of

__all__ = ["MARK", "Left", "migrate", "read"]


@dataclass(frozen=True)
class Left:
    """What is left by hand: the line of the new text, the rule and the remedy."""

    line: int
    rule: str
    remedy: str


def migrate(text: str, path: str = "kernel.py") -> tuple[str, list[Left]]:
    """Rewrite a file of `neuronxcc.nki`, and mark what is left by hand with a comment.

    Raises:
        ValueError: it is not Python, or imports no neuronxcc.
    """
    tree = Sources("0.6").add(path, text).tree
    names = Names(tree)
    if not any(name.partition(".")[0] == "neuronxcc" for name in names.dotted.values()):
        raise ValueError(f"{path} imports no neuronxcc: it is not of the Beta dialect")
    new = File(text, tree, names).migrated()
    new = _linted(new, path)
    left = []
    for number, line in enumerate(lines_of(new), 1):
        if line.lstrip().startswith(MARK):
            rule, _, remedy = line.strip().removeprefix(MARK).partition("; ")
            left.append(Left(number, rule, remedy))
    return new, left


def _linted(text: str, path: str) -> str:
    """The text with a comment above each statement that a line of NKI still refuses."""
    lines = lines_of(text)
    tree = ast.parse(text)
    starts = {}
    for node in ast.walk(tree):  # outer statements first
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
            starts |= dict.fromkeys(range(first, (node.end_lineno or first) + 1), first)
    broken = set()
    for nki in LINES:
        sources = Sources(nki)
        for error in findings(sources, sources.add(path, text).kernels()):
            if error.path != path or error.severity != "error":
                continue
            first = starts.get(error.line, error.line)
            if first < 2 or not lines[first - 2].lstrip().startswith(MARK):
                broken.add((first, error.rule))
    for number, rule in sorted(broken, reverse=True):
        indent = re.match(r"[ \t]*", lines[number - 1])
        only = f" (NKI {RULES[rule].line})" if RULES[rule].line else ""
        note = f"{MARK}{rule}; {RULES[rule].remedy}{only}\n"
        lines.insert(number - 1, (indent[0] if indent else "") + note)
    return "".join(lines)


def read(path: Path) -> str:
    """A file's text. Raises ValueError for what is no Python source."""
    if path.suffix == ".ipynb":
        raise ValueError(f"{path} is a notebook; save its kernels as a .py file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as Python source") from None
