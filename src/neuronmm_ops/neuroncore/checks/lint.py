"""What the strict NKI front end refuses: the simulator runs any Python, the real compiler does not.

`lint` reads source and runs nothing. It knows one file: helpers that a kernel imports are linted
where they live.
"""

import ast
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard

Severity = Literal["error", "warning"]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Rule(NamedTuple):
    """What is wrong, what to write instead, and which nodes are refused wherever they stand."""

    what: str
    remedy: str
    nodes: str = ""


RULES: dict[str, Rule] = {
    "async": Rule(
        "async is refused", "write plain calls", "AsyncFor AsyncFunctionDef AsyncWith Await"
    ),
    "bare-star": Rule("keyword-only parameters are refused", "remove the bare * of the signature"),
    "comprehension": Rule(
        "comprehensions are refused", "write a for loop", "DictComp GeneratorExp ListComp SetComp"
    ),
    "decorator": Rule("this decorator is unknown to the compiler", "keep nki.jit alone"),
    "del": Rule("del is refused", "let the name go out of scope", "Delete"),
    "deprecated-loop": Rule("this loop is deprecated", "use range, nl.fori_loop or nl.while_loop"),
    "dict-key": Rule("dictionary keys must be strings", "use string keys, a tuple or a list"),
    "dynamic-break": Rule("a device loop has no break or continue", "compute its bound before"),
    "global": Rule("global and nonlocal are refused", "pass and return it", "Global Nonlocal"),
    "hbm-output": Rule("a returned tensor is private HBM", "allocate it with buffer=nl.shared_hbm"),
    "identity": Rule("is and is not are refused", "use == or !=, also with None", "Is IsNot"),
    "inner-class": Rule("an inner class is refused", "move it to the module", "ClassDef"),
    "inner-def": Rule("an inner function is refused", "move it to the module", "FunctionDef"),
    "inner-import": Rule(
        "an inner import is refused", "move it to the module", "Import ImportFrom"
    ),
    "lambda": Rule("lambda is refused", "define a function in the module", "Lambda"),
    "legacy-call": Rule("this call is from before NKI 0.2", "use slices that end at min()"),
    "legacy-import": Rule("neuronxcc kernels are a compile error since NKI 0.4", "import nki"),
    "legacy-mask": Rule("mask= does not exist any more", "end slices at the edge by min()"),
    "legacy-result": Rule("an nki.isa call returns no tile", "name its dst, or accumulate=True"),
    "legacy-transpose": Rule("load_transpose2d is a leftover of NKI 0.1", "use nisa.dma_transpose"),
    "loop-else": Rule("else of a loop is refused", "set a flag in the loop and test it after"),
    "match": Rule("match is refused", "use if and elif", "Match"),
    "matmul-operator": Rule("the @ operator is refused", "call nisa.nc_matmul", "MatMult"),
    "membership": Rule("in and not in are refused", "compare with ==, combine with or", "In NotIn"),
    "numpy-dtype": Rule("a NumPy dtype as an argument is refused", "pass a dtype of nki.language"),
    "raise": Rule("raise is refused", "use assert", "Raise"),
    "set": Rule("sets are refused", "use a tuple or a list", "Set"),
    "star-expansion": Rule("* and ** expansion are refused", "write every element out", "Starred"),
    "star-parameters": Rule("*args and **kwargs are refused", "name every parameter"),
    "sub-kernel": Rule("a kernel calls another kernel", "call a function without nki.jit"),
    "tile-store": Rule("storing into a tile by index is refused", "write it as dst of a nisa call"),
    "try": Rule("try is refused", "check before the call, with assert", "Try TryStar"),
    "type-alias": Rule("type is refused", "move it to the module", "TypeAlias"),
    "with-as": Rule("with ... as is refused", "write with without a name"),
    "yield": Rule("yield is refused", "return a tuple", "Yield YieldFrom"),
}
WARNINGS = {"deprecated-loop", "legacy-transpose"}
REFUSED_NODES = {node: name for name, rule in RULES.items() for node in rule.nodes.split()}
DEPRECATED_LOOPS = {"affine_range", "dynamic_range", "sequential_range", "static_range"}
LEGACY = {"arange", "mgrid", "par_dim"}
MAKES_TILE = {"empty_like", "full", "load", "ndarray", "ones", "rand", "zeros", "zeros_like"}
LOOP_BODY = {"fori_loop": 2, "while_loop": 1}  # where the body stands among the arguments
NUMPY_DTYPE = re.compile(r"bool_?|u?int\d*|intc|int_|b?float\w+|half|single|double|dtype")
CONVENTIONAL = {"nl": "nki.language", "nisa": "nki.isa", "np": "numpy"}


@dataclass(frozen=True, order=True)
class LintError:
    """One finding. Lines and columns count from 1; `rule` is a key of `RULES`."""

    path: str
    line: int
    column: int
    rule: str
    message: str

    @property
    def severity(self) -> Severity:
        """Return "warning" for what compiles today, "error" for the rest."""
        return "warning" if self.rule in WARNINGS else "error"

    def __str__(self) -> str:
        """Return `file.py:12:4: rule: message; remedy`."""
        place = f"{self.path}:{self.line}:{self.column}"
        return f"{place}: {self.rule}: {self.message}; {RULES[self.rule].remedy}"


def lint(kernel: Callable[..., object] | str | os.PathLike[str]) -> list[LintError]:
    """Return what the strict NKI front end refuses in a kernel, ordered by line.

    `kernel` is a function, an object that holds one as `func`, or the path of a Python file, in
    which every function decorated with `jit` is a kernel. The functions of the same file that a
    kernel reaches are read too; other code at module level is not, imports of neuronxcc excepted.
    """
    if isinstance(kernel, (str, os.PathLike)):
        path = os.fspath(kernel)
        source = _Source(path, _read(path))
        return source.lint([node for node in ast.walk(source.tree) if source.is_kernel(node)])
    function = inspect.unwrap(getattr(kernel, "func", kernel))
    if not inspect.isfunction(function):
        name = type(kernel).__name__
        raise ValueError(f"cannot lint a {name}; pass a function, a kernel or the path of a file")
    try:
        lines, _ = inspect.findsource(function)
        source = _Source(inspect.getsourcefile(function) or "<unknown>", "".join(lines))
        return source.lint([source.find(function.__name__, function.__code__.co_firstlineno)])
    except (OSError, LookupError):
        problem = f"the source of {function.__name__} is not available"
        raise ValueError(f"{problem}; define it with def in a file") from None


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror}"
        raise ValueError(f"{problem}; pass the path of a Python file") from None


class _Source:
    """One parsed file: its functions, and what its names mean."""

    def __init__(self, path: str, text: str | bytes) -> None:
        self.path = path
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:  # ValueError: a null byte, until Python 3.11.3
            line = getattr(error, "lineno", None) or 1
            reason = getattr(error, "msg", error)
            raise ValueError(f"{path}:{line}: not Python ({reason}); fix it first") from None
        self.functions: dict[str, Function] = {}
        self.imports = dict(CONVENTIONAL)
        self.found: set[LintError] = set()
        for node in _module_level(self.tree.body):
            if isinstance(node, Function):
                self.functions[node.name] = node
        for node in ast.walk(self.tree):
            self.imports |= _imported(node)

    def lint(self, kernels: list[Function]) -> list[LintError]:
        """Check the kernels, and the functions of the file that they reach."""
        for node in _module_level(self.tree.body):
            if any(name.split(".")[0] == "neuronxcc" for name in _imported(node).values()):
                self.report(node, "legacy-import")
        reached, bodies = list(kernels), set[str]()
        for function in reached:  # grows while it is read
            local = _local_names(function)
            for node in _inside(function):
                if isinstance(node, ast.Name) and node.id not in local:
                    callee = self.functions.get(node.id)
                    if callee is not None and callee not in reached:
                        reached.append(callee)
                if isinstance(node, ast.Call) and (body := self.loop_body(node)):
                    bodies.add(body)
        for function in reached:
            _Checker(self, function, bodies).check(is_kernel=function in kernels)
        return sorted(self.found)

    def report(self, node: ast.expr | ast.stmt | ast.arg, rule: str) -> None:
        """Add a finding at a node."""
        place = self.path, node.lineno, node.col_offset + 1
        self.found.add(LintError(*place, rule, RULES[rule].what))

    def find(self, name: str, line: int) -> Function:
        """Return the function that Python says starts here: at its first decorator, or its def."""
        named = [n for n in ast.walk(self.tree) if isinstance(n, Function) and n.name == name]
        for node in named:
            if line == min(part.lineno for part in (node, *node.decorator_list)):
                return node
        raise LookupError(name)

    def is_kernel(self, node: ast.AST | None) -> TypeGuard[Function]:
        """Return whether a node is a function decorated with jit."""
        return isinstance(node, Function) and any(map(self.is_jit, node.decorator_list))

    def is_jit(self, decorator: ast.expr) -> bool:
        """Return whether a decorator is `jit` of NKI, bare or called."""
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        parts = self.meaning(target).split(".")
        return parts[-1] == "jit" and parts[0] not in {"jax", "numba", "torch"}

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

    def loop_body(self, call: ast.Call) -> str:
        """Return the name of the function that a device loop calls, or empty."""
        if (position := LOOP_BODY.get(self.member(call.func, "language"))) is None:
            return ""
        given = [k.value for k in call.keywords if k.arg == "body_fun"] or call.args[position:]
        return given[0].id if given and isinstance(given[0], ast.Name) else ""


class _Checker:
    """Walks one function. `device` says whether the innermost loop runs on the device."""

    def __init__(self, source: _Source, function: Function, bodies: set[str]) -> None:
        self.source, self.function, self.bodies = source, function, bodies
        self.local = _local_names(function)
        self.tiles: set[str] = set()
        self.registers: set[str] = set()
        self.private: dict[str, ast.Call] = {}
        for node in _inside(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if source.member(node.value.func, "language") in MAKES_TILE:
                    self.tiles |= names
                if source.member(node.value.func, "isa") == "register_alloc":
                    self.registers |= names
                if self.is_private(node.value):
                    self.private |= dict.fromkeys(names, node.value)

    def check(self, is_kernel: bool) -> None:
        """Check the decorators, the signature and the body."""
        for decorator in self.function.decorator_list:
            if not self.source.is_jit(decorator):
                self.source.report(decorator, "decorator")
        if isinstance(self.function, ast.AsyncFunctionDef):
            self.source.report(self.function, "async")
        self.enter(self.function)
        if is_kernel:
            self.returned_tensors()

    def enter(self, function: Function) -> None:
        """Check the signature and the body of the function, or of one inside it."""
        arguments = function.args
        for parameter in filter(None, (arguments.vararg, arguments.kwarg)):
            self.source.report(parameter, "star-parameters")
        if arguments.kwonlyargs and arguments.vararg is None:
            self.source.report(arguments.kwonlyargs[0], "bare-star")
        for statement in function.body:
            self.visit(statement, function.name in self.bodies)

    def visit(self, node: ast.AST, device: bool) -> None:
        """Report a node, then those below it."""
        if isinstance(node, (ast.expr, ast.stmt)):
            for rule in self.refusals(node, device):
                self.source.report(node, rule)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.enter(node)
            case ast.ClassDef():
                pass
            case ast.For(iter=head) | ast.AsyncFor(iter=head) | ast.While(test=head):
                inner = self.runs_on_device(head)
                for child in ast.iter_child_nodes(node):
                    self.visit(child, inner if child in node.body else device)
            case _:
                for child in ast.iter_child_nodes(node):
                    self.visit(child, device)

    def refusals(self, node: ast.expr | ast.stmt, device: bool) -> Iterator[str]:
        """Yield the rules that a node breaks, without those below it."""
        operators = (ast.cmpop, ast.operator)  # these have no place of their own
        for part in (node, *(c for c in ast.iter_child_nodes(node) if isinstance(c, operators))):
            if rule := REFUSED_NODES.get(type(part).__name__):
                yield rule
        match node:
            case ast.AugAssign(value=ast.Call(func=callee)) if self.returns_no_tile(callee):
                yield "legacy-result"
            case ast.Subscript(ctx=ast.Store()) if self.is_tile(node):
                yield "tile-store"
            case ast.While(test=test) if self.runs_on_device(test):
                yield "deprecated-loop"
            case ast.For(orelse=[_, *_]) | ast.While(orelse=[_, *_]):
                yield "loop-else"
            case ast.With(items=items) if any(item.optional_vars for item in items):
                yield "with-as"
            case ast.Break() | ast.Continue() if device:
                yield "dynamic-break"
            case ast.Dict(keys=keys):
                if None in keys:
                    yield "star-expansion"
                constants = [key.value for key in keys if isinstance(key, ast.Constant)]
                strings = all(isinstance(value, str) for value in constants)
                if not strings or any(isinstance(key, ast.Tuple) for key in keys):
                    yield "dict-key"
            case ast.Name() | ast.Attribute() if self.source.member(node, "language") in LEGACY:
                yield "legacy-call"
            case ast.Call():
                yield from self.call_refusals(node)
            case _:
                pass

    def call_refusals(self, call: ast.Call) -> Iterator[str]:
        """Yield the rules that a call breaks."""
        language, isa = (self.source.member(call.func, m) for m in ("language", "isa"))
        if language in DEPRECATED_LOOPS:
            yield "deprecated-loop"
        if language == "load_transpose2d":
            yield "legacy-transpose"
        keywords = {keyword.arg for keyword in call.keywords}
        if None in keywords:
            yield "star-expansion"
        if "mask" in keywords and (language or isa):
            yield "legacy-mask"
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(map(self.is_numpy_dtype, given)):
            yield "numpy-dtype"
        callee = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        name = callee.id if isinstance(callee, ast.Name) else ""
        if name not in self.local and self.source.is_kernel(self.source.functions.get(name)):
            yield "sub-kernel"

    def returned_tensors(self) -> None:
        """Report the allocation of every returned tensor that lies in private HBM."""
        for node in _inside(self.function):
            value = node.value if isinstance(node, ast.Return) else None
            for item in value.elts if isinstance(value, ast.Tuple) else [value]:
                made = self.private.get(item.id) if isinstance(item, ast.Name) else item
                if isinstance(made, ast.Call) and self.is_private(made):
                    self.source.report(made, "hbm-output")

    def is_private(self, call: ast.Call) -> bool:
        """Return whether a call allocates in private HBM."""
        maker = self.source.member(call.func, "language")
        if maker not in MAKES_TILE:
            return False
        given = [k.value for k in call.keywords if k.arg == "buffer"]
        given += call.args[3 if maker == "full" else 2 :][:1]
        return any(self.source.member(b, "language") in {"hbm", "private_hbm"} for b in given)

    def is_tile(self, target: ast.Subscript) -> bool:
        """Return whether only a tile can be stored into like this; a list or dictionary may."""
        if isinstance(target.value, ast.Name) and target.value.id in self.tiles:
            return True
        index = target.slice
        whole = isinstance(index, ast.Constant) and index.value is ...
        return whole or isinstance(index, (ast.Slice, ast.Tuple))

    def is_numpy_dtype(self, value: ast.expr) -> bool:
        """Return whether an expression names a dtype of NumPy or of ml_dtypes."""
        root, _, name = self.source.meaning(value).partition(".")
        return root in {"numpy", "ml_dtypes"} and NUMPY_DTYPE.fullmatch(name) is not None

    def returns_no_tile(self, callee: ast.expr) -> bool:
        """Return whether a call's result is a handle; queries and registers return values."""
        name = self.source.member(callee, "isa")
        return bool(name) and not name.startswith(("get_", "register_"))

    def runs_on_device(self, head: ast.expr) -> bool:
        """Return whether a loop over, or while, this expression runs on the device."""
        if isinstance(head, ast.Call):
            return self.source.member(head.func, "language") == "dynamic_range"
        return isinstance(head, ast.Name) and head.id in self.registers


def _module_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under if, try and with."""
    for statement in statements:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for child in ast.iter_child_nodes(statement):
                block = child.body if isinstance(child, ast.ExceptHandler) else [child]
                yield from _module_level([s for s in block if isinstance(s, ast.stmt)])


def _inside(function: Function) -> Iterator[ast.AST]:
    for statement in function.body:
        yield from ast.walk(statement)


def _local_names(function: Function) -> set[str]:
    """Return the parameters of a function and the names that it binds."""
    names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    bound = [node for node in _inside(function) if isinstance(node, ast.Name)]
    return names | {node.id for node in bound if not isinstance(node.ctx, ast.Load)}


def _imported(node: ast.AST) -> dict[str, str]:
    """Return the names that an import binds, each with the dotted name behind it."""
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name: f"{node.module or ''}.{a.name}" for a in node.names}
    if isinstance(node, ast.Import):
        roots = [(a, a.name.partition(".")[0]) for a in node.names]
        return {a.asname or root: a.name if a.asname else root for a, root in roots}
    return {}
