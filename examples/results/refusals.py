"""Every refusal and warning of the simulated NeuronCore, read from its source, by rule.

A message is an f-string: what it fills in is shown as an ellipsis. Where a function passes on what
its callers say, each caller's words are filled in.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from sources import ROOT

from neuroncore.checks.lint_rules import RULES
from neuroncore.cli.findings import RUN_RULES, of_message, source_of

_SOURCE = ROOT / "neuroncore" / "src" / "neuroncore"
_REPORTS = {"refuse", "note", "NkiValidationError", "CapacityError", "NkiWarning", "TypeError"}
"""TypeError: a dtype or an operator that is none."""
_LATER = ", allowed from NKI 0.7 on"
"""What the column of the line says, too."""
_APART = ("cli", "calibration", "judge", "migrate")
"""Folders whose messages are of bad input, not of a kernel."""


class _Function(NamedTuple):
    """A function, and the calls in it that report something."""

    node: ast.FunctionDef
    reports: list[ast.Call]


def lint_rules() -> str:
    """A table of the rules that `lint` has."""
    rows = [
        f"| `{name}` | {rule.line or 'both'} | {_cell(rule.what.removesuffix(_LATER))} "
        f"| {_cell(rule.remedy)} "
        f"| {source_of(name)} |"
        for name, rule in sorted(RULES.items())
    ]
    return "\n".join(["| rule | NKI | what | remedy | source |", "| --- " * 5 + "|", *rows])


def run_rules() -> str:
    """A section for each rule of a run: its source, and the messages that it has."""
    messages: defaultdict[str, set[str]] = defaultdict(set)
    for message in _messages():
        messages[of_message(message, True, ("kernel.py", 1)).rule].add(message)
    parts: list[str] = []
    for name, rule in RUN_RULES.items():
        if messages[name]:
            parts += [
                f"### {name}\n\n{rule.what[0].upper()}{rule.what[1:]}. Source: {rule.source}.\n"
            ]
            parts += [f"- {_cell(message)}" for message in sorted(messages[name])]
            parts += [""]
    return "\n".join(parts).rstrip()


def _messages() -> Iterator[str]:
    """Each message of each report; one that only passes on another's words is left out."""
    functions, calls = _functions()
    for function in functions:
        for report in function.reports:
            for text in _texts(function.node, report.args[0], calls):
                if len(re.findall(r"[A-Za-z]{2,}", text)) > 1:
                    yield re.sub(r" \[…:…\]$", "", text)  # the kernel's file and line


def _functions() -> tuple[list[_Function], dict[str, list[ast.Call]]]:
    """All that report something, and the calls of every function by its name."""
    functions: list[_Function] = []
    calls: defaultdict[str, list[ast.Call]] = defaultdict(list)
    for path in sorted(_SOURCE.rglob("*.py")):
        if path.relative_to(_SOURCE).parts[0] in _APART:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                calls[_name(node.func)].append(node)
            if isinstance(node, ast.FunctionDef) and node.name not in _REPORTS:
                inner = {id(n) for f in ast.walk(node) if f is not node
                         and isinstance(f, ast.FunctionDef) for n in ast.walk(f)}  # fmt: skip
                reports = [
                    call
                    for call in ast.walk(node)
                    if isinstance(call, ast.Call) and _name(call.func) in _REPORTS
                    and call.args and id(call) not in inner
                ]  # fmt: skip
                functions.append(_Function(node, reports))
    return functions, calls


def _texts(
    function: ast.FunctionDef, value: ast.expr, calls: dict[str, list[ast.Call]]
) -> Iterator[str]:
    """What an expression may say: for each caller, where a parameter says it."""
    parameters = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
    used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} & {*parameters}
    said = _text(function, value, {})
    callers = calls.get(function.name, []) if used else []
    if len(re.findall(r"[a-z]{2,}", said)) >= 6 or not callers:
        yield said
        return
    for call in callers:
        given = dict(zip(parameters, call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        yield _text(
            function, value, {name: _text(None, given[name], {}) for name in used & {*given}}
        )


def _text(function: ast.FunctionDef | None, value: ast.expr, given: dict[str, str]) -> str:
    """The words of an expression; what is computed is an ellipsis."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else "…"
    if isinstance(value, ast.JoinedStr):
        return re.sub(r"…(…)+", "…", "".join(_text(function, part, given) for part in value.values))
    if isinstance(value, ast.FormattedValue):
        return _text(function, value.value, given)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _text(function, value.left, given) + _text(function, value.right, given)
    if isinstance(value, ast.Name) and value.id in given:
        return given[value.id]
    if isinstance(value, ast.Name) and function is not None:
        assigned = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and [_name(t) for t in node.targets] == [value.id]
        ]
        if assigned and isinstance(assigned[0], (ast.JoinedStr, ast.Constant, ast.BinOp)):
            return _text(function, assigned[0], given)
    return "…"


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _cell(text: str) -> str:
    """Text as Markdown has it, on one line."""
    plain = " ".join(text.split())
    return re.sub(r"([*_|<\[\]`\\])", r"\\\1", plain)
