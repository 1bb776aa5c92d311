"""The rules of `lint`, and its findings."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["error", "warning"]


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
    "class-base": Rule(
        "a class inherits from something else than NKIObject alone",
        "put fields and methods into one class(nl.NKIObject), or functions",
    ),
    "comprehension": Rule(
        "comprehensions are refused", "write a for loop", "DictComp GeneratorExp ListComp SetComp"
    ),
    "decorator": Rule("this decorator is unknown to the compiler", "keep nki.jit alone"),
    "del": Rule("del is refused", "let the name go out of scope", "Delete"),
    "deprecated-loop": Rule("this loop is deprecated", "use range, nl.fori_loop or nl.while_loop"),
    "dict-key": Rule("dictionary keys must be strings", "use string keys, a tuple or a list"),
    "dynamic-break": Rule("a device loop has no break or continue", "compute its bound before"),
    "enum-literal": Rule(
        "a number or text in the place of an enumeration is refused since NKI 0.3",
        "name the member, as nisa.dge_mode.hwdge",
    ),
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
    "legacy-dtype": Rule("an nki.isa call takes no dtype=", "give dst the dtype"),
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
    "tuple-attribute": Rule(
        "a tuple is assigned to something else than names", "assign one target a statement"
    ),
    "type-alias": Rule("type is refused", "move it to the module", "TypeAlias"),
    "with-as": Rule("with ... as is refused", "write with without a name"),
    "yield": Rule("yield is refused", "return a tuple", "Yield YieldFrom"),
}
WARNINGS = {"deprecated-loop", "legacy-transpose"}
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
