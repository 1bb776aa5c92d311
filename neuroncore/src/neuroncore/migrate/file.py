"""A file: its statements one after the other, and the edits to its text."""

from __future__ import annotations

import ast
import re

from neuroncore.checks.lint_source import FunctionNode
from neuroncore.migrate.names import NKI, Names
from neuroncore.migrate.rewrite import Scope
from neuroncore.migrate.statements import (
    assigned,
    forget,
    is_name,
    join,
    mentions,
    new_lines,
    own,
    same,
)
from neuroncore.migrate.tables import BY_HAND, GONE, LOOPS
from neuroncore.migrate.text import DEEPER, MARK, comments, deepened, lines_of, wrapped
from neuroncore.migrate.values import ByHandError, OverloadedError, Value, unfixed

_MODULES = {NKI, *[f"{NKI}.{name}" for name in ("language", "isa", "typing")]}


_NO_TENSOR = (*LOOPS, "par_dim", "arange", "ndarray", "zeros", "ones", "full", "ds", "program_id",
              "activation", "tensor_reduce", "memset", "shared_constant")  # fmt: skip
"""Functions whose first argument is no tensor."""


_TENSORS = ("src", "dst", "data", "data1", "data2", "stationary", "moving", "value", "x", "y")


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
        text = deepened(text)
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
        match = re.match(r"[ \t]*", self.lines[line - 1])
        return match[0] if match else ""

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
            for name in assigned(node):
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
            begins = assigned(node.target) if isinstance(node, ast.For) else []
            added = {n.target.id for n in ast.walk(node) if isinstance(n, ast.AugAssign)
                     and isinstance(n.target, ast.Name)}  # fmt: skip
            for name in {*assigned(node)}:
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
            join(scope, ends)

    def _block(self, block: list[ast.stmt], scope: Scope) -> None:
        for node in block:
            self.statement(node, scope)
        if block and self.removed.issuperset(block):
            begin = self.starts[block[0].lineno - 1]
            self.edits.append((begin, begin, f"{self.indent(block[0].lineno)}pass\n"))

    def _function(self, node: FunctionNode, outer: Scope) -> None:
        is_kernel = self._decorators(node)
        env = dict(outer.env)
        later = [n for n in own(outer.function) if n.lineno > (node.end_lineno or 0)]
        for name in {name for n in later for name in assigned(n)}:  # when it is called
            for key, value in env.items():
                if value.kind in ("index", "mask", "grid") and mentions(value, name):
                    env[key] = Value("?", value.kind)
        scope = Scope(self.names, env, _sums(node, self.names), node)
        used = [self.names.of(n) for n in ast.walk(node) if isinstance(n, ast.Attribute | ast.Name)]
        is_device = any(dotted.startswith((f"{NKI}.language.", f"{NKI}.isa.")) for dotted in used)
        for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            forget(scope, a.arg)
            if a.annotation is not None and self.names.of(a.annotation) == f"{NKI}.tensor":
                self.edits.append((*self.span(a.annotation), f"{self.names.nl}.ndarray"))
            if is_device and (memory := self._memory(node, a.arg, is_kernel)) is not None:
                env[a.arg] = Value(a.arg, "tile", memory=memory)
        if node.returns is not None and self.names.of(node.returns) == f"{NKI}.tensor":
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
        memory = None
        for n in ast.walk(node):
            if isinstance(n, ast.Attribute | ast.Subscript) and is_name(n.value, name):
                is_tensor = isinstance(n, ast.Subscript) or n.attr in ("shape", "dtype", "reshape")
                memory = "" if is_tensor else memory
            if not isinstance(n, ast.Call):
                continue
            package, _, function = self.names.of(n.func).rpartition(".")
            if package not in (f"{NKI}.language", f"{NKI}.isa") or function in _NO_TENSOR:
                continue
            ends = n.args[:1] + [k.value for k in n.keywords if k.arg in _TENSORS]
            if function in ("load", "store"):
                ends = [e.value if isinstance(e, ast.Subscript) else e for e in ends]
            if any(is_name(e, name) for e in ends):
                memory = "hbm" if function in ("load", "store") or memory == "hbm" else ""
        return "hbm" if memory is not None and is_kernel else memory

    def _stores(self, node: FunctionNode) -> bool:
        """Whether it stores into a parameter."""
        names = {a.arg for a in node.args.args}
        calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and n.args]
        ends = [n.args[0] for n in calls if self.names.of(n.func) == f"{NKI}.language.store"]
        ends = [e.value if isinstance(e, ast.Subscript) else e for e in ends]
        return any(isinstance(e, ast.Name) and e.id in names for e in ends)

    def _decorators(self, node: FunctionNode) -> bool:
        """Leave `nki.jit` alone, and return whether it is there: not on what a kernel calls."""
        has_jit = False
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            dotted = self.names.of(called)
            if not dotted.startswith(f"{NKI}."):
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
        uses = {f"{NKI}.language.program_id", f"{NKI}.language.num_programs"}
        calls = [
            n for n in ast.walk(node) if isinstance(n, ast.Call) and self.names.of(n.func) in uses
        ]
        if not calls:
            return
        called = {getattr(n.func, "id", "") for n in ast.walk(self.tree) if isinstance(n, ast.Call)}
        if node.name in called and not is_kernel:
            raise ByHandError("grid")
        numbers = [n.args[0] if n.args else ast.Constant(0) for n in calls]
        if not all(isinstance(a, ast.Constant) for a in numbers):
            raise ByHandError("grid")
        axes = 1 + max(int(ast.unparse(a)) for a in numbers)
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
                for n in [s, *own(s)]
            )
        ):
            raise ByHandError("grid")
        unit = self.indent(node.body[0].lineno).removeprefix(self.indent(node.lineno))
        pad = self.indent(rest[0].lineno)
        loops = [f"{pad}{unit * i}for program_{i} in range(grid[{i}]):\n" for i in range(axes)]
        begin, end = self.starts[rest[0].lineno - 1], self.starts[rest[-1].end_lineno or 0]
        self.edits.append((begin, begin, "".join(loops) + f"{DEEPER}{unit * axes}\n"))
        self.edits.append((end, end, f"{DEEPER}\n"))
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
        if lines is None or (len(lines) == 1 and same(lines[0], node)):
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


def _import(dotted: str, name: str | None) -> str:
    new = dotted.removeprefix("neuronxcc.")
    if dotted not in _MODULES or name is None:
        raise ByHandError("import")
    return f"import {new}" if new == name else f"import {new} as {name}"


def _sums(node: FunctionNode, names: Names) -> set[str]:
    """Names into which nothing but matmuls is added or written."""
    summed, others = set(), set()
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
                (summed if sums else others).add(name.id)
    return summed - others
