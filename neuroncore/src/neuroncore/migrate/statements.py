"""Statements: what they bind, and what stands in their place."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

from neuroncore import language
from neuroncore.checks.lint_source import FunctionNode
from neuroncore.dtypes import DType
from neuroncore.legacy.names import OPERATORS
from neuroncore.migrate.names import NKI
from neuroncore.migrate.rewrite import Scope
from neuroncore.migrate.text import MARK
from neuroncore.migrate.values import ByHandError, Value, view


def is_name(node: ast.AST, name: str) -> bool:
    """Whether a node is this name."""
    return isinstance(node, ast.Name) and node.id == name


def assigned(node: ast.AST) -> list[str]:
    """The names that a node binds."""
    named = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return [n.id for n in named if isinstance(n.ctx, ast.Store)]


def own(node: ast.AST | None) -> list[Any]:
    """The simple statements of a function, without those of functions inside."""
    nodes = []
    for child in ast.iter_child_nodes(node) if node is not None else ():
        if isinstance(child, FunctionNode | ast.ClassDef | ast.expr):
            continue
        nodes += own(child)
        if isinstance(child, ast.stmt) and not hasattr(child, "body"):
            nodes.append(child)
    return nodes


def mentions(value: Value, name: str) -> bool:
    """Whether an index has a name in one of its sizes."""
    texts = [value.offset, *[t for term in value.terms.values() for t in term]]
    word = re.compile(rf"\b{re.escape(name)}\b")
    return any(map(word.search, texts)) or any(mentions(part, name) for part in value.parts)


def forget(scope: Scope, name: str) -> None:
    """A name has another value now: so have the texts that mention it."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    scope.env.pop(name, None)
    for key, value in scope.env.items():
        if value.kind in ("index", "mask", "grid") and mentions(value, name):
            scope.env[key] = Value("?", value.kind)
            continue
        is_stale = value.shape and any(map(word.search, value.shape))
        dtype = "" if word.search(value.dtype) else value.dtype
        scope.env[key] = replace(value, shape=None if is_stale else value.shape, dtype=dtype)


def join(scope: Scope, ends: list[dict[str, Value]]) -> None:
    """What is known after any of several branches."""
    scope.env.clear()
    for name in {name for end in ends for name in end}:
        values = [end[name] for end in ends if name in end]
        first = values[0]
        if all(value == first for value in values):
            scope.env[name] = first
        elif any(value.kind in ("index", "mask", "grid") for value in values):
            scope.env[name] = Value("?", "index")
        elif all(value.kind == "tile" for value in values):
            shapes, dtypes, memories = (
                {getattr(value, what) for value in values} for what in ("shape", "dtype", "memory")
            )
            scope.env[name] = replace(
                first,
                shape=first.shape if len(shapes) == 1 else None,
                dtype=first.dtype if len(dtypes) == 1 else "",
                memory=first.memory if len(memories) == 1 else "",
            )


def new_lines(node: ast.stmt, scope: Scope) -> list[str] | None:
    """The statements in a statement's place; None where it stays as it is."""
    match node:
        case ast.Assign([ast.Name(name)], ast.Attribute() as value) if _is_dtype(value, scope):
            forget(scope, name)
            return _plain(node, f"{name} = {scope.dtype(value)}", scope)
        case ast.Assign([ast.Name(name)], value):
            return _bound(node, name, value, scope)
        case ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
            return _bound(node, name, value, scope)
        case ast.Assign([ast.Tuple(elts) | ast.List(elts)], value):
            return _unpacked(node, elts, value, scope)
        case ast.Assign([ast.Subscript() as target], value):
            to = scope.value(target)
            if to.kind == "tile":
                scope.into(to, value)
                return scope.lines
            if to.kind == "blocks":
                raise ByHandError("block-dimension")
            return _plain(node, f"{to.text} = {view(scope.value(value))}", scope)
        case ast.AugAssign(target, op, value):
            to = scope.value(target)
            if to.kind == "tile":
                if isinstance(op, ast.Add):
                    scope.into(to, value, adding=True)
                else:
                    scope.binary(_operator(op), to, scope.value(value), to=to)
                return scope.lines
            if isinstance(target, ast.Name):
                forget(scope, target.id)
            return None
        case ast.Expr(value) if isinstance(value, ast.Call):
            read = scope.value(value)
            if read.kind == "python" or not scope.lines:
                return _plain(node, view(read), scope)
            return scope.lines
        case ast.Return(ast.expr() as value):
            return _plain(node, f"return {view(scope.value(value))}", scope)
        case _:
            return _plain(node, scope.rewritten(node), scope)


def _is_dtype(node: ast.expr, scope: Scope) -> bool:
    """Whether it is one of NumPy's dtypes, which kernels named theirs by."""
    package, _, name = scope.names.of(node).rpartition(".")
    return package == "numpy" and isinstance(getattr(language, name, None), DType)


def _operator(op: ast.operator) -> str:
    if type(op).__name__ not in OPERATORS:
        raise ByHandError("removed")
    return OPERATORS[type(op).__name__]


def _plain(node: ast.stmt, text: str, scope: Scope) -> list[str] | None:
    return None if not scope.lines and text == ast.unparse(node) else [*scope.lines, text]


def _bound(node: ast.stmt, name: str, value: ast.expr, scope: Scope) -> list[str] | None:
    if scope.names.of(value).startswith(f"{NKI}.compiler."):
        return [f"{MARK}allocator; remove what computes addresses, the compiler places tiles"]
    again = any(is_name(n, name) for n in ast.walk(value))
    bound = scope.value(value, "" if again else name)
    forget(scope, name)
    if bound.kind in ("index", "mask", "grid"):
        scope.env[name] = bound
        return []
    text = view(bound)
    if bound.kind in ("tile", "blocks"):
        scope.env[name] = replace(bound, text=name, base=None, parts=[])
        if text == name:
            return scope.lines or None
    return _plain(node, f"{name} = {text}", scope) if not isinstance(node, ast.AnnAssign) else (
        [*scope.lines, f"{name} = {text}"] if scope.lines else None)  # fmt: skip


def _unpacked(
    node: ast.stmt, elts: list[ast.expr], value: ast.expr, scope: Scope
) -> list[str] | None:
    names = [e.id for e in elts if isinstance(e, ast.Name)]
    if len(names) < len(elts):
        new = scope.rewritten(node)
        for name in assigned(node):
            forget(scope, name)
        return _plain(node, new, scope)
    if isinstance(value, ast.Tuple) and len(value.elts) == len(elts):
        lines: list[str] = []
        values = [scope.value(v) for v in value.elts]
        if all(v.kind == "python" for v in values):
            for name in names:
                forget(scope, name)
            new = f"{', '.join(names)} = {', '.join(v.text for v in values)}"
            return None if ast.parse(new).body[0] and same(new, node) else [*scope.lines, new]
        lines = list(scope.lines)
        for name, v in zip(names, values, strict=True):
            forget(scope, name)
            if v.kind in ("tile", "blocks"):
                lines.append(f"{name} = {view(v)}")
                scope.env[name] = replace(v, text=name, base=None, parts=[])
            elif v.kind == "python":
                lines.append(f"{name} = {v.text}")
            else:
                scope.env[name] = v
        return lines
    bound = scope.value(value)
    for name in names:
        forget(scope, name)
    if bound.kind == "grid":
        scope.env |= dict(zip(names, bound.parts, strict=True))
        return []
    if (
        isinstance(value, ast.Attribute)
        and value.attr == "shape"
        and isinstance(value.value, ast.Name)
        and value.value.id in scope.env
    ):
        of = scope.env[value.value.id]
        shape = [f"{of.text}.shape[{i}]" if n == "_" else n for i, n in enumerate(names)]
        scope.env[value.value.id] = replace(of, shape=tuple(shape))
    if scope.lines:
        return [*scope.lines, f"{', '.join(map(ast.unparse, elts))} = {bound.text}"]
    return None


def same(text: str, node: ast.stmt) -> bool:
    """Whether a statement has this text."""
    return ast.unparse(ast.parse(text)) == ast.unparse(node)
