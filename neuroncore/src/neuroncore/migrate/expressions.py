"""Expressions of the Beta dialect: indices, masks, tiles and parts of them."""

from __future__ import annotations

import ast
import copy
from dataclasses import replace
from typing import Any

from neuroncore.legacy import names as beta
from neuroncore.migrate.instructions import Instructions
from neuroncore.migrate.names import NL
from neuroncore.migrate.values import (
    ByHandError,
    Value,
    added,
    fixed,
    index,
    scaled,
    shape_of,
    tidy,
    total,
    view,
)

_CONDITIONAL = (
    ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp,
)  # fmt: skip


class Expressions(Instructions):
    """What expressions mean; calls are left to who knows them."""

    def value(self, node: ast.expr, name: str = "") -> Value:
        """The value of an expression; its instructions go before, their result to `name`."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        before = len(self.lines)
        value = method(node, name) if method else None
        if value is None:
            del self.lines[before:]
        return value if value is not None else self._plain(node)

    def _plain(self, node: ast.expr) -> Value:
        """An expression of Python, whose parts may be rewritten."""
        before = len(self.lines)
        text = ast.unparse(node) if isinstance(node, ast.Constant) else self.rewritten(node)
        if isinstance(node, _CONDITIONAL) and len(self.lines) > before:
            raise ByHandError("nested")
        return Value(text)

    def rewritten(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node of Python with what is in it rewritten."""
        new = copy.deepcopy(node)
        self._inside(new)
        return ast.unparse(new)

    def _inside(self, node: ast.AST) -> None:
        """Rewrite the expressions in a node."""
        for name, child in ast.iter_fields(node):
            if isinstance(child, list):
                setattr(node, name, [self._part(c) for c in child])
            elif isinstance(child, ast.AST):
                setattr(node, name, self._part(child))

    def _part(self, node: Any) -> Any:
        passed = ast.Slice | ast.Tuple | ast.Starred | ast.FormattedValue
        if not isinstance(node, ast.expr) or isinstance(node, passed):
            if isinstance(node, ast.AST):
                self._inside(node)
            return node
        new = self.value(node)
        if new.kind in ("index", "mask", "grid"):
            raise ByHandError("index-pattern")
        return ast.parse(view(new), mode="eval").body

    def _name(self, node: ast.Name, _: str) -> Value | None:
        known = self.env.get(node.id)
        if known is not None and known.text == "?":
            raise ByHandError("stale-index")
        return known

    def _attribute(self, node: ast.Attribute, _: str) -> Value | None:
        dotted = self.names.of(node)
        if dotted.startswith(f"{NL}.fp32."):
            return Value("-3.4028235e38" if node.attr == "min" else "3.4028235e38")
        if isinstance(node.value, ast.Name) and node.value.id in self.env:
            of = self.env[node.value.id]
            if of.kind == "grid" and node.attr in "pxyz":
                return of.parts["pxyz".index(node.attr)]
            if of.kind == "blocks" and node.attr != "dtype":
                raise ByHandError("block-dimension")
            if of.kind == "blocks":
                return Value(of.dtype)
        return None

    def _unaryop(self, node: ast.UnaryOp, name: str) -> Value | None:
        operand = self.value(node.operand)
        if operand.kind == "index" and isinstance(node.op, ast.USub):
            return scaled(operand, "-1")
        if operand.kind == "tile" and isinstance(node.op, ast.USub):
            return self.binary("multiply", operand, Value("-1.0"), name=name)
        return None

    def _binop(self, node: ast.BinOp, name: str) -> Value | None:
        return self._operate(node.op, node.left, node.right, name)

    def _compare(self, node: ast.Compare, name: str) -> Value | None:
        if len(node.ops) > 1:
            return None
        return self._operate(node.ops[0], node.left, node.comparators[0], name)

    def _operate(self, op: Any, left: ast.expr, right: ast.expr, name: str) -> Value | None:
        a, b = self.value(left), self.value(right)
        kinds = {a.kind, b.kind}
        if "mask" in kinds and isinstance(op, ast.BitAnd):
            return Value("", "mask", parts=a.parts + b.parts)
        if "index" in kinds:
            return _on_index(op, a, b)
        if "tile" in kinds:
            if type(op).__name__ not in beta.OPERATORS:
                raise ByHandError("removed")
            return self.binary(beta.OPERATORS[type(op).__name__], a, b, name=name)
        if kinds & {"grid", "blocks"}:
            raise ByHandError("block-dimension" if "blocks" in kinds else "index-pattern")
        return None

    def _subscript(self, node: ast.Subscript, _: str) -> Value | None:
        if self.names.of(node.value) == f"{NL}.mgrid":
            slices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            axes = []
            for i, s in enumerate(slices):
                if not isinstance(s, ast.Slice) or s.upper is None or s.step is not None:
                    raise ByHandError("index-pattern")
                low = self.value(s.lower).text if s.lower else "0"
                size = total((1, self.value(s.upper).text), (-1, low))
                axes.append(index(low, {i - len(slices): ("1", size)}))
            return Value("", "grid", parts=axes)
        base = self.value(node.value)
        if base.kind in ("python", "mask"):
            return None
        keys = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if base.kind == "index":
            colons = [i for i, k in enumerate(keys) if isinstance(k, ast.Slice)]
            if len(colons) != 1 or [*base.terms] != [-1]:
                raise ByHandError("index-pattern")
            return index(base.offset, {colons[0] - len(keys): base.terms[-1]})
        if base.kind == "blocks":
            base, keys = self._blocks(base, keys)
        return self.part(base, keys) if base.kind == "tile" and keys else base

    def _blocks(self, base: Value, keys: list[ast.expr]) -> tuple[Value, list[ast.expr]]:
        while base.blocks and keys:
            key = self.value(keys[0]) if not isinstance(keys[0], ast.Slice) else None
            if key is None or key.kind != "python":
                raise ByHandError("block-dimension")
            left = base.blocks - 1
            kind = "blocks" if left else "tile"
            base = replace(base, text=f"{base.text}[{key.text}]", blocks=left, kind=kind)
            keys = keys[1:]
        return base, keys

    def part(self, base: Value, keys: list[ast.expr]) -> Value:
        """base[keys]."""
        if base.base is not None:
            raise ByHandError("index-pattern")
        indexed = [k if isinstance(k, ast.Slice) else self.value(k) for k in keys]
        indexed = [
            k.parts[i] if isinstance(k, Value) and k.kind == "grid" else k
            for i, k in enumerate(indexed)
        ]
        base = replace(base, dtype=base.dtype_text())
        if any(isinstance(k, Value) and k.kind not in ("python", "index", "grid") for k in indexed):
            raise ByHandError("indirect")
        if any(isinstance(k, Value) and k.kind == "index" for k in indexed):
            values = [k for k in indexed if isinstance(k, Value)]
            if len(values) < len(indexed):
                raise ByHandError("index-pattern")
            parts = [k if k.kind == "index" else index(k.text, {}) for k in values]
            parts = [fixed(p, self.places) for p in parts]
            made = replace(base, text="", base=base, parts=parts)
            if not any(p.terms for p in parts):
                return replace(base, text=f"{base.text}[{', '.join(p.offset for p in parts)}]",
                               shape=None)  # fmt: skip
            return replace(made, shape=shape_of(made))
        shape: list[str] | None = []
        texts = []
        for dim, k in enumerate(indexed):
            text = self._slice_text(k) if isinstance(k, ast.Slice) else k.text
            texts.append(text)
            dots = text == "..."
            if dots and len(indexed) == 1:
                return base
            if isinstance(k, ast.Slice) and shape is not None and not dots:
                shape.append(_extent(text, base, dim))
            elif isinstance(k, Value) and text.startswith((f"{self.names.nl}.ds(", "slice(")):
                call = ast.parse(text, mode="eval").body
                assert isinstance(call, ast.Call)
                if shape is not None:
                    shape.append(ast.unparse(call.args[1]))
            elif dots:
                shape = None
        if shape is not None and base.shape is not None:
            shape += base.shape[len(indexed) :]
        elif shape is not None and len(shape) < 2 and base.memory != "hbm":
            shape = None
        if shape is not None and base.memory != "hbm" and len(shape) == 1:
            first = isinstance(indexed[0], ast.Slice) or "ds(" in texts[0]
            shape = [*shape, "1"] if first else ["1", *shape]
        if base.memory == "hbm" and shape is not None and len(shape) == 1 and len(indexed) > 1:
            last = max(
                i for i, k in enumerate(indexed) if isinstance(k, Value) and "ds(" not in k.text
            )
            texts[last] = f"{texts[last]}:{total((1, texts[last]), (1, '1'))}"
            shape = [*shape, "1"] if last == len(indexed) - 1 else ["1", *shape]
        made = f"{base.text}[{', '.join(texts)}]"
        return replace(base, text=made, shape=tuple(shape) if shape else None)

    def _slice_text(self, node: ast.Slice) -> str:
        ends = [self.value(n).text if n else "" for n in (node.lower, node.upper)]
        step = f":{self.value(node.step).text}" if node.step else ""
        return ":".join(ends) + step


def _on_index(op: Any, a: Value, b: Value) -> Value:
    one = Value("1")
    match op:
        case ast.Add():
            return added(a, b)
        case ast.Sub():
            return added(a, b, -1)
        case ast.Mult() if a.kind != b.kind:
            return scaled(a, b.text) if a.kind == "index" else scaled(b, a.text)
        case ast.Lt():
            part = added(added(b, a, -1), one, -1)
        case ast.LtE():
            part = added(b, a, -1)
        case ast.Gt():
            part = added(added(a, b, -1), one, -1)
        case ast.GtE():
            part = added(a, b, -1)
        case _:
            raise ByHandError("index-pattern")
    return Value("", "mask", parts=[part])


def _extent(text: str, base: Value, dim: int) -> str:
    """The size of a slice."""
    start, _, rest = text.partition(":")
    stop, _, step = rest.partition(":")
    start, stop = start or "0", stop or base.size(dim)
    count = total((1, stop), (-1, start))
    return count if not step or step == "1" else tidy(f"-(-({count}) // ({step}))")
