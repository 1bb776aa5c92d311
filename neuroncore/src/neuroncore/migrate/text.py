"""Source text: its lines, comments and long calls."""

from __future__ import annotations

import ast
import io
import re
import tokenize

MARK = "# neuroncore migrate: "


def lines_of(text: str) -> list[str]:
    """The lines as Python counts them: a form feed, or a separator of Unicode, ends none."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


DEEPER = "#\0"
"""A line that says by how much the lines after it are moved in."""


def deepened(text: str) -> str:
    """The text with lines moved in between those that say so."""
    lines, pad = [], ""
    for line in lines_of(text):
        if line.startswith(DEEPER):
            pad = line.removeprefix(DEEPER).rstrip("\n")
        else:
            lines.append(pad + line if line.strip() else line)
    return "".join(lines)


def wrapped(line: str, indent: int) -> list[str]:
    """A statement of a call in lines of up to 100 characters."""
    pad = re.match(r" *", line)
    inner = len(pad[0]) if pad else 0
    if indent + len(line) <= 100:
        return [line]
    head, _, rest = line.partition("(")
    if not rest.endswith(")"):
        return [line]
    call = ast.parse(f"f({rest}", mode="eval").body
    assert isinstance(call, ast.Call)
    parts = [
        *map(ast.unparse, call.args),
        *[f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords],
    ]
    rows, row = [], ""
    for part in parts:
        if row and indent + inner + 6 + len(row) + len(part) > 100:
            rows, row = [*rows, row], ""
        row += f"{' ' * bool(row)}{part},"
    space = " " * (inner + 4)
    return [f"{head}(", *[space + r for r in [*rows, row]], f"{' ' * inner})"]


def comments(text: str) -> list[str]:
    """The comments of a statement that is replaced, but for one at its end."""
    reader = io.StringIO(text).readline
    try:
        comments = [t for t in tokenize.generate_tokens(reader) if t.type == tokenize.COMMENT]
    except (tokenize.TokenError, IndentationError):
        return []
    return [t.string for t in comments]
