"""Troubleshooting quotes errors that the package really has: the page cannot go stale."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from mktestdocs import grab_code_blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
PREFIX = re.compile(r"(neuronmm|warning|[A-Z]\w+Error): ")
LEAST = 10
"""Characters of a message besides its values: a message of values alone would match any line."""
OWN_SHARE = 0.4
"""Of a line, what must be the package's own words."""


def messages(source: str) -> list[list[str]]:
    """Return every text of a module: its constant parts, with a value between two of them."""
    found: list[list[str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [""]
            for value in node.values:
                if isinstance(value, ast.Constant):
                    parts[-1] += str(value.value)
                else:
                    parts.append("")
            found.append(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append([node.value])
    return found


@cache
def own_messages() -> list[list[str]]:
    paths = sorted((ROOT / "src").rglob("*.py"))
    return [parts for path in paths for parts in messages(path.read_text(encoding="utf-8"))]


def own_words(line: str, known: list[list[str]]) -> int:
    """Return how many characters of a line come from messages, also from one within another."""
    most = 0
    for parts in known:
        if not all(part in line for part in parts):  # spares most of the matching
            continue
        match = re.fullmatch(r"(?:\S+: )?" + "(.+)".join(map(re.escape, parts)), line)
        own = sum(map(len, parts))
        if match and own >= LEAST:
            most = max(most, own + sum(own_words(value, known) for value in match.groups()))
    return most


def is_message(line: str, known: list[list[str]]) -> bool:
    """Whether a line is one of the messages, or one after the name of what it is about."""
    return own_words(line, known) >= OWN_SHARE * len(line)


def quoted() -> list[str]:
    blocks = grab_code_blocks(PAGE.read_text(encoding="utf-8"), lang="text")
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.mark.parametrize("line", quoted())
def test_quoted_lines_are_in_the_source(line):
    assert PREFIX.match(line)
    assert is_message(PREFIX.sub("", line, count=1), own_messages()), line


def test_the_page_quotes_many():
    assert len(quoted()) >= 30


def test_what_is_not_in_the_source_is_found():
    source = "raise ValueError(f'{name} must be at least {least} tokens, got {found}; use more')"
    known = messages(source)
    assert known[0] == ["", " must be at least ", " tokens, got ", "; use more"]
    assert is_message("text must be at least 2 tokens, got 1; use more", known)
    assert is_message("small: text must be at least 2 tokens, got 1; use more", known)
    for stale in (
        "text must be at least 2 tokens, got 1; use less",
        "text must be at least 2 tokens",
        "text must be at least 2 tokens, got 1; use more, or fewer",
    ):
        assert not is_message(stale, known)
    # Values alone are no message, or any line would be one.
    assert not is_message("anything: goes", messages("f'{a}: {b}'"))
