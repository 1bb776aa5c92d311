"""`neuroncore migrate`: files of the Beta dialect of NKI, rewritten statement by statement."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neuroncore.checks.lint import findings
from neuroncore.checks.lint_rules import LINES, RULES
from neuroncore.checks.lint_source import Sources
from neuroncore.legacy.names import OPERATORS
from neuroncore.migrate.rewrite import FunctionNode, Names, Scope, comments
from neuroncore.migrate.tables import BY_HAND, GONE, LOOPS
from neuroncore.migrate.values import ByHandError, OverloadedError, Value, unfixed, view

MARK = "# neuroncore migrate: "
_NKI = "neuronxcc.nki"


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
    found = []
    for number, line in enumerate(lines_of(new), 1):
        if line.lstrip().startswith(MARK):
            rule, _, remedy = line.strip().removeprefix(MARK).partition("; ")
            found.append(Left(number, rule, remedy))
    return new, found


def _linted(text: str, path: str) -> str:
    """The text with a comment above each statement that a line of NKI still refuses."""
    lines = lines_of(text)
    tree = ast.parse(text)
    starts = {}
    for node in ast.walk(tree):  # outer statements first
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
            starts |= dict.fromkeys(range(first, (node.end_lineno or first) + 1), first)
    found = set()
    for nki in LINES:
        sources = Sources(nki)
        for error in findings(sources, sources.add(path, text).kernels()):
            if error.path != path or error.severity != "error":
                continue
            first = starts.get(error.line, error.line)
            if first < 2 or not lines[first - 2].lstrip().startswith(MARK):
                found.add((first, error.rule))
    for number, rule in sorted(found, reverse=True):
        indent = re.match(r"[ \t]*", lines[number - 1])
        only = f" (NKI {RULES[rule].line})" if RULES[rule].line else ""
        note = f"{MARK}{rule}; {RULES[rule].remedy}{only}\n"
        lines.insert(number - 1, (indent[0] if indent else "") + note)
    return "".join(lines)


def lines_of(text: str) -> list[str]:
    """The lines as Python counts them: a form feed, or a separator of Unicode, ends none."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


class File:
    """A file's text and the edits to it."""

    def __init__(self, text: str, tree: ast.Module, names: Names) -> None:
        self.text, self.tree, self.names = text, tree, names
        self.lines = lines_of(text)
        self.removed: set[ast.stmt] = set()
        self.edits: list[tuple[int, int, str]] = []
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def migrated(self) -> str:
        """The new text."""
        scope = Scope(self.names, {}, set())
        for node in self.tree.body:
            self.statement(node, scope)
        text = self.text
        for start, end, new in sorted(self.edits, key=lambda edit: edit[:2], reverse=True):
            text = text[:start] + new + text[end:]
        text = _deepened(text)
        wanted = re.search(rf"\b{self.names.nisa}\.", text)
        if wanted and f"as {self.names.nisa}\n" not in text:
            first = re.search(r"^import nki.*\n", text, re.MULTILINE)
            at = first.end() if first else 0
            text = f"{text[:at]}import nki.isa as {self.names.nisa}\n{text[at:]}"
        return text

    def at(self, line: int, column: int) -> int:
        """Where a place of `ast`, whose columns count bytes, lies in the text."""
        own = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(own)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Begin and end of a node."""
        begin = self.at(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        return begin, self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def indent(self, line: int) -> str:
        """The white space before a line."""
        found = re.match(r"[ \t]*", self.lines[line - 1])
        return found[0] if found else ""

    def replaced(self, node: ast.stmt, lines: list[str]) -> None:
        """Put new statements in a statement's place; nothing where there are none."""
        begin, end = self.span(node)
        indent = self.indent(node.lineno)
        kept = [] if node.lineno == node.end_lineno else comments(self.text[begin:end])
        if self.text[self.starts[node.lineno - 1] : begin].strip():  # after a colon or semicolon
            if any(line.startswith(("for ", "    ")) for line in lines):
                raise ByHandError("nested")
            self.edits.append((begin, end, "; ".join(lines) or "pass"))
            return
        if not lines:
            self.removed.add(node)
        lines = [row for line in lines for row in wrapped(line, len(indent))]
        new = f"\n{indent}".join([*kept, *lines])
        rest = self.text[end : self.starts[node.end_lineno or 0]]
        if not new:
            end += len(rest) - len(rest.lstrip(" "))
            if not rest.strip():
                begin, end = self.starts[node.lineno - 1], self.starts[node.end_lineno or 0]
        self.edits.append((begin, end, new))

    def marked(self, node: ast.stmt, rule: str) -> None:
        """A comment above a statement that is left."""
        first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
        note = f"{self.indent(first)}{MARK}{rule}; {BY_HAND[rule][1]}\n"
        self.edits.append((self.starts[first - 1], self.starts[first - 1], note))

    # statements

    def statement(self, node: ast.stmt, scope: Scope) -> None:
        """Rewrite a statement and those inside."""
        try:
            match node:
                case ast.Import() | ast.ImportFrom():
                    self._imports(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._function(node, scope)
                case ast.ClassDef():
                    self._block(node.body, Scope(self.names, {}, set()))
                case _ if hasattr(node, "body") or isinstance(node, ast.Match):
                    self._compound(node, scope)
                case _:
                    self._simple(node, scope)
        except (ByHandError, KeyError, IndexError) as left:  # the latter: an argument is missing
            self.marked(node, str(left) if isinstance(left, ByHandError) else "result")
            for name in _assigned(node):
                scope.env.pop(name, None)

    def _compound(self, node: ast.stmt, scope: Scope) -> None:
        for name in ("iter", "test"):
            head = getattr(node, name, None)
            if head is not None:
                scope.lines = []
                new = scope.value(head)
                if scope.lines:
                    raise ByHandError("nested")
                if new.kind == "python" and new.text != ast.unparse(head):
                    self.edits.append((*self.span(head), new.text))
        if isinstance(node, ast.For | ast.While):
            begins = _assigned(node.target) if isinstance(node, ast.For) else []
            added = {n.target.id for n in ast.walk(node) if isinstance(n, ast.AugAssign)
                     and isinstance(n.target, ast.Name)}  # fmt: skip
            for name in {*_assigned(node)}:
                own = scope.env.get(name)
                if own is None or own.kind != "tile" or name not in added:
                    forget(scope, name)
                if own is not None and name not in begins:
                    scope.env.setdefault(name, own)
        before, ends = dict(scope.env), []
        blocks = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        inner = [*getattr(node, "handlers", []), *getattr(node, "cases", [])]
        for block in [*blocks, *[each.body for each in inner]]:
            if not isinstance(node, ast.For | ast.While | ast.With):
                scope.env.clear()
                scope.env |= before
            self._block(block, scope)
            ends.append(dict(scope.env))
        if not isinstance(node, ast.For | ast.While | ast.With):
            _join(scope, ends)

    def _block(self, block: list[ast.stmt], scope: Scope) -> None:
        for node in block:
            self.statement(node, scope)
        if block and self.removed.issuperset(block):
            begin = self.starts[block[0].lineno - 1]
            self.edits.append((begin, begin, f"{self.indent(block[0].lineno)}pass\n"))

    def _function(self, node: FunctionNode, outer: Scope) -> None:
        is_kernel = self._decorators(node)
        env = dict(outer.env)
        later = [n for n in _own(outer.function) if n.lineno > (node.end_lineno or 0)]
        for name in {name for n in later for name in _assigned(n)}:  # when it is called
            for key, value in env.items():
                if value.kind in ("index", "mask", "grid") and _mentions(value, name):
                    env[key] = Value("?", value.kind)
        scope = Scope(self.names, env, _sums(node, self.names), node)
        used = [self.names.of(n) for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Name)]
        is_device = any(dotted.startswith((f"{_NKI}.language.", f"{_NKI}.isa.")) for dotted in used)
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            forget(scope, a.arg)
            if a.annotation is not None and self.names.of(a.annotation) == f"{_NKI}.tensor":
                self.edits.append((*self.span(a.annotation), f"{self.names.nl}.ndarray"))
            if is_device and (memory := self._memory(node, a.arg, is_kernel)) is not None:
                env[a.arg] = Value(a.arg, "tile", memory=memory)
        if node.returns is not None and self.names.of(node.returns) == f"{_NKI}.tensor":
            self.edits.append((*self.span(node.returns), f"{self.names.nl}.ndarray"))
        if (
            is_kernel
            and self._stores(node)
            and not any(isinstance(n, ast.Return) and n.value for n in ast.walk(node))
        ):
            self.marked(node, "output-parameter")
        try:
            if outer.function is None:  # one inside of a kernel stands in its loops
                self._grid(node, scope, is_kernel)
        except ByHandError as left:
            self.names.grids.discard(node.name)
            self.marked(node, str(left))
        self._block(node.body, scope)

    def _memory(self, node: FunctionNode, name: str, is_kernel: bool) -> str | None:
        """The memory of a parameter that is a tensor: "" for an unknown one, None for no tensor."""
        found = None
        for n in ast.walk(node):
            if isinstance(n, ast.Attribute | ast.Subscript) and _is(n.value, name):
                is_tensor = isinstance(n, ast.Subscript) or n.attr in ("shape", "dtype", "reshape")
                found = "" if is_tensor else found
            if not isinstance(n, ast.Call):
                continue
            package, _, function = self.names.of(n.func).rpartition(".")
            if package not in (f"{_NKI}.language", f"{_NKI}.isa") or function in _NO_TENSOR:
                continue
            ends = n.args[:1] + [k.value for k in n.keywords if k.arg in _TENSORS]
            if function in ("load", "store"):
                ends = [e.value if isinstance(e, ast.Subscript) else e for e in ends]
            if any(_is(e, name) for e in ends):
                found = "hbm" if function in ("load", "store") or found == "hbm" else ""
        return "hbm" if found is not None and is_kernel else found

    def _stores(self, node: FunctionNode) -> bool:
        """Whether it stores into a parameter."""
        names = {a.arg for a in node.args.args}
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and n.args]
        ends = [n.args[0] for n in calls if self.names.of(n.func) == f"{_NKI}.language.store"]
        ends = [e.value if isinstance(e, ast.Subscript) else e for e in ends]
        return any(isinstance(e, ast.Name) and e.id in names for e in ends)

    def _decorators(self, node: FunctionNode) -> bool:
        """Leave `nki.jit` alone, and return whether it is there: not on what a kernel calls."""
        has_jit = False
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            dotted = self.names.of(called)
            if not dotted.startswith(f"{_NKI}."):
                continue
            inner = dotted.endswith(".trace") or "mode='trace'" in ast.unparse(decorator)
            kernel = dotted.rpartition(".")[2] in ("jit", "baremetal", "benchmark", "profile")
            begin, end = self.span(decorator)
            if kernel and not has_jit and not inner:
                has_jit = True
                own = isinstance(called, ast.Name) and dotted.endswith(".jit")
                new = ast.unparse(called) if own else f"{self.names.nki}.jit"
                self.edits.append((begin, end, new))
            else:
                line = decorator.lineno
                whole = self.starts[line - 1], self.starts[decorator.end_lineno or line]
                self.edits.append((*whole, ""))
        return has_jit

    def _grid(self, node: FunctionNode, scope: Scope, is_kernel: bool) -> None:
        """Loops over the programs of a launch, from the first use of a program's place on."""
        uses = {f"{_NKI}.language.program_id", f"{_NKI}.language.num_programs"}
        calls = [
            n for n in ast.walk(node) if isinstance(n, ast.Call) and self.names.of(n.func) in uses
        ]
        if not calls:
            return
        called = {getattr(n.func, "id", "") for n in ast.walk(self.tree) if isinstance(n, ast.Call)}
        if node.name in called and not is_kernel:
            raise ByHandError("grid")
        given = [n.args[0] if n.args else ast.Constant(0) for n in calls]
        if not all(isinstance(a, ast.Constant) for a in given):
            raise ByHandError("grid")
        axes = 1 + max(int(ast.unparse(a)) for a in given)
        inside = [any(c in ast.walk(s) for c in calls) for s in node.body]
        first = inside.index(True)
        last = len(node.body) - isinstance(node.body[-1], ast.Return)
        rest = node.body[first:last]
        if (
            any("shared_hbm" in ast.unparse(s) for s in rest)
            or any(inside[last:])
            or any(
                isinstance(n, ast.Return)
                for s in rest
                if not isinstance(s, FunctionNode)
                for n in [s, *_own(s)]
            )
        ):
            raise ByHandError("grid")
        unit = self.indent(node.body[0].lineno).removeprefix(self.indent(node.lineno))
        pad = self.indent(rest[0].lineno)
        loops = [f"{pad}{unit * i}for program_{i} in range(grid[{i}]):\n" for i in range(axes)]
        begin, end = self.starts[rest[0].lineno - 1], self.starts[rest[-1].end_lineno or 0]
        self.edits.append((begin, begin, "".join(loops) + f"{_DEEPER}{unit * axes}\n"))
        self.edits.append((end, end, f"{_DEEPER}\n"))
        parameters = [*node.args.args, *node.args.defaults]
        ends = [self.span(p)[1] for p in parameters]
        if node.args.vararg or node.args.kwonlyargs or node.args.kwarg or not ends:
            raise ByHandError("grid")
        default = f"({', '.join('1' * axes)}{',' * (axes == 1)})"
        self.edits.append((max(ends), max(ends), f", grid={default}"))
        scope.env["grid"] = Value("grid")

    def _simple(self, node: ast.stmt, scope: Scope) -> None:
        loops: list[tuple[int, str, str]] = []
        before = dict(scope.env)
        while True:
            scope.env.clear()
            scope.env |= before
            scope.lines = []
            scope.places = {axis: name for axis, name, _ in loops}
            try:
                lines = new_lines(node, scope)
                break
            except OverloadedError as one:
                axis, size = one.args
                axis = unfixed(axis, {a: n for a, n, _ in loops})
                target = node.targets[0] if isinstance(node, ast.Assign) else None
                if not isinstance(target, ast.Subscript):
                    raise ByHandError("index-pattern") from None
                loops.append((axis, scope.name("place"), size))
            finally:
                scope.places = {}
        if lines is None or (len(lines) == 1 and _same(lines[0], node)):
            return
        for depth, (_, name, size) in enumerate(reversed(loops)):
            del depth
            lines = [f"for {name} in range({size}):", *[f"    {line}" for line in lines]]
        self.replaced(node, lines)

    def _imports(self, node: ast.Import | ast.ImportFrom) -> None:
        lines: list[str] = []
        if isinstance(node, ast.Import):
            if not any(a.name.startswith("neuronxcc") for a in node.names):
                return
            for a in node.names:
                lines.append(_import(a.name, a.asname))
        else:
            module = node.module or ""
            if module.partition(".")[0] != "neuronxcc":
                return
            kept = []
            for a in node.names:
                whole = f"{module}.{a.name}"
                if whole in _MODULES:
                    lines.append(_import(whole, a.asname or a.name))
                elif module in _MODULES and a.name not in (*GONE, "*"):
                    kept.append(a.name + (f" as {a.asname}" if a.asname else ""))
                elif module not in _MODULES or a.name == "*":
                    raise ByHandError("import")
            if kept:
                lines.append(f"from {module.removeprefix('neuronxcc.')} import {', '.join(kept)}")
        self.replaced(node, [line for line in lines if line])


_DEEPER = "#\0"
"""A line that says by how much the lines after it are moved in."""


def _deepened(text: str) -> str:
    lines, pad = [], ""
    for line in lines_of(text):
        if line.startswith(_DEEPER):
            pad = line.removeprefix(_DEEPER).rstrip("\n")
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


_MODULES = {_NKI, *[f"{_NKI}.{name}" for name in ("language", "isa", "typing")]}
_NO_TENSOR = (*LOOPS, "par_dim", "arange", "ndarray", "zeros", "ones", "full", "ds", "program_id",
              "activation", "tensor_reduce", "memset", "shared_constant")  # fmt: skip
"""Functions whose first argument is no tensor."""
_TENSORS = ("src", "dst", "data", "data1", "data2", "stationary", "moving", "value", "x", "y")


def _import(dotted: str, name: str | None) -> str:
    new = dotted.removeprefix("neuronxcc.")
    if dotted not in _MODULES or name is None:
        raise ByHandError("import")
    return f"import {new}" if new == name else f"import {new} as {name}"


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _assigned(node: ast.AST) -> list[str]:
    found = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return [n.id for n in found if isinstance(n.ctx, ast.Store)]


def _sums(node: FunctionNode, names: Names) -> set[str]:
    """Names into which nothing but matmuls is added or written."""
    found, others = set(), set()
    for n in ast.walk(node):
        targets = n.targets if isinstance(n, ast.Assign) else [getattr(n, "target", None)]
        if not isinstance(n, ast.Assign | ast.AugAssign):
            continue
        matmul = isinstance(n.value, ast.Call) and names.of(n.value.func).endswith(".nc_matmul")
        for target in targets:
            written = isinstance(target, ast.Subscript) or isinstance(n, ast.AugAssign)
            name = target.value if isinstance(target, ast.Subscript) else target
            if written and isinstance(name, ast.Name):
                sums = matmul and isinstance(getattr(n, "op", None), ast.Add | None)
                (found if sums else others).add(name.id)
    return found - others


def _own(node: ast.AST | None) -> list[Any]:
    """The simple statements of a function, without those of functions inside."""
    found = []
    for child in ast.iter_child_nodes(node) if node is not None else ():
        if isinstance(child, FunctionNode | ast.ClassDef | ast.expr):
            continue
        found += _own(child)
        if isinstance(child, ast.stmt) and not hasattr(child, "body"):
            found.append(child)
    return found


def _mentions(value: Value, name: str) -> bool:
    texts = [value.offset, *[t for term in value.terms.values() for t in term]]
    word = re.compile(rf"\b{re.escape(name)}\b")
    return any(map(word.search, texts)) or any(_mentions(part, name) for part in value.parts)


def forget(scope: Scope, name: str) -> None:
    """A name has another value now: so have the texts that mention it."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    scope.env.pop(name, None)
    for key, value in scope.env.items():
        if value.kind in ("index", "mask", "grid") and _mentions(value, name):
            scope.env[key] = Value("?", value.kind)
            continue
        is_stale = value.shape and any(map(word.search, value.shape))
        dtype = "" if word.search(value.dtype) else value.dtype
        scope.env[key] = replace(value, shape=None if is_stale else value.shape, dtype=dtype)


def _join(scope: Scope, ends: list[dict[str, Value]]) -> None:
    """What is known after any of several branches."""
    scope.env.clear()
    for name in {name for end in ends for name in end}:
        found = [end[name] for end in ends if name in end]
        first = found[0]
        if all(value == first for value in found):
            scope.env[name] = first
        elif any(value.kind in ("index", "mask", "grid") for value in found):
            scope.env[name] = Value("?", "index")
        elif all(value.kind == "tile" for value in found):
            shapes, dtypes, memories = (
                {getattr(value, what) for value in found} for what in ("shape", "dtype", "memory")
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
            found = scope.value(value)
            if found.kind == "python" or not scope.lines:
                return _plain(node, view(found), scope)
            return scope.lines
        case ast.Return(ast.expr() as value):
            return _plain(node, f"return {view(scope.value(value))}", scope)
        case _:
            return _plain(node, scope.rewritten(node), scope)


def _operator(op: ast.operator) -> str:
    if type(op).__name__ not in OPERATORS:
        raise ByHandError("removed")
    return OPERATORS[type(op).__name__]


def _plain(node: ast.stmt, text: str, scope: Scope) -> list[str] | None:
    return None if not scope.lines and text == ast.unparse(node) else [*scope.lines, text]


def _bound(node: ast.stmt, name: str, value: ast.expr, scope: Scope) -> list[str] | None:
    if scope.names.of(value).startswith(f"{_NKI}.compiler."):
        return [f"{MARK}allocator; remove what computes addresses, the compiler places tiles"]
    again = any(_is(n, name) for n in ast.walk(value))
    found = scope.value(value, "" if again else name)
    forget(scope, name)
    if found.kind in ("index", "mask", "grid"):
        scope.env[name] = found
        return []
    text = view(found)
    if found.kind in ("tile", "blocks"):
        scope.env[name] = replace(found, text=name, base=None, parts=[])
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
        for name in _assigned(node):
            forget(scope, name)
        return _plain(node, new, scope)
    if isinstance(value, ast.Tuple) and len(value.elts) == len(elts):
        lines: list[str] = []
        values = [scope.value(v) for v in value.elts]
        if all(v.kind == "python" for v in values):
            for name in names:
                forget(scope, name)
            new = f"{', '.join(names)} = {', '.join(v.text for v in values)}"
            return None if ast.parse(new).body[0] and _same(new, node) else [*scope.lines, new]
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
    found = scope.value(value)
    for name in names:
        forget(scope, name)
    if found.kind == "grid":
        scope.env |= dict(zip(names, found.parts, strict=True))
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
        return [*scope.lines, f"{', '.join(map(ast.unparse, elts))} = {found.text}"]
    return None


def _same(text: str, node: ast.stmt) -> bool:
    return ast.unparse(ast.parse(text)) == ast.unparse(node)


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
