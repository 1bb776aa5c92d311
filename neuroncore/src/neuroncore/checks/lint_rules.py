"""The rules of `lint`, and its findings."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["error", "warning"]
Line = Literal["0.6", "0.7"]
LINES: tuple[Line, ...] = ("0.6", "0.7")
"""0.6, whose front end parses kernels, as those before it; 0.7, where Python traces them."""


class Rule(NamedTuple):
    """What is wrong, what to write instead, which nodes are refused, and in which line alone."""

    what: str
    remedy: str
    nodes: str = ""
    line: Line | None = None


_BOTH: dict[str, Rule] = {
    "async": Rule(
        "async is refused", "write plain calls", "AsyncFor AsyncFunctionDef AsyncWith Await"
    ),
    "body-tensor": Rule(
        "a tensor made in the body of a device loop leaves it", "allocate it before the loop"
    ),
    "deprecated-loop": Rule("this loop is deprecated", "use range, nl.fori_loop or nl.while_loop"),
    "enum-literal": Rule(
        "a number or text in the place of an enumeration is refused since NKI 0.3",
        "name the member, as nisa.dge_mode.hwdge",
    ),
    "hbm-output": Rule("a returned tensor is private HBM", "allocate it with buffer=nl.shared_hbm"),
    "legacy-call": Rule("this call is from before NKI 0.2", "use slices that end at min()"),
    "legacy-dtype": Rule("an nki.isa call takes no dtype=", "give dst the dtype"),
    "legacy-import": Rule("neuronxcc kernels are a compile error since NKI 0.4", "import nki"),
    "legacy-mask": Rule("mask= does not exist any more", "end slices at the edge by min()"),
    "legacy-result": Rule("an nki.isa call returns no tile", "name its dst, or accumulate=True"),
    "legacy-transpose": Rule("load_transpose2d is a leftover of NKI 0.1", "use nisa.dma_transpose"),
    "matmul-operator": Rule("the @ operator is refused", "call nisa.nc_matmul", "MatMult"),
    "numpy-dtype": Rule("a NumPy dtype as an argument is refused", "pass a dtype of nki.language"),
    "reordered-loop": Rule("a device loop stands in nl.no_reorder", "move it out of the block"),
    "sub-kernel": Rule("a kernel calls another kernel", "call a function without nki.jit"),
    "tile-store": Rule("storing into a tile by index is refused", "write it as dst of a nisa call"),
}
_PARSED: dict[str, Rule] = {
    "bare-star": Rule("keyword-only parameters are refused", "remove the bare * of the signature"),
    "class-base": Rule(
        "a class inherits from something else than NKIObject alone",
        "put fields and methods into one class(nl.NKIObject), or functions",
    ),
    "comprehension": Rule(
        "comprehensions are refused", "write a for loop", "DictComp GeneratorExp ListComp SetComp"
    ),
    "decorator": Rule("this decorator is unknown to the compiler", "keep nki.jit alone"),
    "del": Rule("del is refused", "let the name go out of scope", "Delete"),
    "dict-key": Rule("dictionary keys must be strings", "use string keys, a tuple or a list"),
    "dynamic-break": Rule("a device loop has no break or continue", "compute its bound before"),
    "global": Rule("global and nonlocal are refused", "pass and return it", "Global Nonlocal"),
    "identity": Rule("is and is not are refused", "use == or !=, also with None", "Is IsNot"),
    "inner-class": Rule("an inner class is refused", "move it to the module", "ClassDef"),
    "inner-def": Rule("an inner function is refused", "move it to the module"),
    "inner-import": Rule(
        "an inner import is refused", "move it to the module", "Import ImportFrom"
    ),
    "lambda": Rule("lambda is refused", "define a function in the module", "Lambda"),
    "loop-body": Rule("the body of a device loop is no function", "define it, and pass its name"),
    "loop-else": Rule("else of a loop is refused", "set a flag in the loop and test it after"),
    "match": Rule("match is refused", "use if and elif", "Match"),
    "membership": Rule("in and not in are refused", "compare with ==, combine with or", "In NotIn"),
    "raise": Rule("raise is refused", "use assert", "Raise"),
    "set": Rule("sets are refused", "use a tuple or a list", "Set"),
    "star-expansion": Rule("* and ** expansion are refused", "write every element out", "Starred"),
    "star-parameters": Rule("*args and **kwargs are refused", "name every parameter"),
    "try": Rule("try is refused", "check before the call, with assert", "Try TryStar"),
    "tuple-attribute": Rule(
        "a tuple is assigned to something else than names", "assign one target a statement"
    ),
    "type-alias": Rule("type is refused", "move it to the module", "TypeAlias"),
    "with-as": Rule("with ... as is refused", "write with without a name"),
    "yield": Rule("yield is refused", "return a tuple", "Yield YieldFrom"),
}
_TRACED: dict[str, Rule] = {
    "dynamic-loop": Rule(
        "dynamic_range and while on a register are gone", "use nl.fori_loop or nl.while_loop"
    ),
    "object-equality": Rule(
        "Python asks a tensor or an object what == means", "use is for None, or compare fields"
    ),
    "register-value": Rule(
        "a register has no value while a kernel is traced",
        "pass it as scalar_offset, or loop with nl.fori_loop or nl.while_loop",
    ),
}
RULES = {
    **_BOTH,
    **{
        name: rule._replace(what=f"{rule.what}, allowed from NKI 0.7 on", line="0.6")
        for name, rule in _PARSED.items()
    },
    **{name: rule._replace(line="0.7") for name, rule in _TRACED.items()},
}
"""By name: of both lines, of the parser of 0.6, of the tracing of 0.7."""
WARNINGS = {"deprecated-loop", "legacy-transpose", "object-equality"}
REFUSED_NODES = {node: name for name, rule in RULES.items() for node in rule.nodes.split()}


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
