"""Which nodes of a function or class break a rule of `lint`."""

import ast
import re
from collections.abc import Iterator

from neuronmm_ops.neuroncore.checks.lint_rules import REFUSED_NODES
from neuronmm_ops.neuroncore.checks.lint_source import Function, Source, inside, local_names

DEPRECATED_LOOPS = {"affine_range", "dynamic_range", "sequential_range", "static_range"}
ENUMERATED = {"dge_mode", "dma_engine", "engine", "oob_mode", "perf_mode", "reduce_cmd"}
LEGACY = {"arange", "mgrid", "par_dim"}
MAKES_TILE = {"empty_like", "full", "load", "ndarray", "ones", "rand", "zeros", "zeros_like"}
NUMPY_DTYPE = re.compile(r"bool_?|u?int\d*|intc|int_|b?float\w+|half|single|double|dtype")
_DECORATORS = {"dataclass", "staticmethod"}
_BASES = (["NKIObject"], ["Enum"], ["IntEnum"])
"""A class "must inherit from NKIObject and no other classes" (NKI language guide); enums may be."""


class Checker:
    """Walks one function or class.

    Args:
        source: its file.
        scope: the function or class.
        on_device: whether it is the body of a loop on the device.
    """

    def __init__(
        self, source: Source, scope: Function | ast.ClassDef, on_device: bool = False
    ) -> None:
        self.source, self.scope, self.on_device = source, scope, on_device
        self.local = local_names(scope)
        self.tiles: set[str] = set()
        self.registers: set[str] = set()
        self.private: dict[str, ast.Call] = {}
        for node in inside(scope):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if source.member(node.value.func, "language") in MAKES_TILE:
                    self.tiles |= names
                if source.member(node.value.func, "isa") == "register_alloc":
                    self.registers |= names
                if self.is_private(node.value):
                    self.private |= dict.fromkeys(names, node.value)

    def check(self, is_kernel: bool = False) -> None:
        """Check the decorators, the signature or the base classes, and the body."""
        scope, source = self.scope, self.source
        for decorator in scope.decorator_list:
            known = isinstance(scope, Function) and source.is_jit(decorator)
            if not known and source.decorator(decorator).rpartition(".")[2] not in _DECORATORS:
                source.report(decorator, "decorator")
        if isinstance(scope, ast.ClassDef):
            self.check_class(scope)
            return
        if isinstance(scope, ast.AsyncFunctionDef):
            source.report(scope, "async")
        self.enter(scope)
        if is_kernel:
            self.returned_tensors()

    def check_class(self, scope: ast.ClassDef) -> None:
        """Check that a class inherits NKIObject alone, or is an Enum, and its methods."""
        bases = [self.source.meaning(base).rpartition(".")[2] for base in scope.bases]
        if bases not in _BASES or scope.keywords:
            self.source.report(scope, "class-base")
        for statement in scope.body:
            if isinstance(statement, Function):
                Checker(self.source, statement).check()
            else:
                self.visit(statement, False)

    def enter(self, function: Function) -> None:
        """Check the signature and the body of the function, or of one inside it."""
        arguments = function.args
        for parameter in filter(None, (arguments.vararg, arguments.kwarg)):
            self.source.report(parameter, "star-parameters")
        if arguments.kwonlyargs and arguments.vararg is None:
            self.source.report(arguments.kwonlyargs[0], "bare-star")
        for statement in function.body:
            self.visit(statement, self.on_device and function is self.scope)

    def visit(self, node: ast.AST, device: bool) -> None:
        """Report a node, then those below it; `device`: whether the innermost loop runs there."""
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
            case ast.Tuple(ctx=ast.Store()) | ast.List(ctx=ast.Store()) if self.stores_elsewhere(
                node
            ):
                yield "tuple-attribute"
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
        if isa and "dtype" in keywords:
            yield "legacy-dtype"
        options = [k.value for k in call.keywords if k.arg in ENUMERATED]
        if isa and any(isinstance(value, ast.Constant) for value in options):
            yield "enum-literal"
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(map(self.is_numpy_dtype, given)):
            yield "numpy-dtype"
        callee = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        found = self.source.definition(callee)
        local = isinstance(callee, ast.Name) and callee.id in self.local
        if not local and found is not None and found[0].is_kernel(found[1]):
            yield "sub-kernel"

    def returned_tensors(self) -> None:
        """Report the allocation of every returned tensor that lies in private HBM."""
        for node in inside(self.scope):
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

    def stores_elsewhere(self, target: ast.Tuple | ast.List) -> bool:
        """Return whether a target holds more than names; stars and tiles have their own rules."""
        return any(
            isinstance(e, ast.Attribute) or (isinstance(e, ast.Subscript) and not self.is_tile(e))
            for e in target.elts
        )

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
