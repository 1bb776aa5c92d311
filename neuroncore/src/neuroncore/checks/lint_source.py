"""The files that `lint` reads: what their names mean, and what a kernel reaches in them."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from neuroncore.checks.lint_rules import RULES, Line, LintError

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = tuple["Source", FunctionNode | ast.ClassDef]

LOOP_BODY = {"fori_loop": 2, "while_loop": 1}  # where the body stands among the arguments
CONVENTIONAL = {"nl": "nki.language", "nisa": "nki.isa", "np": "numpy"}
_NOT_FOLLOWED = ("nki", "neuronxcc", "neuroncore")


class Sources:
    """The files read so far, and the findings in them.

    Args:
        nki: the line of NKI whose rules hold.
        imported: whether modules that Python has imported are looked up by name too.
    """

    def __init__(self, nki: Line, imported: bool = False) -> None:
        self.nki = nki
        self.imported = imported
        self.found: set[LintError] = set()
        self._read: dict[Path, Source] = {}

    def read(self, path: str) -> Source:
        """Parse a file. Raises ValueError where it cannot be read, or is not Python."""
        known = self._read.get(Path(path).absolute())
        try:
            return known or self.add(path, Path(path).read_bytes())
        except OSError as error:
            problem = f"cannot read {path}: {error.strerror}"
            raise ValueError(f"{problem}; pass the path of a Python file") from None

    def add(self, path: str, text: str | bytes) -> Source:
        """Parse a file's text."""
        source = self._read[Path(path).absolute()] = Source(self, path, text)
        return source

    def definition(self, dotted: str, importer: Source) -> Definition | None:
        """The function or class of the kernel's own files that a dotted name stands for."""
        module, _, name = dotted.rpartition(".")
        source = self._module(module, importer) if module else None
        if source is None:
            return None
        if name in source.definitions:
            return source, source.definitions[name]
        behind = source.imports.get(name, "")
        return self.definition(behind, source) if behind not in ("", dotted) else None

    def _module(self, dotted: str, importer: Source) -> Source | None:
        """A module of the importing file's package, or of its folder where it is in no package."""
        if any(f"{dotted}.".startswith(f"{name}.") for name in _NOT_FOLLOWED):
            return None
        folder, package, names = importer.folder, "", dotted.split(".")
        while (folder / "__init__.py").exists():
            folder, package = folder.parent, folder.name
        if dotted.startswith("."):
            level = len(dotted) - len(dotted.lstrip("."))
            folder, names = [importer.folder, *importer.folder.parents][level - 1], names[level:]
        elif package and names[0] != package:
            return self._imported(dotted)
        path = folder.joinpath(*names)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return self.read(str(file))
        return self._imported(dotted)

    def _imported(self, dotted: str) -> Source | None:
        """A module that Python has imported from outside its own and installed packages."""
        file = getattr(sys.modules.get(dotted), "__file__", None) if self.imported else None
        installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
        if not file or any(Path(file).is_relative_to(folder) for folder in installed):
            return None
        return self.read(file) if file.endswith(".py") else None


class Source:
    """One parsed file: its functions and classes, and what its names mean."""

    def __init__(self, sources: Sources, path: str, text: str | bytes) -> None:
        self.sources, self.path = sources, path
        self.folder = Path(path).absolute().parent
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:  # ValueError: a null byte, until Python 3.11.3
            line = getattr(error, "lineno", None) or 1
            reason = getattr(error, "msg", error)
            raise ValueError(f"{path}:{line}: not Python ({reason}); fix it first") from None
        self.definitions: dict[str, FunctionNode | ast.ClassDef] = {}
        self.imports: dict[str, str] = {}
        for node in _module_level(self.tree.body):
            if isinstance(node, FunctionNode | ast.ClassDef):
                self.definitions[node.name] = node
            if any(name.split(".")[0] == "neuronxcc" for name in _imported(node).values()):
                self.report(node, "legacy-import")
        for node in ast.walk(self.tree):
            self.imports |= _imported(node)
        self.imports |= CONVENTIONAL  # whatever they are imported from

    def report(self, node: ast.expr | ast.stmt | ast.arg, rule: str) -> None:
        """Add a finding at a node, unless the rule is another line's."""
        if RULES[rule].line not in (None, self.sources.nki):
            return
        place = self.path, node.lineno, node.col_offset + 1
        self.sources.found.add(LintError(*place, rule, RULES[rule].what))

    def find(self, name: str, line: int) -> FunctionNode:
        """Return the function that Python says starts here: at its first decorator, or its def."""
        named = [n for n in ast.walk(self.tree) if isinstance(n, FunctionNode) and n.name == name]
        for node in named:
            if line == min(part.lineno for part in (node, *node.decorator_list)):
                return node
        raise LookupError(name)

    def kernels(self) -> list[Definition]:
        """The functions decorated with jit."""
        return [(self, node) for node in ast.walk(self.tree) if self.is_kernel(node)]

    def is_kernel(self, node: ast.AST | None) -> TypeGuard[FunctionNode]:
        """Return whether a node is a function decorated with jit."""
        return isinstance(node, FunctionNode) and any(map(self.is_jit, node.decorator_list))

    def is_jit(self, decorator: ast.expr) -> bool:
        """Return whether a decorator is `jit` of NKI, bare or called."""
        parts = self.decorator(decorator).split(".")
        return parts[-1] == "jit" and parts[0] not in {"jax", "numba", "torch"}

    def decorator(self, node: ast.expr) -> str:
        """Return the dotted name of a decorator, bare or called."""
        return self.meaning(node.func if isinstance(node, ast.Call) else node)

    def meaning(self, node: ast.expr) -> str:
        """Return the dotted name of an expression with imports resolved; empty if it has none."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (base := self.meaning(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def member(self, node: ast.expr, module: str) -> str:
        """Return the name of a member of nki's `language` or `isa`, or empty."""
        owner, _, name = self.meaning(node).rpartition(".")
        return name if owner.rpartition(".")[2] == module else ""

    def definition(self, node: ast.AST) -> Definition | None:
        """Return the function or class that a name or attribute stands for, in whichever file."""
        if isinstance(node, ast.Name) and node.id in self.definitions:
            return self, self.definitions[node.id]
        if isinstance(node, ast.Name | ast.Attribute):
            return self.sources.definition(self.meaning(node), self)
        return None

    def loop_body(self, node: ast.AST) -> ast.expr | None:
        """Return the function that a device loop calls, if the node is one."""
        if not isinstance(node, ast.Call):
            return None
        if (position := LOOP_BODY.get(self.member(node.func, "language"))) is None:
            return None
        bodies = [k.value for k in node.keywords if k.arg == "body_fun"] or node.args[position:]
        return bodies[0] if bodies else None


def reached(kernels: list[Definition]) -> tuple[list[Definition], list[Definition]]:
    """Return what the kernels reach, themselves first, and which of it are bodies of device loops.

    A class brings all its methods and its base classes with it.
    """
    definitions, bodies = list(kernels), list[Definition]()
    for source, node in definitions:  # grows while it is read
        for part in _parts(node):
            definition = source.definition(part)
            if definition is not None and definition not in definitions:
                definitions.append(definition)
            body = source.loop_body(part)
            if body is not None and (definition := source.definition(body)) is not None:
                bodies.append(definition)
    return definitions, bodies


def _parts(node: FunctionNode | ast.ClassDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body whose names are not local, or of a class."""
    if isinstance(node, ast.ClassDef):
        for part in (*node.bases, *node.body):
            yield from _parts(part) if isinstance(part, FunctionNode) else ast.walk(part)
        return
    local = local_names(node)
    for part in inside(node):
        root = part
        while isinstance(root, ast.Attribute):
            root = root.value
        if not (isinstance(root, ast.Name) and root.id in local):
            yield part


def _module_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under if, try and with."""
    for statement in statements:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for child in ast.iter_child_nodes(statement):
                block = child.body if isinstance(child, ast.ExceptHandler) else [child]
                yield from _module_level([s for s in block if isinstance(s, ast.stmt)])


def inside(scope: FunctionNode | ast.ClassDef) -> Iterator[ast.AST]:
    """Yield all nodes of a body."""
    for statement in scope.body:
        yield from ast.walk(statement)


def local_names(scope: FunctionNode | ast.ClassDef) -> set[str]:
    """Return the parameters of a function, and the names that a function or class binds."""
    parameters = ast.walk(scope.args) if isinstance(scope, FunctionNode) else []
    bound = [
        n for n in inside(scope) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
    ]
    return {n.arg for n in parameters if isinstance(n, ast.arg)} | {n.id for n in bound}


def _imported(node: ast.AST) -> dict[str, str]:
    """Return the names that an import binds, each with the dotted name behind it."""
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (f"{node.module}." if node.module else "")
        return {a.asname or a.name: f"{module}{a.name}" for a in node.names}
    if isinstance(node, ast.Import):
        roots = [(a, a.name.partition(".")[0]) for a in node.names]
        return {a.asname or root: a.name if a.asname else root for a, root in roots}
    return {}
