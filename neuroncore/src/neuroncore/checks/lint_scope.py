"""Which nodes of a function or class break a rule of `lint`."""

import ast
import re
from collections.abc import Iterator
from typing import cast

from neuroncore.checks.lint_rules import REFUSED_NODES
from neuroncore.checks.lint_source import FunctionNode, Source, inside, local_names

DEPRECATED_LOOPS = {"affine_range", "sequential_range", "static_range"}
ENUMERATED = {"dge_mode", "dma_engine", "engine", "oob_mode", "perf_mode", "reduce_cmd"}
LEGACY = {"arange", "mgrid", "par_dim"}
MAKES_TILE = {"empty_like", "full", "load", "ndarray", "ones", "rand", "zeros", "zeros_like"}
TAKE_VALUES = {"abs", "bool", "float", "int", "max", "min", "range", "round"}
"""Builtins that ask for the value of what they get."""
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
        self, source: Source, scope: FunctionNode | ast.ClassDef, on_device: bool = False
    ) -> None:
        self.source, self.scope, self.on_device = source, scope, on_device
        self.local = local_names(scope)
        self.tiles: set[str] = set()
        self.registers: set[str] = set()
        self.bodies: set[str] = set()
        self.objects: set[str] = set()
        self.private: dict[str, ast.Call] = {}
        for node in inside(scope):
            if isinstance(body := source.loop_body(node), ast.Name):
                self.bodies.add(body.id)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                if self.makes_tile(node.value):
                    self.tiles |= names
                if source.member(node.value.func, "isa") == "register_alloc":
                    self.registers |= names
                if self.makes_object(node.value):
                    self.objects |= names
                if self.is_private(node.value):
                    self.private |= dict.fromkeys(names, node.value)

    def check(self, is_kernel: bool = False) -> None:
        """Check the decorators, the signature or the base classes, and the body."""
        scope, source = self.scope, self.source
        for decorator in scope.decorator_list:
            known = isinstance(scope, FunctionNode) and source.is_jit(decorator)
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
            if isinstance(statement, FunctionNode):
                Checker(self.source, statement).check()
            else:
                self.visit(statement, False)

    def enter(self, function: FunctionNode) -> None:
        """Check the signature and the body of the function, or of one inside it."""
        arguments = function.args
        for parameter in filter(None, (arguments.vararg, arguments.kwarg)):
            self.source.report(parameter, "star-parameters")
        if arguments.kwonlyargs and arguments.vararg is None:
            self.source.report(arguments.kwonlyargs[0], "bare-star")
        is_body = self.on_device if function is self.scope else function.name in self.bodies
        outside = self.registers
        if is_body:
            positional = [*arguments.posonlyargs, *arguments.args]
            self.registers = outside | {p.arg for p in positional if p.arg != "self"}
            self.leaving_tensors(function)
        for statement in function.body:
            self.visit(statement, is_body)
        self.registers = outside

    def visit(self, node: ast.AST, device: bool) -> None:
        """Report a node, then those below it; `device`: whether the innermost loop runs there."""
        if isinstance(node, (ast.expr, ast.stmt)):
            for rule in self.refusals(node, device):
                self.source.report(node, rule)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name not in self.bodies:  # the migration guide to 0.6 writes these so
                    self.source.report(node, "inner-def")
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
        if any(isinstance(v, ast.Name) and v.id in self.registers for v in asked_values(node)):
            yield "register-value"
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others) if any(
                isinstance(op, ast.Eq | ast.NotEq) for op in ops
            ) and any(map(self.is_object, (left, *others))):
                yield "object-equality"
            case ast.AugAssign(value=ast.Call(func=callee)) if self.returns_no_tile(callee):
                yield "legacy-result"
            case ast.Tuple(ctx=ast.Store()) | ast.List(ctx=ast.Store()) if self.stores_elsewhere(
                node
            ):
                yield "tuple-attribute"
            case ast.Subscript(ctx=ast.Store()) if self.is_tile(node):
                yield "tile-store"
            case ast.While(test=test) if self.runs_on_device(test):
                yield self.dynamic_rule
            case ast.For(orelse=[_, *_]) | ast.While(orelse=[_, *_]):
                yield "loop-else"
            case ast.With(items=items):
                if any(item.optional_vars for item in items):
                    yield "with-as"
                contexts = [i.context_expr for i in items if isinstance(i.context_expr, ast.Call)]
                if any(self.source.member(c.func, "language") == "no_reorder" for c in contexts):
                    for loop in filter(self.source.loop_body, ast.walk(node)):
                        self.source.report(cast(ast.Call, loop), "reordered-loop")
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
        if language == "dynamic_range":
            yield self.dynamic_rule
        if language in DEPRECATED_LOOPS:
            yield "deprecated-loop"
        body = self.source.loop_body(call)
        if isinstance(body, ast.Attribute) and self.source.definition(body) is None:
            yield "loop-body"
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
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(map(self.is_numpy_dtype, arguments)):
            yield "numpy-dtype"
        callee = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        definition = self.source.definition(callee)
        local = isinstance(callee, ast.Name) and callee.id in self.local
        if not local and definition is not None and definition[0].is_kernel(definition[1]):
            yield "sub-kernel"

    @property
    def dynamic_rule(self) -> str:
        """What a loop breaks that runs on the device and is no call."""
        return "deprecated-loop" if self.source.sources.nki == "0.6" else "dynamic-loop"

    def leaving_tensors(self, body: FunctionNode) -> None:
        """Report every tensor of a device loop's body that code outside of it can reach."""
        local, tiles = local_names(body) - {"self"}, set[str]()
        for node in inside(body):
            if isinstance(node, ast.Assign) and self.makes_tile(node.value):
                tiles |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in inside(body):
            match node:
                case ast.Return(value=ast.expr() as given):
                    pass
                case ast.Call(func=ast.Attribute(value=owner, attr="append"), args=[given]) if (
                    root_of(owner) not in local
                ):
                    pass
                case ast.Assign(
                    targets=[ast.Attribute() | ast.Subscript() as owner], value=given
                ) if root_of(owner) not in local:
                    pass
                case ast.Nonlocal(names=names) if tiles & set(names):
                    self.source.report(node, "body-tensor")
                    continue
                case _:
                    continue
            if (isinstance(given, ast.Name) and given.id in tiles) or self.makes_tile(given):
                self.source.report(node, "body-tensor")

    def makes_tile(self, node: ast.expr) -> bool:
        """Return whether an expression is a call that makes a tensor."""
        is_call = isinstance(node, ast.Call)
        return is_call and self.source.member(node.func, "language") in MAKES_TILE

    def makes_object(self, call: ast.Call) -> bool:
        """Return whether a call makes an object of the kernel's own classes, enumerations apart."""
        definition = self.source.definition(call.func)
        if definition is None or not isinstance(definition[1], ast.ClassDef):
            return False
        return not any("Enum" in definition[0].meaning(base) for base in definition[1].bases)

    def is_object(self, node: ast.expr) -> bool:
        """Return whether `==` with an expression asks a tensor or an object, or may do so."""
        if isinstance(node, ast.Name):
            return node.id in self.objects | self.tiles
        return isinstance(node, ast.Constant) and node.value is None

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
        buffers = [k.value for k in call.keywords if k.arg == "buffer"]
        buffers += call.args[3 if maker == "full" else 2 :][:1]
        return any(self.source.member(b, "language") in {"hbm", "private_hbm"} for b in buffers)

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


def asked_values(node: ast.AST) -> list[ast.expr]:
    """Return the expressions below a node whose value Python asks for."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            return [test]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.BoolOp(values=values):
            return values
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Compare(left=left, ops=ops, comparators=others):
            return [] if isinstance(ops[0], ast.Is | ast.IsNot) else [left, *others]
        case ast.Call(func=ast.Name(id=name), args=given) if name in TAKE_VALUES:
            return given
        case _:
            return []


def root_of(node: ast.expr) -> str:
    """Return the name that an attribute or an index begins with, or empty."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
